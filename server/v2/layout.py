"""Layouts: what the JSON of earlier requests said, remembered by its bytes.

A client sends the same names, shapes and options again and again; only the data is new. So what stands around the
data is decoded and checked once, and each further request costs one look-up and its data (perf/micro.py: 1.9 us for a
JSON row where the whole document takes 2.6, and 1.2 us for a binary tensor where it takes 4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from penstock.batching.request import InferRequest

from .parsing import numbers_of

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Sink

    from .regions import Regions
    from .said import Options

KEPT = 256
MAX_JSON_BYTES = 4096
MAX_ROW_BYTES = 65536
MANY_BYTES = 256
"""From this size on a list of numbers goes from simdjson into a buffer: 3 us for 32 numbers, as orjson and numpy take,
and 11 against 37 for 512, where the whole document takes 19."""
_DATA = b'"data":'
_FLOATS = {"FP32", "FP64"}
_NUMBERS = {float, int}
_PATIENCE = 64


class _Place(NamedTuple):
    """Where one input's bytes are in the body, and what they are."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Said:
    """What requests with the same JSON have in common. Its slots are read twice as fast as a named tuple's members."""

    __slots__ = ("id", "key", "options", "rows", "wanted")

    def __init__(self, request: InferRequest, options: Options) -> None:
        self.id = request.id
        self.key = request.key
        self.options = options
        self.rows = request.rows
        self.wanted = request.wanted

    def request(self, model: Model, inputs: list[Array | None], sink: Sink, nbytes: int) -> InferRequest:
        request = InferRequest(model, inputs, self.rows, self.key, self.wanted, sink)
        request.id = self.id
        request.nbytes = nbytes
        return request


class _Binary(_Said):
    """The JSON before binary tensors. Right for every body of `nbytes` that begins with it."""

    __slots__ = ("nbytes", "places")

    def __init__(self, request: InferRequest, options: Options, places: list[_Place | None]) -> None:
        super().__init__(request, options)
        self.nbytes = request.nbytes
        self.places = places


class _Row(_Said):
    """The JSON before one flat list of numbers; `after` is what follows the list."""

    __slots__ = ("after", "dtype", "is_row", "shape", "size")

    def __init__(self, request: InferRequest, options: Options, array: Array, after: bytes) -> None:
        super().__init__(request, options)
        self.after = after
        self.dtype = array.dtype
        self.is_row = array.ndim == 2 and array.shape[0] == 1
        self.shape = array.shape
        self.size = array.size


class Layouts:
    """The memory of one route: bounded, and forgotten with the model it was learned from.

    `regions` are what JSON that is not remembered may name.
    `find` gives what `decode` would, or None. A client whose JSON never repeats, because it holds a request id for
    one, makes it try to remember less often.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self.regions = regions
        self._binaries: dict[bytes, _Binary] = {}
        self._rows: dict[bytes, _Row] = {}
        self._misses = 0

    def __len__(self) -> int:
        return len(self._binaries) + len(self._rows)

    def find(self, model: Model, body: bytes, header_bytes: int, sink: Sink) -> tuple[InferRequest, Options] | None:
        """Decode a body whose JSON is remembered; `header_bytes` as in `decode`. Ownership: as in `decode`."""
        if header_bytes < 0 or header_bytes == len(body):
            return self._find_row(model, body, sink)
        binary = self._binaries.get(body[:header_bytes])
        if binary is None or binary.nbytes != len(body):
            return None
        inputs: list[Array | None] = [
            None if place is None else np.ndarray(place.shape, place.dtype, body, place.offset)
            for place in binary.places
        ]
        self._misses = 0
        return binary.request(model, inputs, sink, len(body)), binary.options

    def _find_row(self, model: Model, body: bytes, sink: Sink) -> tuple[InferRequest, Options] | None:
        start = body.find(_DATA) + 7
        if body[start : start + 1] == b" ":
            start += 1
        row = self._rows.get(body[:start])
        if row is None or not body.endswith(row.after):
            return None
        text = body[start : len(body) - len(row.after)]
        array = _many(text, row) if len(text) >= MANY_BYTES else _few(text, row)
        if array is None:
            return None
        self._misses = 0
        return row.request(model, [array], sink, len(body)), row.options

    def remember(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        """Keep the layout of what `decode` has just passed, where it has one."""
        self._misses += 1
        if self._misses > _PATIENCE and self._misses % _PATIENCE:
            return
        if header_bytes < 0 or header_bytes == len(body):
            if len(body) <= MAX_ROW_BYTES:
                self._remember_row(request, options, body)
        elif header_bytes <= MAX_JSON_BYTES:
            self._remember_binary(request, options, body, header_bytes)

    def _remember_binary(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        """BYTES and BOOL are made from the body's values, and JSON data is JSON: those are decoded each time.

        So is what is on a device.
        """
        base = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
        places: list[_Place | None] = []
        for array in request.inputs:
            if array is None:
                places.append(None)
                continue
            if not hasattr(array, "__array_interface__"):
                return
            offset = array.__array_interface__["data"][0] - base
            copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
            if copied or not 0 <= offset <= len(body) - array.nbytes:
                return
            places.append(_Place(offset, array.dtype, array.shape))
        _keep(self._binaries, body[:header_bytes], _Binary(request, options, places))

    def _remember_row(self, request: InferRequest, options: Options, body: bytes) -> None:
        start = body.find(_DATA) + 7
        if body[start : start + 1] == b" ":
            start += 1
        end = body.find(b"]", start) + 1
        array = request.inputs[0] if len(request.inputs) == 1 else None
        if not end or array is None or not array.size:
            return
        if request.model.signature.inputs[0].datatype not in _FLOATS or not _stands_for_data(body, start, end):
            return
        _keep(self._rows, body[:start], _Row(request, options, array, body[end:]))


def _few(text: bytes, row: _Row) -> Array | None:
    """Make a row of a text that can only be the value that stood there before: one list, and nothing after it."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if type(values) is not list or len(values) != row.size or not set(map(type, values)) <= _NUMBERS:
        return None
    if row.is_row:
        return np.array([values], row.dtype)
    array: Array = np.array(values, row.dtype)
    return array.reshape(row.shape)


def _many(text: bytes, row: _Row) -> Array | None:
    """Make the same without a Python float per number. A nested list is left to `decode`, which counts its depth."""
    if text.find(b"[", 1) >= 0:
        return None
    values = numbers_of(text)
    if values is None or values.size != row.size:
        return None
    return values.astype(row.dtype).reshape(row.shape)


def _stands_for_data(body: bytes, start: int, end: int) -> bool:
    """Whether the list at `start` is the data of the only input, and not the same letters inside something else."""
    try:
        document = orjson.loads(body)
        emptied = orjson.loads(b"%b[]%b" % (body[:start], body[end:]))
        values = orjson.loads(body[start:end])
    except orjson.JSONDecodeError:
        return False
    entry = document["inputs"][0]
    if type(values) is not list or not values or entry.get("data") != values:
        return False
    entry["data"] = []
    return bool(document == emptied)


def _keep(kept: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = value
