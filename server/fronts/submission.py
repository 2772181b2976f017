"""Submission: how an InferRequest, its outputs and its error are encoded between a front end and the engine.

Tensors are sent beside it (server/ipc). The properties shared by requests of one kind are a FORM, sent once; a SUBMIT
has a head of fixed size and then the request's id, or JSON if there is more to send. Used by `remote_engine.py` and
`engine_service.py`.
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
from penstock.server.ipc.refusals import error_of, said_of
from penstock.server.tracing.trace import context_of

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest, Key

_HEAD = struct.Struct("<BIQQQQQ")
_FAR = (1 << 64) - 1
"""The largest time or priority that is sent; clients may specify larger ones."""
_MORE = 1
"""JSON, and not the id, follows the head."""


class RequestTemplate(NamedTuple):
    """The properties shared by requests: the model's number, and the rest as in InferRequest."""

    model: int
    rows: int
    key: Key
    wanted: tuple[int, ...]


def write_form(form: RequestTemplate) -> bytes:
    """Encode a FORM."""
    return json.dumps(form).encode()


def read_form(body: bytes) -> RequestTemplate:
    """Decode the result of `write_form`. Raises: ValueError or TypeError."""
    model, rows, key, wanted = json.loads(body)
    tails = tuple([None if tail is None else tuple(map(int, tail)) for tail in key])
    return RequestTemplate(int(model), int(rows), tails, tuple(map(int, wanted)))


def write_submit(request: InferRequest, form: int, more: Mapping[str, Any] | None = None) -> bytes:
    """Encode the body of a SUBMIT. `more` is the result of `said_more`."""
    said = request.priority, request.start_ns, request.deadline_ns, request.target_ns, request.nbytes
    try:
        head = _HEAD.pack(0 if more is None else _MORE, form, *said)
    except struct.error:
        head = _HEAD.pack(0 if more is None else _MORE, form, *(min(max(each, 0), _FAR) for each in said))
    if more is None:
        return head + request.id.encode("utf-8", "surrogatepass") if request.id else head
    return head + json.dumps(more).encode()


def said_more(request: InferRequest, *, coded: bool, carried: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return the properties that few requests have; None if there are none. `carried` is the request's trace context.

    `coded`: its model takes parameters and timeouts, and may give several answers.
    """
    more: dict[str, Any] = {}
    if request.sequence is not None:
        more["sequence"] = request.sequence
    if carried:
        more["carried"] = carried
    if coded:
        if parameters := getattr(request, "parameters", None):
            more["parameters"] = parameters
        if timeout_us := getattr(request, "timeout_us", 0):
            more["timeout_us"] = timeout_us
        if hasattr(request, "answer_sink"):
            more["several"] = True
    return {**more, "id": request.id} if more else None


def form_of(body: bytes) -> int:
    """Return the number of the FORM that a SUBMIT refers to. Raises: struct.error."""
    number: int = _HEAD.unpack_from(body)[1]
    return number


def read_submit(request: InferRequest, body: bytes) -> bool:
    """Set the properties in a SUBMIT on a request made from its FORM and tensors.

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
    said = json.loads(body[_HEAD.size :])
    request.id = said["id"]
    if "sequence" in said:
        request.sequence = InSequence(*said["sequence"])
    if "carried" in said:
        request.context = Carried(said["carried"])
    if said.get("parameters"):
        request.parameters = said["parameters"]
    if "timeout_us" in said:
        request.timeout_us = said["timeout_us"]
    return bool(said.get("several"))


class Carried:
    """Stands for the call that a request arrived on, which is in another process: its trace context."""

    __slots__ = ("metadata",)

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata


def trace_context(carrier: Any) -> dict[str, str] | None:
    """Return the trace context for Carried, for a request from this call; None if its client does not trace."""
    parent, state = context_of(carrier)
    return {"traceparent": parent, "tracestate": state} if parent else None


def write_answer(told: StreamedAnswer) -> tuple[bytes, list[Array | None]]:
    """Return the body and the tensors of an ANSWER."""
    said = {
        "names": list(told.outputs),
        "error": None if told.error is None else said_of(told.error),
        "final": told.final,
        "parameters": told.parameters and dict(told.parameters),
        "infer_ns": told.infer_ns,
    }
    return json.dumps(said).encode(), list(told.outputs.values())


def read_answer(body: bytes, arrays: Sequence[Array | None]) -> StreamedAnswer:
    """Decode the result of `write_answer`."""
    said = json.loads(body)
    error = None if said["error"] is None else error_of(said["error"])
    outputs = dict(zip(said["names"], arrays, strict=True))
    return StreamedAnswer(outputs, error, said["final"], said["parameters"], said["infer_ns"])


def packed_outputs(outputs: Sequence[Any]) -> tuple[bytes, list[Array | None]]:
    """Return the body and tensors of a DONE whose outputs are not tensors: sequences and maps, for hooks.

    Raises: TypeError for anything else.
    """
    arrays: list[Array | None] = []
    return json.dumps(pack(outputs, arrays)).encode(), arrays


def own_said(outputs: CustomOutputs) -> bytes:
    """Return the body of a DONE whose outputs are user code's own; they are sent as its tensors."""
    return json.dumps({"parameters": outputs.parameters, "wrong": outputs.mismatch}).encode()


def unpacked_outputs(body: bytes, arrays: Sequence[Array | None]) -> list[Any]:
    """Decode the result of `packed_outputs` or `own_said`."""
    said = json.loads(body)
    if isinstance(said, dict):
        return CustomOutputs(arrays, said["parameters"], said["wrong"])
    return [unpack(written, arrays) for written in said]
