"""RpcLayouts: the bytes of earlier ModelInferRequests, so that a repeated one costs a comparison and its data.

Serializers write fields in order, with the data (`raw_input_contents`) last: everything before it repeats from request
to request except for the id, as does a whole message whose data is in shared memory. Only messages that were fully
decoded and valid are remembered. This costs a quarter of full decoding (perf/micro_rpc.py: 2.7 us instead of 10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from penstock.backends.errors import InferError
from penstock.server.v2.alike import Alike
from penstock.server.v2.regions import LargeRead, Regions
from penstock.server.v2.shared_tensors import SharedInput, locate
from penstock.server.v2.tensors import from_binary

from .decode import tensor_parameters
from .wire import field, field_head

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Sink
    from penstock.server.v2.call_parameters import Options

_view = np.ndarray
"""CPython does not cache attributes of the numpy module, so each lookup is slow."""
MAX_PREFIX_BYTES = 4096
_KEPT_SIZES = 256
_KEPT_ALIKE = 4
_PATIENCE = 64
_RAW = 7
_VERSION, _ID = 0x12, 0x1A
_MARK = "a mark that no request has for its id"


class _Place(NamedTuple):
    """Where one input's data is, relative to the end of the id. If `dtype` is None, elements are read one by one."""

    offset: int
    size: int
    dtype: np.dtype[Any] | None
    elements: int
    shape: tuple[int, ...]
    spec: TensorSpec


class _Layout(Alike):
    """One kind of request. `prefix` is all between the id and the first tensor's data, `heads` precede the others.

    `views` are the position, dtype and shape of each input, if all of them are numbers in the message.
    """

    __slots__ = ("heads", "places", "prefix", "views")

    prefix: bytes
    heads: list[tuple[int, bytes]]
    places: list[_Place | SharedInput | None]
    views: list[tuple[int, np.dtype[Any], tuple[int, ...]]] | None


class RpcLayouts:
    """The memory of one model as named in requests: bounded, and dropped with the model it was learned from.

    `regions` are those that requests may name. Messages without data are looked up by all of their bytes, others by
    size. For a client whose requests never repeat, it tries to remember less often.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = Regions() if regions is None else regions
        self._by_size: dict[int, list[_Layout]] = {}
        self._whole: dict[bytes, _Layout] = {}
        self._misses = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_size.values())) + len(self._whole)

    def find(
        self, model: Model, message: bytes, start: int, request_id: str, sink: Sink
    ) -> tuple[InferRequest, Options] | None:
        """Decode a message whose layout is remembered; the id ends at `start`. Ownership: arrays are views of it."""
        for layout in self._by_size.get(len(message) - start, ()):
            if message.startswith(layout.prefix, start):
                break
        else:
            whole = self._whole.get(message[start:]) if self._whole else None
            if whole is None:
                return None
            layout = whole
        for offset, head in layout.heads:
            if not message.startswith(head, start + offset):
                return None
        try:
            inputs: list[Array | None] = []
            if layout.views is not None:
                for at, dtype, shape in layout.views:  # as in execution.py, cheaper than a comprehension
                    inputs.append(_view(shape, dtype, message, start + at))
            else:
                inputs = self._inputs(model, message, start, layout.places)
            self._misses = 0
            return layout.request(model, inputs, sink, len(message), request_id)
        except (InferError, LargeRead):
            # full decoding finds the same error, and reports it in full
            return None

    def _inputs(
        self, model: Model, message: bytes, start: int, places: list[_Place | SharedInput | None]
    ) -> list[Array | None]:
        return [None if place is None else self._array(model, message, start, place) for place in places]

    def _array(self, model: Model, message: bytes, start: int, place: _Place | SharedInput) -> Array:
        if isinstance(place, SharedInput):
            return place.fetch(model, self._regions)
        at = start + place.offset
        if place.dtype is not None:
            return np.ndarray(place.shape, place.dtype, message, at)
        raw = memoryview(message)[at : at + place.size]
        return from_binary(model.name, place.spec, list(place.shape), place.elements, raw)

    def remember(self, request: InferRequest, options: Options, message: bytes, start: int, parsed: Any) -> None:
        """Remember the layout of a message that `decode` has just accepted, if it has one. `parsed` is that message."""
        self._misses += 1
        if self._misses > _PATIENCE and self._misses % _PATIENCE:
            return
        raws = parsed.raw_input_contents
        first = len(message) - start - sum([len(field_head(_RAW, len(raw))) + len(raw) for raw in raws])
        if not 0 <= first <= MAX_PREFIX_BYTES or any(tensor.HasField("contents") for tensor in parsed.inputs):
            return
        data = _data_at(message, start, first, raws)
        if data is None or not _stands_for_itself(message, start, start + first, parsed):
            return
        places = self._places(request, parsed, data)
        layout = _Layout(request, options, self._regions, places)
        layout.prefix = message[start : start + (data[0][0] if data else first)]
        heads = [(at, field_head(_RAW, size)) for at, size in data[1:]]
        layout.heads = [(at - len(head), head) for at, head in heads]
        layout.places = places
        numbers = [place for place in places if isinstance(place, _Place) and place.dtype is not None]
        whole = len(numbers) == len(places)
        layout.views = [(each.offset, each.dtype, each.shape) for each in numbers] if whole else None  # type: ignore[misc]
        if data:
            self._keep(len(message) - start, layout)
        else:
            if len(self._whole) >= _KEPT_SIZES:
                self._whole.clear()
            self._whole[layout.prefix] = layout

    def _places(
        self, request: InferRequest, parsed: Any, data: list[tuple[int, int]]
    ) -> list[_Place | SharedInput | None]:  # fmt: skip
        """Return where each input is. Those not in shared memory take the data entries in order."""
        model, left = request.model, iter(data)
        found: dict[str, _Place | SharedInput] = {}
        for tensor in parsed.inputs:
            spec = model.signature.input[tensor.name]
            if "shared_memory_region" in tensor.parameters:
                items = tensor_parameters(tensor)
                found[spec.name] = locate(model, spec, list(tensor.shape), items, self._regions)
            else:
                array: Any = request.inputs[model.signature.inputs.index(spec)]
                found[spec.name] = _place(spec, array, next(left))
        return [found.get(spec.name) for spec in model.signature.inputs]

    def _keep(self, size: int, layout: _Layout) -> None:
        if size not in self._by_size and len(self._by_size) >= _KEPT_SIZES:
            self._by_size.clear()
        alike = self._by_size.setdefault(size, [])
        if len(alike) >= _KEPT_ALIKE:
            alike.pop()
        alike.insert(0, layout)


def _data_at(message: bytes, start: int, first: int, raws: Any) -> list[tuple[int, int]] | None:
    """Return where each raw tensor's data is, relative to `start`, and its size; None if it is not at the end."""
    found: list[tuple[int, int]] = []
    offset = first
    for raw in raws:
        head = field_head(_RAW, len(raw))
        if not message.startswith(head, start + offset):
            return None
        offset += len(head)
        found.append((offset, len(raw)))
        offset += len(raw)
    return found


def head_of(message: bytes) -> tuple[int, int, str]:
    """Read the fields before the inputs, as serializers write them.

    Returns: where model name and version end, where the id ends, and the id. The caller must check that the first is
    right, by comparing those bytes with known ones.
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
    """Return the serialized model name and version; b"" if `head_of` could not read them."""
    name, version = parsed.model_name.encode(), parsed.model_version.encode()
    if len(name) >= 0x80 or len(version) >= 0x80:
        return b""
    return field(1, name) + (field(2, version) if version else b"")


def _stands_for_itself(message: bytes, start: int, end: int, parsed: Any) -> bool:
    """Return whether the bytes between the id and the data are whole fields without names, id or data.

    If so, they keep their meaning with any id before them and any data after them.
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
    """Return the place of an input; BYTES and BOOL are converted from the bytes, and numbers are views of them."""
    copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
    return _Place(*where, None if copied else array.dtype, array.size, array.shape, spec)
