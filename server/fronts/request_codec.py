"""How an InferRequest, its outputs and its error are encoded between a front end and the engine.

Tensors are sent beside it (server/ipc). The properties shared by requests of one kind are a TEMPLATE, sent once; a
SUBMIT has a head of fixed size and then the request's id, or JSON if there is more to send. Used by `remote_engine.py`
and `engine_service.py`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.batching.request import InSequence
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.stream import StreamedAnswer
from penstock.server.hooks.packing import pack, unpack
from penstock.server.ipc.errors import error_from_json, error_to_json
from penstock.server.tracing.trace import context_of

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest, Key

_HEAD = struct.Struct("<BIQQQQQ")
_MAX_UINT64 = (1 << 64) - 1
"""The largest time or priority that is sent; clients may specify larger ones."""
_HAS_EXTRA = 1
"""JSON, and not the id, follows the head."""


class RequestTemplate(NamedTuple):
    """The properties shared by requests: the model's number, and the rest as in InferRequest."""

    model: int
    rows: int
    key: Key
    wanted: tuple[int, ...]


def write_template(template: RequestTemplate) -> bytes:
    """Encode a TEMPLATE."""
    return json.dumps(template).encode()


def read_template(body: bytes) -> RequestTemplate:
    """Decode the result of `write_template`. Raises: ValueError or TypeError."""
    model, rows, key, wanted = json.loads(body)
    tails = tuple([None if tail is None else tuple(map(int, tail)) for tail in key])
    return RequestTemplate(int(model), int(rows), tails, tuple(map(int, wanted)))


def write_submit(request: InferRequest, template: int, extra: Mapping[str, Any] | None = None) -> bytes:
    """Encode the body of a SUBMIT. `extra` is the result of `extra_properties`."""
    values = request.priority, request.start_ns, request.deadline_ns, request.target_ns, request.nbytes
    try:
        head = _HEAD.pack(0 if extra is None else _HAS_EXTRA, template, *values)
    except struct.error:
        head = _HEAD.pack(
            0 if extra is None else _HAS_EXTRA, template, *(min(max(each, 0), _MAX_UINT64) for each in values)
        )
    if extra is None:
        return head + request.id.encode("utf-8", "surrogatepass") if request.id else head
    return head + json.dumps(extra).encode()


def extra_properties(request: InferRequest, *, takes_parameters: bool, forwards_trace: bool) -> dict[str, Any] | None:
    """Return the properties that few requests have; None if there are none.

    `takes_parameters`: its model takes parameters and timeouts, and may give several answers. `forwards_trace`: the
    client's trace context is sent.
    """
    extra: dict[str, Any] = {}
    if request.sequence is not None:
        extra["sequence"] = request.sequence
    if forwards_trace and (context := trace_context(request.context)):
        extra["trace_context"] = context
    if takes_parameters:
        if parameters := getattr(request, "parameters", None):
            extra["parameters"] = parameters
        if timeout_us := getattr(request, "timeout_us", 0):
            extra["timeout_us"] = timeout_us
        if hasattr(request, "answer_sink"):
            extra["several_answers"] = True
    return {**extra, "id": request.id} if extra else None


def template_of(body: bytes) -> int:
    """Return the number of the TEMPLATE that a SUBMIT refers to. Raises: struct.error."""
    number: int = _HEAD.unpack_from(body)[1]
    return number


def read_submit(request: InferRequest, body: bytes) -> bool:
    """Set the properties in a SUBMIT on a request made from its TEMPLATE and tensors.

    Returns: whether it may have several answers. Raises: ValueError, TypeError, struct.error.
    """
    flags, _, request.priority, request.start_ns, request.deadline_ns, request.target_ns, request.nbytes = (
        _HEAD.unpack_from(body)
    )
    if len(body) == _HEAD.size:
        return False
    if not flags:
        request.id = body[_HEAD.size :].decode("utf-8", "surrogatepass")
        return False
    extra = json.loads(body[_HEAD.size :])
    request.id = extra["id"]
    if "sequence" in extra:
        request.sequence = InSequence(*extra["sequence"])
    if "trace_context" in extra:
        request.context = RemoteContext(extra["trace_context"])
    if extra.get("parameters"):
        request.parameters = extra["parameters"]
    if "timeout_us" in extra:
        request.timeout_us = extra["timeout_us"]
    return bool(extra.get("several_answers"))


class RemoteContext:
    """Stands for the call that a request arrived on, which is in another process: its trace context."""

    __slots__ = ("metadata",)

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata


def trace_context(carrier: Any) -> dict[str, str] | None:
    """Return the trace context for RemoteContext, for a request from this call; None if its client does not trace."""
    parent, state = context_of(carrier)
    return {"traceparent": parent, "tracestate": state} if parent else None


def write_answer(answer: StreamedAnswer) -> tuple[bytes, list[Array | None]]:
    """Return the body and the tensors of an ANSWER."""
    document = {
        "names": list(answer.outputs),
        "error": None if answer.error is None else error_to_json(answer.error),
        "final": answer.final,
        "parameters": answer.parameters and dict(answer.parameters),
        "infer_ns": answer.infer_ns,
    }
    return json.dumps(document).encode(), list(answer.outputs.values())


def read_answer(body: bytes, arrays: Sequence[Array | None]) -> StreamedAnswer:
    """Decode the result of `write_answer`."""
    document = json.loads(body)
    error = None if document["error"] is None else error_from_json(document["error"])
    outputs = dict(zip(document["names"], arrays, strict=True))
    return StreamedAnswer(outputs, error, document["final"], document["parameters"], document["infer_ns"])


def pack_outputs(outputs: Sequence[Any]) -> tuple[bytes, list[Array | None]]:
    """Return the body and tensors of a DONE whose outputs are not tensors: sequences and maps, for hooks.

    Raises: TypeError for anything else.
    """
    arrays: list[Array | None] = []
    return json.dumps(pack(outputs, arrays)).encode(), arrays


def write_custom_outputs(outputs: CustomOutputs) -> bytes:
    """Return the body of a DONE whose outputs are CustomOutputs; they are sent as its tensors."""
    return json.dumps({"parameters": outputs.parameters, "mismatch": outputs.mismatch}).encode()


def unpack_outputs(body: bytes, arrays: Sequence[Array | None]) -> list[Any]:
    """Decode the result of `pack_outputs` or `write_custom_outputs`."""
    document = json.loads(body)
    if isinstance(document, dict):
        return CustomOutputs(arrays, document["parameters"], document["mismatch"])
    return [unpack(value, arrays) for value in document]
