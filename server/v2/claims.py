"""Claims: what the head of an inference call says, and the routes that heads name. Made by `inference.py`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.http.coding import choose_coding
from penstock.server.http.head import HttpError

from .call_parameters import JSON, Classes, PerOutputPlan, version_of
from .finish import LARGE_ELEMENTS, is_much, ways_of
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

_JSON_TIMES = 4
"""Approximate size of numbers as JSON, relative to their binary size."""
_NUMBER = re.compile("[0-9]{1,18}")


def version_in(path: bytes | None) -> str:
    """Return the version in a path, "" if there is none."""
    try:
        return version_of((path or b"").decode())
    except InferError as error:
        raise HttpError(400, error.message) from None


class ModelRoute:
    """One model as named in a path. `model` is valid while `generation` equals the Engine's.

    `counted`: it takes BYTES, whose elements are walked one by one in either form. `bulky`: its answers may be large
    enough to be encoded on a thread. `hooked`: its requests take the longer path. `decoupled`: a request may have
    several answers.
    """

    __slots__ = (
        "bulky", "counted", "decoupled", "encoder", "generation", "hooked", "layouts", "model", "name", "version",
    )  # fmt: skip

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.generation = -1
        self.model: Model | None = None
        self.encoder: Encoder | None = None
        self.hooked = False
        self.decoupled = False
        self.layouts = Layouts()
        self.counted = False
        self.bulky = True


class InferenceClaim:
    """What a head says about a call: its route and the relevant header fields. Kept with the head's bytes.

    `forwarded` are the parameters made from header fields; `refusal` is the error if one of them is not allowed.
    """

    __slots__ = (
        "accept", "coding", "forwarded", "header_bytes", "header_text", "plain", "predict", "refusal", "request_id",
        "route",
    )  # fmt: skip

    def __init__(self, route: ModelRoute, head: Head, forwarding: Forwarding | None, *, predict: bool) -> None:
        self.route = route
        self.forwarded: dict[str, str] = {}
        self.refusal: InferError | None = None
        if forwarding is not None:
            try:
                self.forwarded = forwarding.parameters(head.header)
            except InferError as error:
                self.refusal = error
        self.predict = predict
        self.coding = head.header.get(b"content-encoding", b"").strip().lower()
        self.accept = choose_coding(head.header.get(b"accept-encoding", b""))
        self.request_id = head.header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.header_text = head.header.get(b"inference-header-content-length", b"").strip().decode("latin-1")
        self.header_bytes = int(self.header_text) if _NUMBER.fullmatch(self.header_text) else -1
        self.plain = (
            not (self.coding or predict or self.forwarded or self.refusal)
            and (not self.header_text or self.header_bytes > 0)
        )  # fmt: skip


def is_bulky(model: Model) -> bool:
    """Return whether a model's answers may be large according to its signature, or have outputs unknown to it."""
    if model.spec.takes_parameters:
        return True
    size = 0
    for position in model.all_outputs:
        spec = model.signature.outputs[position]
        dims = spec.shape[1:] if model.signature.batched else spec.shape
        size += math.prod(dims) * model.request_rows
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
    for way, array in zip(ways_of(plan, len(outputs)), outputs, strict=True):
        if array is None:
            continue
        if type(way) is Lease:
            large = array.nbytes > INLINE_BYTES and not way.holds(array)
        elif type(way) is Classes:
            large = is_much(way.count, array)
        else:
            strings = array.dtype.hasobject
            numbers += array.size if strings or way is JSON else 0
            nbytes += array.nbytes
            large = strings and way is JSON and _is_long(array)
        if large or numbers >= LARGE_ELEMENTS or nbytes > INLINE_BYTES:
            return True
    return False


def json_size(plan: Plan, outputs: Sequence[Any]) -> int:
    """Estimate how many bytes of an answer are JSON."""
    ways = zip(ways_of(plan, len(outputs)), outputs, strict=True)
    return _JSON_TIMES * sum([int(array.nbytes) for way, array in ways if way is JSON and array is not None])


def _is_long(array: Array) -> bool:
    return sum(map(len, array.ravel().tolist())) >= 16 * LARGE_ELEMENTS


def is_long(claim: InferenceClaim, body: bytes) -> bool:
    """Return whether reading a body would block the event loop: JSON and strings are walked, other tensors are not."""
    return (len(body) if claim.header_bytes < 0 or claim.route.counted else claim.header_bytes) >= LARGE_BYTES


def bad_header(claim: InferenceClaim, body: bytes) -> InferError:
    """Return the error for an invalid JSON length."""
    if claim.header_bytes < 0:
        text = f"Unable to parse Inference-Header-Content-Length, got: {claim.header_text}"
    else:
        text = f"inference header size should be in range (0, {len(body)}), got: {claim.header_text}"
    return InferError(Code.INVALID, text)
