"""The access log of the gRPC lane, for --access-log: one line per answered call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from uvicorn.protocols.utils import get_remote_addr

from penstock.backends.protobuf_fields import fields
from penstock.server.listening.access_log import log_answer

from .call import GrpcCall
from .coded_call import CodedCall
from .method import Call, Method, Status, Unary

if TYPE_CHECKING:
    from penstock.server.http2.frames import Fault
    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest

_TRITON = "/inference.GRPCInferenceService/"
_NAMES = ((f"{_TRITON}RepositoryModel", 2), (f"{_TRITON}Model", 1))
"""The field number of the model name in a message, by the prefix of the path."""
_ID = {f"{_TRITON}ModelInfer": 3}


class LoggedCall(GrpcCall):
    """A call that is logged. `_said` is its status, `_sent` the size of its messages before compression."""

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        super().__init__(connection, stream_id, request)
        self._began_s = time.perf_counter()
        self._client = get_remote_addr(connection.transport)
        self._model, self._request_id = "", request.metadata.get("x-request-id", "")
        self._said, self._sent = Status.OK, 0

    def note(self, message: bytes, name: int, request_id: int) -> None:
        """Record the model name and the request id of a message, from these fields."""
        with suppress(IndexError, KeyError):  # not a valid protobuf message
            for head, start, stop in fields(message, 0, len(message)):
                if head == name << 3 | 2:
                    self._model = message[start:stop].decode("utf-8", "replace")
                elif head == request_id << 3 | 2:
                    self._request_id = message[start:stop].decode("utf-8", "replace")

    def begin(self) -> None:
        """Begin, and log a call that is rejected by its header."""
        super().begin()
        if self.request.refusal is not None:
            self._said = self.request.refusal.status
            self._tell()

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream."""
        if not self.ended:
            self._sent += len(message)
        super().send(message, flag, coding)

    def refuse(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK."""
        if not self.ended:
            self._said = status
        super().refuse(status, text, pushback_ms)

    def send_held(self) -> None:
        """Send the held rejection, if the call is still open."""
        there = self.connection.streams.get(self.stream_id) is self
        super().send_held()
        if there:
            self._tell()

    def lost(self, code: Fault) -> None:
        """Handle the loss of the call; what was sent before is logged."""
        if self.begun and not self.ended:
            self._said = Status.CANCELLED
            self._tell()
        super().lost(code)

    def _last(self, last: bytes) -> None:
        super()._last(last)
        self._tell()

    def _tell(self) -> None:
        asked = f"POST {self.request.path} HTTP/2"
        named = {"model": self._model, "request_id": self._request_id}
        log_answer(self._client, asked, self._said.name, self._began_s, self._sent, named)


class LoggedCodedCall(LoggedCall, CodedCall):
    """A logged call on a port that compresses its answers."""


def noted(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Wrap methods so that calls record the model that their messages name."""
    return {path: _noted(method) for path, method in methods.items()}


def _noted(method: Method) -> Method:
    unary, name = method.unary, next((field for begin, field in _NAMES if method.path.startswith(begin)), 0)
    if unary is None or not name:
        return method
    return Method(method.path, _noting(unary, name, _ID.get(method.path, 0)))


def _noting(unary: Unary, name: int, request_id: int) -> Unary:
    def begin(call: Call, message: bytes) -> None:
        if isinstance(call, LoggedCall):
            call.note(message, name, request_id)
        unary(call, message)

    return begin
