"""Layouts: what the JSON of earlier requests said, remembered by its bytes.

A client sends the same names, shapes and options again and again; only the data is new. So what stands around the
data is decoded and checked once, and each further request costs one look-up and its data (perf/micro.py: 1.7 us for a
JSON row where the whole document takes 2.6, and 1.5 us for a binary tensor where it takes 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from penstock.batching.request import InferRequest

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink

    from .decode import Options

KEPT = 256
MAX_JSON_BYTES = 4096
_DATA = b'"data":'
_FLOATS = {"FP32", "FP64"}
_NUMBERS = {float, int}
_PATIENCE = 64


class _Place(NamedTuple):
    """Where one input's bytes are in the body, and what they are."""

    offset: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _Said(NamedTuple):
    """What requests with the same JSON have in common."""

    id: str
    rows: int
    key: Key
    wanted: tuple[int, ...]
    options: Options


class _Binary(NamedTuple):
    """The JSON before binary tensors. Right for every body of `nbytes` that begins with it."""

    said: _Said
    nbytes: int
    places: list[_Place | None]


class _Row(NamedTuple):
    """The JSON before one flat list of numbers; `after` is what follows the list."""

    said: _Said
    after: bytes
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Layouts:
    """The memory of one route: bounded, and forgotten with the model it was learned from.

    `find` gives what `decode` would, or None. A client whose JSON never repeats, because it holds a request id for
    one, makes it try to remember less often.
    """

    def __init__(self) -> None:
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
            None if place is None else np.frombuffer(body, place.dtype, place.size, place.offset).reshape(place.shape)
            for place in binary.places
        ]
        self._misses = 0
        return _request(binary.said, model, inputs, sink, len(body))

    def _find_row(self, model: Model, body: bytes, sink: Sink) -> tuple[InferRequest, Options] | None:
        start = _start_of_data(body)
        row = self._rows.get(body[:start])
        if row is None or not body.endswith(row.after):
            return None
        try:
            values = orjson.loads(body[start : len(body) - len(row.after)])
        except orjson.JSONDecodeError:
            return None
        # a text that is one list, and nothing after it, can only be the value that stood there before
        if type(values) is not list or len(values) != row.size or not set(map(type, values)) <= _NUMBERS:
            return None
        shape = row.shape
        if len(shape) == 2 and shape[0] == 1:
            array: Array = np.array([values], row.dtype)
        else:
            array = np.array(values, row.dtype).reshape(shape)
        self._misses = 0
        return _request(row.said, model, [array], sink, len(body))

    def remember(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        """Keep the layout of what `decode` has just passed, where it has one."""
        self._misses += 1
        if self._misses > _PATIENCE and self._misses % _PATIENCE:
            return
        if header_bytes < 0 or header_bytes == len(body):
            if len(body) <= MAX_JSON_BYTES:
                self._remember_row(request, options, body)
        elif header_bytes <= MAX_JSON_BYTES:
            self._remember_binary(request, options, body, header_bytes)

    def _remember_binary(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        """BYTES and BOOL are made from the body's values, and JSON data is JSON: those are decoded each time."""
        base = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
        places: list[_Place | None] = []
        for array in request.inputs:
            if array is None:
                places.append(None)
                continue
            offset = array.__array_interface__["data"][0] - base
            copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
            if copied or not 0 <= offset <= len(body) - array.nbytes:
                return
            places.append(_Place(offset, array.size, array.dtype, array.shape))
        _keep(self._binaries, body[:header_bytes], _Binary(_said(request, options), len(body), places))

    def _remember_row(self, request: InferRequest, options: Options, body: bytes) -> None:
        start = _start_of_data(body)
        end = body.find(b"]", start) + 1
        array = request.inputs[0]
        if not end or len(request.inputs) != 1 or array is None or not array.size:
            return
        if request.model.signature.inputs[0].datatype not in _FLOATS or not _stands_for_data(body, start, end):
            return
        _keep(self._rows, body[:start], _Row(_said(request, options), body[end:], array.size, array.dtype, array.shape))


def _start_of_data(body: bytes) -> int:
    """Where the first list of data begins, if it does; with the one space that Python's json writes."""
    start = body.find(_DATA) + len(_DATA)
    return start + 1 if body[start : start + 1] == b" " else start


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


def _said(request: InferRequest, options: Options) -> _Said:
    return _Said(request.id, request.rows, request.key, request.wanted, options)


def _request(
    said: _Said, model: Model, inputs: list[Array | None], sink: Sink, nbytes: int
) -> tuple[InferRequest, Options]:
    request = InferRequest(model, inputs, said.rows, said.key, said.wanted, sink)
    request.id = said.id
    request.nbytes = nbytes
    return request, said.options


def _keep(kept: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = value
