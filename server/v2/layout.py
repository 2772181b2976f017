"""Layouts: the JSON of earlier requests, remembered by its bytes.

A client sends the same names, shapes and options repeatedly; only the data changes. What surrounds the data is decoded
and checked once, and each further request costs one lookup and its data (perf/micro.py: 1.9 us for a JSON row instead
of 2.6 for the whole document, and 1.2 us for a binary tensor instead of 4.1).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import orjson

from penstock.backends.errors import InferError

from .parsing import parse_numbers
from .regions import LargeRead, Regions
from .request_template import RequestTemplate
from .shared_tensors import SharedInput, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Sink

    from .call_parameters import Options

MAX_LAYOUTS = 256
MAX_JSON_BYTES = 4096
MAX_ROW_BYTES = 65536
MANY_BYTES = 1024
"""From this size a list of numbers is parsed by simdjson into a buffer: 2.9 us for 32 numbers, where orjson and `pack`
take 2.0; 3.4 against 3.1 for 56, 17 against 52 for 512."""
_DATA = b'"data":'
_PLAIN_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]{1,128})"')
_Template = TypeVar("_Template")
_PLACEHOLDER_ID = b"a mark that no request has for its id"
_view = np.ndarray
"""CPython does not cache attributes of the numpy module, so each lookup is slow."""
_FLOATS = {"FP32", "FP64"}
_R, _S = b"rs"
"""No number contains these letters; a text with neither contains no true or false."""
_MAX_MISSES = 64


class _InputLocation(NamedTuple):
    """Where one input's bytes are after the JSON, and what they hold."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class _BinaryTemplate(RequestTemplate):
    """The JSON before binary tensors, or with all tensors in shared memory. Valid for `data_bytes` of data after it.

    `views` are the places if all inputs are in the body: reading them this way costs a third.
    """

    __slots__ = ("data_bytes", "id", "locations", "views")

    data_bytes: int
    id: str
    locations: list[_InputLocation | SharedInput | None]
    views: list[tuple[int, np.dtype[Any], tuple[int, ...]]] | None


class _RowTemplate(RequestTemplate):
    """The JSON before one flat list of numbers; `suffix` is what follows the list."""

    __slots__ = ("dtype", "id", "pack", "shape", "size", "suffix")

    suffix: bytes
    id: str

    def set_array(self, array: Array) -> None:
        """Record the array that the list becomes."""
        self.dtype = array.dtype
        self.pack = struct.Struct(f"={array.size}{array.dtype.char}").pack
        self.shape = array.shape
        self.size = array.size


class Layouts:
    """The memory of one route: bounded, and dropped with the model it was learned from.

    `regions` are those that requests may name. `find` returns what `decode` would, or None. JSON that begins with an
    id, as clients write it, is remembered separately, without the id. For a client whose JSON never repeats, it tries
    to remember less often.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self.regions = Regions() if regions is None else regions
        self._binaries: dict[bytes, _BinaryTemplate] = {}
        self._rows: dict[bytes, _RowTemplate] = {}
        self._binaries_with_id: dict[bytes, _BinaryTemplate] = {}
        self._rows_with_id: dict[bytes, _RowTemplate] = {}
        self._misses = 0

    def __len__(self) -> int:
        return len(self._binaries) + len(self._rows) + len(self._binaries_with_id) + len(self._rows_with_id)

    def find(self, model: Model, body: bytes, header_bytes: int, sink: Sink) -> tuple[InferRequest, Options] | None:
        """Decode a body whose JSON is remembered; `header_bytes` as in `decode`. Ownership: as in `decode`."""
        try:
            if 0 <= header_bytes != len(body):
                return self._find_binary(model, body, header_bytes, sink)
            prefix, has_data, data = body.partition(_DATA)
            if not has_data:
                return self._find_binary(model, body, len(body), sink)
            row = self._rows.get(prefix)
            if row is None:
                row, request_id = _find_with_id(self._rows_with_id, body, len(prefix))
            else:
                request_id = row.id
            text, bracket, suffix = data.partition(b"]")  # a flat list has no other bracket
            if row is None or suffix != row.suffix:
                return None
            text += bracket
            array = _parse_many(text, row) if len(text) >= MANY_BYTES else _parse_few(text, row)
            if array is None:
                return None
            self._misses = 0
            return row.make_request(model, [array], sink, len(body), request_id)
        except (InferError, LargeRead):
            # `decode` finds the same error, and reports it in full
            return None

    def _find_binary(
        self, model: Model, body: bytes, header_bytes: int, sink: Sink
    ) -> tuple[InferRequest, Options] | None:
        binary = self._binaries.get(body[:header_bytes])
        if binary is None:
            binary, request_id = _find_with_id(self._binaries_with_id, body, header_bytes)
        else:
            request_id = binary.id
        if binary is None or binary.data_bytes != len(body) - header_bytes:
            return None
        inputs: list[Array | None] = []
        if binary.views is not None:
            for offset, dtype, shape in binary.views:  # as in execution.py, cheaper than a comprehension
                inputs.append(_view(shape, dtype, body, header_bytes + offset))
        else:
            inputs = self._make_inputs(model, body, header_bytes, binary.locations)
        self._misses = 0
        return binary.make_request(model, inputs, sink, len(body), request_id)

    def _make_inputs(
        self, model: Model, body: bytes, header_bytes: int, locations: list[SharedInput | _InputLocation | None]
    ) -> list[Array | None]:
        return [
            None
            if location is None
            else location.fetch(model, self.regions)
            if isinstance(location, SharedInput)
            else np.ndarray(location.shape, location.dtype, body, header_bytes + location.offset)
            for location in locations
        ]

    def add(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        """Remember the layout of a body that `decode` has just accepted, if it has one."""
        self._misses += 1
        if self._misses > _MAX_MISSES and self._misses % _MAX_MISSES:
            return
        if header_bytes < 0:
            header_bytes = len(body)
        try:
            if header_bytes == len(body) and _DATA in body:
                if len(body) <= MAX_ROW_BYTES:
                    self._add_row(request, options, body)
            elif header_bytes <= MAX_JSON_BYTES:
                self._add_binary(request, options, body, header_bytes)
        except orjson.JSONDecodeError:
            # NaN and the like, which only Python's parser reads
            return

    def _add_binary(self, request: InferRequest, options: Options, body: bytes, header_bytes: int) -> None:
        locations = self._locate_inputs(request, body, header_bytes)
        if locations is None:
            return
        binary = _BinaryTemplate(request, options, self.regions, locations)
        binary.data_bytes, binary.locations = len(body) - header_bytes, locations
        views = [tuple(location) for location in locations if isinstance(location, _InputLocation)]
        binary.views = views if len(views) == len(locations) else None  # type: ignore[assignment]  # of a NamedTuple
        binary.id = request.id
        start = _id_end(body, header_bytes)
        _store(self._binaries_with_id if start else self._binaries, body[start:header_bytes], binary)

    def _locate_inputs(
        self, request: InferRequest, body: bytes, header_bytes: int
    ) -> list[_InputLocation | SharedInput | None] | None:
        """Find where the inputs of a body are; None if one of them is not in the body as is.

        BYTES and BOOL are converted, and JSON data is parsed: those are decoded each time.
        """
        base = np.frombuffer(body, np.uint8).__array_interface__["data"][0] + header_bytes
        entries = {entry["name"]: entry for entry in orjson.loads(body[:header_bytes])["inputs"]}
        locations: list[_InputLocation | SharedInput | None] = []
        for spec, array in zip(request.model.signature.inputs, request.inputs, strict=True):
            if array is None:
                locations.append(None)
                continue
            entry = entries[spec.name]
            items = entry.get("parameters") or {}
            if "shared_memory_region" in items:
                locations.append(locate(request.model, spec, entry["shape"], items, self.regions))
                continue
            offset = array.__array_interface__["data"][0] - base
            is_copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
            if is_copied or not 0 <= offset <= len(body) - header_bytes - array.nbytes:
                return None
            locations.append(_InputLocation(offset, array.dtype, array.shape))
        return locations

    def _add_row(self, request: InferRequest, options: Options, body: bytes) -> None:
        data_start = body.find(_DATA)
        start = data_start + len(_DATA)
        end = body.find(b"]", start) + 1  # 0 if there is none: no list ends before it begins
        array = request.inputs[0] if len(request.inputs) == 1 else None
        if array is None or request.model.signature.inputs[0].datatype not in _FLOATS:
            return
        if not _is_input_data(body, start, end):
            return
        row = _RowTemplate(request, options, self.regions)
        row.set_array(array)
        row.suffix, row.id = body[end:], request.id
        id_end = _id_end(body, len(body))
        _store(self._rows_with_id if id_end else self._rows, body[id_end:data_start], row)


def _find_with_id(templates: Mapping[bytes, _Template], body: bytes, end: int) -> tuple[_Template | None, str]:
    """Look up what is remembered for JSON that ends at `end` and begins with an id; return it and the id."""
    match = _PLAIN_ID.match(body) if templates else None
    return (None, "") if match is None else (templates.get(body[match.end() : end]), match[1].decode())


def _id_end(body: bytes, end: int) -> int:
    """Return where the id at the start of JSON that ends at `end` stops; 0 unless any other id could replace it."""
    match = _PLAIN_ID.match(body)
    if (
        match is None
        or orjson.loads(b'{"id":"%b"%b' % (_PLACEHOLDER_ID, body[match.end() : end]))["id"] != _PLACEHOLDER_ID.decode()
    ):
        return 0
    return match.end()


def _parse_few(text: bytes, row: _RowTemplate) -> Array | None:
    """Parse a row from a text that can only be the value at that place: one list, and nothing after it.

    Packing takes half the time numpy needs to detect the type. What is not a number, or is too large, is left to
    `decode`.
    """
    if _R in text or _S in text:
        return None
    try:
        values = orjson.loads(text)
        return _view(row.shape, row.dtype, row.pack(*values)) if type(values) is list else None
    except (orjson.JSONDecodeError, struct.error, OverflowError):
        return None


def _parse_many(text: bytes, row: _RowTemplate) -> Array | None:
    """Parse the same without a Python float per number. A nested list is not valid JSON: it is cut at the first `]`."""
    values = parse_numbers(text)
    if values is None or values.size != row.size:
        return None
    return values.astype(row.dtype).reshape(row.shape)


def _is_input_data(body: bytes, start: int, end: int) -> bool:
    """Return whether the list at `start` is the data of the only input, and not the same text inside something else."""
    try:
        values = orjson.loads(body[start:end])
    except orjson.JSONDecodeError:
        return False
    document, emptied = orjson.loads(body), orjson.loads(b"%b[]%b" % (body[:start], body[end:]))
    entry = document["inputs"][0]
    if type(values) is not list or not values or entry.get("data") != values:
        return False
    entry["data"] = []
    return bool(document == emptied)


def _store(templates: dict[bytes, Any], key: bytes, value: Any) -> None:
    if len(templates) >= MAX_LAYOUTS:
        templates.clear()
    templates[key] = value
