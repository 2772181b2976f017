"""MessageCodecs: the parts of messages that a walk reads or writes, in JSON and in protobuf. Pure.

JSON keeps its numbers: it is parsed into Python's int and float, and encoded again only if something is added.
Source: Seldon Core 1.17.1, the executor; seldon.protos.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.server.seldon.messages import PayloadKind
from penstock.server.seldon.pages import JSON
from penstock.server.seldon.protos import message_class
from penstock.server.v2.rpc.wire import field

from .nodes import MetaMode, Predictor

Dict = dict[str, Any]
PUID = "seldon-puid"
_HOP_HEADERS = (b"host", b"content-type", b"content-length", b"transfer-encoding", b"trailer", PUID.encode())
"""Header fields of a request that are not passed on to the calls of nodes."""


class Message(NamedTuple):
    """What is passed between nodes. `content_type` is that of a body over HTTP."""

    body: bytes
    content_type: bytes = JSON


class GraphError(Exception):
    """The orchestrator's own error, as a sentence; over gRPC its status is UNKNOWN."""

    def __init__(self, text: str, status: int = 500) -> None:
        super().__init__(text)
        self.status = status if 400 <= status < 600 else 500


class WalkRecord(NamedTuple):
    """What a walk adds to an answer: the child each node chose (-1: all), the images it passed, and its id."""

    routing: Mapping[str, int]
    path: Mapping[str, str]
    puid: str


class MessageCodec(Protocol):
    """One encoding of messages. `ok_status` is the status of a successful answer."""

    ok_status: int

    def limit_s(self, predictor: Predictor) -> float:
        """Return the limit for a call of a node. Units: seconds, 0 for none."""

    def payload(self, message: Message, *, with_headers: bool = False) -> tuple[PayloadKind, bytes]:
        """Return what a worker is sent for a message; `with_headers`: with the headers of its request, if any."""

    def route(self, message: Message) -> int:
        """Decode a router's answer. Raises: GraphError."""

    def combine(self, messages: Sequence[Message]) -> Message:
        """Combine messages for `aggregate`. Raises: GraphError."""

    def routing(self, feedback: Message) -> Mapping[str, Any]:
        """Return the routing of the request that a feedback is for; empty if it is not given."""

    def add_meta(self, message: Message, record: WalkRecord, meta_mode: MetaMode) -> Message:
        """Add the walk's notes to an answer."""

    def reason(self, message: Message) -> str:
        """Return why a node failed, from its answer."""

    def read(self, message: Message) -> Dict:
        """Return a message in its JSON form. Raises: GraphError."""

    def write(self, message: Dict) -> Message:
        """Encode such a message."""


class JsonCodec:
    """Messages over HTTP. `fields` are the headers of the walk's request, with lower-case names; `puid` is its id."""

    ok_status = 200

    def __init__(self, fields: Sequence[tuple[bytes, bytes]] = (), puid: str = "") -> None:
        self._fields = fields
        self._puid = puid

    def limit_s(self, predictor: Predictor) -> float:
        """Return the limit for REST."""
        return predictor.rest_limit_s

    def payload(self, message: Message, *, with_headers: bool = False) -> tuple[PayloadKind, bytes]:
        """Return the body, with its content type if that is not JSON, and the headers if requested.

        Source: executor/api/rest/client.go, addHeaders, and server.go, puidHeader.
        """
        if message.content_type == JSON and not with_headers:
            return PayloadKind.JSON, message.body
        line: Dict = {"method": "POST", "type": message.content_type.decode("latin-1"), "query": ""}
        if with_headers:
            forwarded = [pair for pair in self._fields if pair[0] not in _HOP_HEADERS]
            headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in forwarded]
            line["headers"] = [*headers, [PUID, self._puid]]
        return PayloadKind.HTTP, json.dumps(line).encode() + b"\n" + message.body

    def reason(self, message: Message) -> str:
        """Return the `info` of its status."""
        try:
            return str(json.loads(message.body)["status"]["info"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return excerpt(message.body)

    def read(self, message: Message) -> Dict:
        """Parse JSON."""
        try:
            found = json.loads(message.body)
        except ValueError:
            raise GraphError("a message is not JSON") from None
        except RecursionError:
            raise GraphError("a message is nested too deeply") from None
        if not isinstance(found, dict):
            raise GraphError("a message is not a JSON object")
        return found

    def write(self, message: Dict) -> Message:
        """Encode JSON as components do."""
        return Message(json.dumps(message, sort_keys=True, separators=(",", ":")).encode() + b"\n")

    def route(self, message: Message) -> int:
        """Return the first number of the array; a bare list of numbers counts as one."""
        try:
            found = json.loads(message.body)
            content: Any = found.get("data") if isinstance(found, dict) else {"ndarray": found}
            if content is None:
                return -1
            array = content["tensor"]["values"] if "tensor" in content else content["ndarray"]
            first = array[0]
            return int(first[0] if isinstance(first, list) else first)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            raise GraphError(f"the router's answer has no route: {excerpt(message.body)}") from None

    def combine(self, messages: Sequence[Message]) -> Message:
        """Return a list of the unchanged bodies."""
        if any(message.content_type != JSON for message in messages):
            raise GraphError("the messages to combine are not JSON")
        return Message(b"[" + b",".join([message.body.strip() for message in messages]) + b"]")

    def routing(self, feedback: Message) -> Mapping[str, Any]:
        """Return `response.meta.routing`."""
        try:
            found = json.loads(feedback.body)["response"]["meta"]["routing"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def add_meta(self, message: Message, record: WalkRecord, meta_mode: MetaMode) -> Message:
        """Add to `meta`; anything but a Seldon message stays as it is."""
        try:
            document = json.loads(message.body) if message.content_type == JSON else None
        except (ValueError, RecursionError):
            return message
        if not isinstance(document, dict):
            return message
        meta = document.setdefault("meta", {})
        if not isinstance(meta, dict):
            return message
        _add_to_meta(meta, record, meta_mode)
        return self.write(document)


class ProtoCodec:
    """Messages over gRPC: SeldonMessage, Feedback, and lists of them."""

    ok_status = 0

    def limit_s(self, predictor: Predictor) -> float:
        """Return the limit for gRPC."""
        return predictor.grpc_limit_s

    def payload(self, message: Message, *, with_headers: bool = False) -> tuple[PayloadKind, bytes]:
        """Return the unchanged message: it has no headers."""
        return PayloadKind.PROTO, message.body

    def reason(self, message: Message) -> str:
        """Return its text."""
        return excerpt(message.body)

    def read(self, message: Message) -> Dict:
        """Decode a SeldonMessage."""
        from google.protobuf import json_format

        try:
            found: Dict = json_format.MessageToDict(self._parse(message.body))
        except json_format.Error as error:
            raise GraphError(f"a message cannot be read: {error}") from None
        return found

    def write(self, message: Dict) -> Message:
        """Encode a SeldonMessage."""
        from google.protobuf import json_format

        try:
            made = json_format.ParseDict(message, message_class("SeldonMessage")(), ignore_unknown_fields=True)
        except (json_format.Error, OverflowError) as error:
            raise GraphError(f"a message cannot be written: {error}") from None
        return Message(made.SerializeToString())

    def route(self, message: Message) -> int:
        """Return the first number of the array."""
        content = self._parse(message.body).data
        try:
            if content.WhichOneof("data_oneof") == "tensor":
                return int(content.tensor.values[0])
            if content.WhichOneof("data_oneof") == "ndarray":
                first = content.ndarray.values[0]
                nested = first.WhichOneof("kind") == "list_value"
                return int(first.list_value.values[0].number_value if nested else first.number_value)
        except (ValueError, IndexError, OverflowError):
            raise GraphError("the router's answer has no route") from None
        return -1

    def combine(self, messages: Sequence[Message]) -> Message:
        """Encode a SeldonMessageList: field 1, once for each message."""
        return Message(b"".join([field(1, each.body) for each in messages]))

    def routing(self, feedback: Message) -> Mapping[str, Any]:
        """Return `response.meta.routing`."""
        found = message_class("Feedback")()
        try:
            found.ParseFromString(feedback.body)
        except Exception:  # noqa: BLE001 - protobuf's DecodeError; the component reports what is wrong
            return {}
        return dict(found.response.meta.routing)

    def add_meta(self, message: Message, record: WalkRecord, meta_mode: MetaMode) -> Message:
        """Add to `meta`."""
        found = self._parse(message.body)
        found.meta.routing.update(record.routing)
        if meta_mode is MetaMode.ALL:
            found.meta.puid = found.meta.puid or record.puid
            for name, image in record.path.items():
                if name not in found.meta.requestPath:
                    found.meta.requestPath[name] = image
        return Message(found.SerializeToString())

    @staticmethod
    def _parse(body: bytes) -> Any:
        found = message_class("SeldonMessage")()
        try:
            found.ParseFromString(body)
        except Exception:  # noqa: BLE001 - protobuf's DecodeError
            raise GraphError("a message is not a SeldonMessage") from None
        return found


def new_puid() -> str:
    """Make an id for a request without one, as the executor does."""
    return str(uuid.uuid4())


def _add_to_meta(meta: Dict, record: WalkRecord, meta_mode: MetaMode) -> None:
    meta["routing"] = dict(record.routing)
    if meta_mode is MetaMode.ALL:
        meta.setdefault("puid", record.puid)
        path = meta.get("requestPath")
        meta["requestPath"] = {**record.path, **(path if isinstance(path, dict) else {})}


def excerpt(body: bytes) -> str:
    """Return the beginning of a message as text."""
    text = body[:80].decode("utf-8", "replace").strip()
    return text if len(body) <= 80 else f"{text}..."
