"""Layouts: what the bytes of earlier ModelInferRequests said, so that a further one costs a comparison and its data.

A serializer writes fields in order, and the data (`raw_input_contents`) is the last of them: what stands before it is
the same in request after request, but for the id. Only what has been decoded in full and found right is kept. It costs
a quarter of decoding in full (perf/micro_rpc.py: 2.7 us for 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from penstock.backends.errors import InferError
from penstock.batching.request import InferRequest
from penstock.server.v2.said import Ways
from penstock.server.v2.tensors import from_binary

from .wire import field, field_head

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import Sink
    from penstock.server.v2.said import Options

MAX_PREFIX_BYTES = 4096
_KEPT_SIZES = 256
_KEPT_ALIKE = 4
_PATIENCE = 64
_RAW = 7
_VERSION, _ID = 0x12, 0x1A
_MARK = "a mark that no request has for its id"


class _Place(NamedTuple):
    """Where one input's data is, counted from the end of the id. `dtype` None: its elements are read one by one."""

    offset: int
    size: int
    dtype: np.dtype[Any] | None
    elements: int
    shape: tuple[int, ...]
    spec: TensorSpec


class _Layout:
    """One kind of request. `prefix` is all between id and the first tensor's data, `heads` is what is before others."""

    __slots__ = ("heads", "key", "options", "places", "prefix", "rows", "wanted")

    def __init__(self, prefix: bytes, heads: list[tuple[int, bytes]], request: InferRequest, options: Options) -> None:
        self.prefix = prefix
        self.heads = heads
        self.places: list[_Place | None] = []
        self.key = request.key
        self.rows = request.rows
        self.wanted = request.wanted
        self.options = options


class Layouts:
    """The memory of one model as it is named in requests: bounded, and forgotten with the model it was learned from.

    A client whose requests never repeat makes it try to remember less often.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, list[_Layout]] = {}
        self._misses = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_size.values()))

    def find(
        self, model: Model, message: bytes, start: int, request_id: str, sink: Sink
    ) -> tuple[InferRequest, Options] | None:
        """Decode a message whose layout is remembered; the id ends at `start`. Ownership: arrays are views of it."""
        for layout in self._by_size.get(len(message) - start, ()):
            if message.startswith(layout.prefix, start):
                break
        else:
            return None
        for offset, head in layout.heads:
            if not message.startswith(head, start + offset):
                return None
        try:
            inputs = [None if place is None else _array(model, message, start, place) for place in layout.places]
        except InferError:
            # the full decoding finds the same, and says it in full
            return None
        self._misses = 0
        request = InferRequest(model, inputs, layout.rows, layout.key, layout.wanted, sink)
        request.id = request_id
        request.nbytes = len(message)
        return request, layout.options

    def remember(self, request: InferRequest, options: Options, message: bytes, start: int, parsed: Any) -> None:
        """Keep the layout of what `decode` has just passed, where it has one. `parsed` is the message, decoded."""
        self._misses += 1
        if self._misses > _PATIENCE and self._misses % _PATIENCE:
            return
        raws = parsed.raw_input_contents
        heads = [field_head(_RAW, len(raw)) for raw in raws]
        size = sum(map(len, raws)) + sum(map(len, heads))
        first = len(message) - size - start
        if not raws or not 0 <= first <= MAX_PREFIX_BYTES or len(raws) != len(parsed.inputs):
            return
        if isinstance(options.plan, Ways):
            # a lease is one request's, and what is in shared memory is not in the message
            return
        places: list[tuple[int, int]] = []
        offset = first
        for head, raw in zip(heads, raws, strict=True):
            if not message.startswith(head, start + offset):
                return
            offset += len(head)
            places.append((offset, len(raw)))
            offset += len(raw)
        if not _stands_for_itself(message, start, start + first, parsed):
            return
        prefix = message[start : start + places[0][0]]
        others = [(at - len(head), head) for head, (at, _) in zip(heads[1:], places[1:], strict=True)]
        layout = _Layout(prefix, others, request, options)
        by_name = {tensor.name: place for tensor, place in zip(parsed.inputs, places, strict=True)}
        for spec, array in zip(request.model.signature.inputs, request.inputs, strict=True):
            layout.places.append(None if array is None else _place(spec, array, by_name[spec.name]))
        self._keep(len(message) - start, layout)

    def _keep(self, size: int, layout: _Layout) -> None:
        if size not in self._by_size and len(self._by_size) >= _KEPT_SIZES:
            self._by_size.clear()
        alike = self._by_size.setdefault(size, [])
        if len(alike) >= _KEPT_ALIKE:
            alike.pop()
        alike.insert(0, layout)


def _array(model: Model, message: bytes, start: int, place: _Place) -> Array:
    at = start + place.offset
    if place.dtype is not None:
        return np.ndarray(place.shape, place.dtype, message, at)
    raw = memoryview(message)[at : at + place.size]
    return from_binary(model.name, place.spec, list(place.shape), place.elements, raw)


def head_of(message: bytes) -> tuple[int, int, str]:
    """Read the fields before the inputs, as serializers write them.

    Returns: where model name and version end, where the id ends, and the id. Whether the first is right is for who
    knows these bytes.
    Raises: IndexError, UnicodeDecodeError: for anything unusual.
    """
    named = message[1] + 2
    if message[named] == _VERSION:
        named += message[named + 1] + 2
    if message[named] != _ID:
        return named, named, ""
    size = message[named + 1]
    if size >= 0x80:
        raise IndexError
    end = named + 2 + size
    return named, end, message[named + 2 : end].decode()


def names_of(parsed: Any) -> bytes:
    """Give what a serializer writes of model name and version; nothing where `head_of` would not read it."""
    name, version = parsed.model_name.encode(), parsed.model_version.encode()
    if len(name) >= 0x80 or len(version) >= 0x80:
        return b""
    return field(1, name) + (field(2, version) if version else b"")


def _stands_for_itself(message: bytes, start: int, end: int, parsed: Any) -> bool:
    """Whether what is between the id and the data is whole fields, and says nothing of names, id and data.

    Then whatever id stands before it and whatever data comes after it mean what they mean here.
    """
    named, id_end, _ = head_of(message)
    if id_end != start or message[:named] != names_of(parsed):
        return False
    mark = _MARK.encode()
    try:
        alone = type(parsed).FromString(message[:named] + bytes((_ID, len(mark))) + mark + message[start:end])
    except DecodeError:
        return False
    return (
        alone.id == _MARK
        and alone.model_name == parsed.model_name
        and alone.model_version == parsed.model_version
        and not alone.raw_input_contents
    )


def _place(spec: TensorSpec, array: Array, where: tuple[int, int]) -> _Place:
    """BYTES and BOOL are made from the message's values, and numbers are those values."""
    copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
    return _Place(*where, None if copied else array.dtype, array.size, array.shape, spec)
