"""Claims: what the head of an inference call says, and the routes that heads name. Made by `inference.py`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.http.coding import choose_coding
from penstock.server.http.head import HttpError

from .call_parameters import JSON, Classes, PerOutputPlan, parse_version
from .finish import LARGE_ELEMENTS, is_slow_to_classify, modes_of
from .layout import Layouts
from .regions import INLINE_BYTES, Lease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.server.http.head import Head

    from .call_parameters import Plan
    from .encode import Encoder
    from .forwarding import Forwarding

_JSON_SIZE_FACTOR = 4
"""Approximate size of numbers as JSON, relative to their binary size."""
_NUMBER = re.compile("[0-9]{1,18}")


def path_version(path: bytes | None) -> str:
    """Return the version in a path, "" if there is none."""
    try:
        return parse_version((path or b"").decode())
    except InferError as error:
        raise HttpError(400, error.message) from None


class ModelRoute:
    """One model as named in a path. `model` is valid while `generation` equals the Engine's.

    `has_strings`: it takes BYTES, whose elements are walked one by one in either form. `may_answer_large`: its answers
    may be large enough to be encoded on a thread. `needs_task`: its requests take the longer path. `decoupled`: a
    request may have several answers.
    """

    __slots__ = (
        "decoupled", "encoder", "generation", "has_strings", "layouts", "may_answer_large", "model", "name",
        "needs_task", "version",
    )  # fmt: skip

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.generation = -1
        self.model: Model | None = None
        self.encoder: Encoder | None = None
        self.needs_task = False
        self.decoupled = False
        self.layouts = Layouts()
        self.has_strings = False
        self.may_answer_large = True


class InferenceClaim:
    """What a head says about a call: its route and the relevant header fields. Kept with the head's bytes.

    `forwarded` are the parameters made from header fields; `error` is the error if one of them is not allowed.
    """

    __slots__ = (
        "answer_coding", "coding", "error", "forwarded", "header_bytes", "header_text", "is_predict", "is_simple",
        "request_id", "route",
    )  # fmt: skip

    def __init__(self, route: ModelRoute, head: Head, forwarding: Forwarding | None, *, predict: bool) -> None:
        self.route = route
        self.forwarded: dict[str, str] = {}
        self.error: InferError | None = None
        if forwarding is not None:
            try:
                self.forwarded = forwarding.from_header(head.header)
            except InferError as error:
                self.error = error
        self.is_predict = predict
        self.coding = head.header.get(b"content-encoding", b"").strip().lower()
        self.answer_coding = choose_coding(head.header.get(b"accept-encoding", b""))
        self.request_id = head.header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.header_text = head.header.get(b"inference-header-content-length", b"").strip().decode("latin-1")
        self.header_bytes = int(self.header_text) if _NUMBER.fullmatch(self.header_text) else -1
        self.is_simple = (
            not (self.coding or predict or self.forwarded or self.error)
            and (not self.header_text or self.header_bytes > 0)
        )  # fmt: skip


def may_answer_large(model: Model) -> bool:
    """Return whether a model's answers may be large according to its signature, or have outputs unknown to it."""
    if model.spec.reads_parameters:
        return True
    size = 0
    for position in model.all_outputs:
        spec = model.signature.outputs[position]
        dims = spec.shape[1:] if model.signature.batched else spec.shape
        size += math.prod(dims) * model.max_request_rows
        if spec.datatype == "BYTES" or -1 in dims or size >= LARGE_ELEMENTS:
            return True
    return False


def is_large(plan: Plan, outputs: Sequence[Any]) -> bool:
    """Return whether encoding an answer would block the event loop."""
    if len(outputs) == 1 and type(plan) is not PerOutputPlan:
        array = outputs[0]  # the common case, at half the cost of the general one
        if array is not None and array.size < LARGE_ELEMENTS and not array.dtype.hasobject:
            return False
    numbers = nbytes = 0
    for mode, array in zip(modes_of(plan, len(outputs)), outputs, strict=True):
        if array is None:
            continue
        if type(mode) is Lease:
            large = array.nbytes > INLINE_BYTES and not mode.is_same_memory(array)
        elif type(mode) is Classes:
            large = is_slow_to_classify(mode.count, array)
        else:
            strings = array.dtype.hasobject
            numbers += array.size if strings or mode is JSON else 0
            nbytes += array.nbytes
            large = strings and mode is JSON and _has_long_strings(array)
        if large or numbers >= LARGE_ELEMENTS or nbytes > INLINE_BYTES:
            return True
    return False


def json_size(plan: Plan, outputs: Sequence[Any]) -> int:
    """Estimate how many bytes of an answer are JSON."""
    modes = zip(modes_of(plan, len(outputs)), outputs, strict=True)
    return _JSON_SIZE_FACTOR * sum([int(array.nbytes) for mode, array in modes if mode is JSON and array is not None])


def _has_long_strings(array: Array) -> bool:
    return sum(map(len, array.ravel().tolist())) >= 16 * LARGE_ELEMENTS


def is_slow_to_read(claim: InferenceClaim, body: bytes) -> bool:
    """Return whether reading a body would block the event loop: JSON and strings are walked, other tensors are not."""
    return (len(body) if claim.header_bytes < 0 or claim.route.has_strings else claim.header_bytes) >= LARGE_BYTES


def invalid_header(claim: InferenceClaim, body: bytes) -> InferError:
    """Return the error for an invalid JSON length."""
    if claim.header_bytes < 0:
        text = f"Unable to parse Inference-Header-Content-Length, got: {claim.header_text}"
    else:
        text = f"inference header size should be in range (0, {len(body)}), got: {claim.header_text}"
    return InferError(Code.INVALID, text)
