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
from penstock.server.v2.regions import LargeRead, Regions
from penstock.server.v2.request_template import RequestTemplate
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
_MAX_SIZES = 256
_MAX_LAYOUTS_PER_SIZE = 4
_MAX_MISSES = 64
_RAW = 7
_VERSION, _ID = 0x12, 0x1A
_PLACEHOLDER_ID = "a mark that no request has for its id"


class _InputLocation(NamedTuple):
    """Where one input's data is, relative to the end of the id. If `dtype` is None, elements are read one by one."""

    offset: int
    size: int
    dtype: np.dtype[Any] | None
    elements: int
    shape: tuple[int, ...]
    spec: TensorSpec


class _MessageTemplate(RequestTemplate):
    """One kind of request. `prefix` is all between the id and the first tensor's data, `heads` precede the others.

    `views` are the position, dtype and shape of each input, if all of them are numbers in the message.
    """

    __slots__ = ("heads", "locations", "prefix", "views")

    prefix: bytes
    heads: list[tuple[int, bytes]]
    locations: list[_InputLocation | SharedInput | None]
    views: list[tuple[int, np.dtype[Any], tuple[int, ...]]] | None


class RpcLayouts:
    """The memory of one model as named in requests: bounded, and dropped with the model it was learned from.

    `regions` are those that requests may name. Messages without data are looked up by all of their bytes, others by
    size. For a client whose requests never repeat, it tries to remember less often.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = Regions() if regions is None else regions
        self._by_size: dict[int, list[_MessageTemplate]] = {}
        self._without_data: dict[bytes, _MessageTemplate] = {}
        self._misses = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_size.values())) + len(self._without_data)

    def find(
        self, model: Model, message: bytes, start: int, request_id: str, sink: Sink
    ) -> tuple[InferRequest, Options] | None:
        """Decode a message whose layout is remembered; the id ends at `start`. Ownership: arrays are views of it."""
        for layout in self._by_size.get(len(message) - start, ()):
            if message.startswith(layout.prefix, start):
                break
        else:
            template = self._without_data.get(message[start:]) if self._without_data else None
            if template is None:
                return None
            layout = template
        for offset, head in layout.heads:
            if not message.startswith(head, start + offset):
                return None
        try:
            inputs: list[Array | None] = []
            if layout.views is not None:
                for offset, dtype, shape in layout.views:  # as in execution.py, cheaper than a comprehension
                    inputs.append(_view(shape, dtype, message, start + offset))
            else:
                inputs = self._make_inputs(model, message, start, layout.locations)
            self._misses = 0
            return layout.make_request(model, inputs, sink, len(message), request_id)
        except (InferError, LargeRead):
            # full decoding finds the same error, and reports it in full
            return None

    def _make_inputs(
        self, model: Model, message: bytes, start: int, locations: list[_InputLocation | SharedInput | None]
    ) -> list[Array | None]:
        return [
            None if location is None else self._make_array(model, message, start, location) for location in locations
        ]

    def _make_array(self, model: Model, message: bytes, start: int, location: _InputLocation | SharedInput) -> Array:
        if isinstance(location, SharedInput):
            return location.fetch(model, self._regions)
        offset = start + location.offset
        if location.dtype is not None:
            return np.ndarray(location.shape, location.dtype, message, offset)
        raw = memoryview(message)[offset : offset + location.size]
        return from_binary(model.name, location.spec, list(location.shape), location.elements, raw)

    def add(self, request: InferRequest, options: Options, message: bytes, start: int, parsed: Any) -> None:
        """Remember the layout of a message that `decode` has just accepted, if it has one. `parsed` is that message."""
        self._misses += 1
        if self._misses > _MAX_MISSES and self._misses % _MAX_MISSES:
            return
        raws = parsed.raw_input_contents
        first = len(message) - start - sum([len(field_head(_RAW, len(raw))) + len(raw) for raw in raws])
        if not 0 <= first <= MAX_PREFIX_BYTES or any(tensor.HasField("contents") for tensor in parsed.inputs):
            return
        data = _locate_data(message, start, first, raws)
        if data is None or not _is_self_contained(message, start, start + first, parsed):
            return
        locations = self._locate_inputs(request, parsed, data)
        layout = _MessageTemplate(request, options, self._regions, locations)
        layout.prefix = message[start : start + (data[0][0] if data else first)]
        heads = [(offset, field_head(_RAW, size)) for offset, size in data[1:]]
        layout.heads = [(offset - len(head), head) for offset, head in heads]
        layout.locations = locations
        numbers = [
            location for location in locations if isinstance(location, _InputLocation) and location.dtype is not None
        ]
        all_numbers = len(numbers) == len(locations)
        layout.views = [(each.offset, each.dtype, each.shape) for each in numbers] if all_numbers else None  # type: ignore[misc]
        if data:
            self._store(len(message) - start, layout)
        else:
            if len(self._without_data) >= _MAX_SIZES:
                self._without_data.clear()
            self._without_data[layout.prefix] = layout

    def _locate_inputs(
        self, request: InferRequest, parsed: Any, data: list[tuple[int, int]]
    ) -> list[_InputLocation | SharedInput | None]:  # fmt: skip
        """Return where each input is. Those not in shared memory take the data entries in order."""
        model, data_positions = request.model, iter(data)
        locations: dict[str, _InputLocation | SharedInput] = {}
        for tensor in parsed.inputs:
            spec = model.signature.input[tensor.name]
            if "shared_memory_region" in tensor.parameters:
                items = tensor_parameters(tensor)
                locations[spec.name] = locate(model, spec, list(tensor.shape), items, self._regions)
            else:
                array: Any = request.inputs[model.signature.inputs.index(spec)]
                locations[spec.name] = _location_of(spec, array, next(data_positions))
        return [locations.get(spec.name) for spec in model.signature.inputs]

    def _store(self, size: int, layout: _MessageTemplate) -> None:
        if size not in self._by_size and len(self._by_size) >= _MAX_SIZES:
            self._by_size.clear()
        layouts = self._by_size.setdefault(size, [])
        if len(layouts) >= _MAX_LAYOUTS_PER_SIZE:
            layouts.pop()
        layouts.insert(0, layout)


def _locate_data(message: bytes, start: int, first: int, raws: Any) -> list[tuple[int, int]] | None:
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


def read_head(message: bytes) -> tuple[int, int, str]:
    """Read the fields before the inputs, as serializers write them.

    Returns: where model name and version end, where the id ends, and the id. The caller must check that the first is
    right, by comparing those bytes with known ones.
    Raises: IndexError, UnicodeDecodeError: for anything unusual.
    """
    names_end = message[1] + 2
    if message[names_end] == _VERSION:
        names_end += message[names_end + 1] + 2
    if message[names_end] != _ID:
        return names_end, names_end, ""
    size = message[names_end + 1]
    if size >= 0x80:
        raise IndexError
    end = names_end + 2 + size
    return names_end, end, message[names_end + 2 : end].decode()


def encode_names(parsed: Any) -> bytes:
    """Return the serialized model name and version; b"" if `read_head` could not read them."""
    name, version = parsed.model_name.encode(), parsed.model_version.encode()
    if len(name) >= 0x80 or len(version) >= 0x80:
        return b""
    return field(1, name) + (field(2, version) if version else b"")


def _is_self_contained(message: bytes, start: int, end: int, parsed: Any) -> bool:
    """Return whether the bytes between the id and the data are whole fields without names, id or data.

    If so, they keep their meaning with any id before them and any data after them.
    """
    names_end, id_end, _ = read_head(message)
    if id_end != start or message[:names_end] != encode_names(parsed):
        return False
    placeholder = _PLACEHOLDER_ID.encode()
    try:
        reparsed = type(parsed).FromString(
            message[:names_end] + bytes((_ID, len(placeholder))) + placeholder + message[start:end]
        )
    except DecodeError:
        return False
    return (
        reparsed.id == _PLACEHOLDER_ID
        and reparsed.model_name == parsed.model_name
        and reparsed.model_version == parsed.model_version
        and not reparsed.raw_input_contents
    )


def _location_of(spec: TensorSpec, array: Array, position: tuple[int, int]) -> _InputLocation:
    """Return the place of an input; BYTES and BOOL are converted from the bytes, and numbers are views of them."""
    is_copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
    return _InputLocation(*position, None if is_copied else array.dtype, array.size, array.shape, spec)
