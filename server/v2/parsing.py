"""JSON request parsing: fast, limited in depth, with long lists of numbers parsed straight into buffers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from penstock.backends.errors import Code, InferError
from penstock.server.json_text import (
    MAX_VALUES,
    TOO_MANY_VALUES,
    brackets_in,
    depth_of,
    has_more_names,
    has_more_values,
    may_have_more_values,
    values_in,
)

SIMD_BYTES = 4096
"""From this size simdjson is used, which makes no Python float per number: 19 us against 37 for 512 numbers, 3.7 ms
against 11 for 150,000; but 10 us against 4 for 64, since reading around the numbers costs it more (perf/micro.py)."""
_SIMD_BYTES_EACH = 1024
"""Nor is it used for inputs smaller than this on average: for 60 of four numbers it takes 3.6 times as long as
orjson."""

NOT_AN_OBJECT = "failed to parse the request JSON buffer: the request must be a JSON object"
_BOM = b"\xef\xbb\xbf"
_MAX_KEYS = 64
_MAX_INPUTS = 4096
"""More inputs than any model has are not read one by one, at 7 us each: 150 s for those that fit into 64 MiB."""
_MAX_DIGITS = 20
_Converter = Callable[[Any], Any]
_NumberTypes = tuple[tuple[str, Any], ...]
_FLOATS: _NumberTypes = (("d", np.float64),)
"""The types to try for an array of numbers. Each failure costs 4 us, so the datatype decides which are worth trying."""
_INTEGERS: _NumberTypes = (("i", np.int64), ("u", np.uint64))
"""Never floats: above 2**53 they are inexact, and no other datatype accepts them."""
_TRITON_MESSAGES = {
    "Input is a zero-length, empty document": "The document is empty.",
    "input data is empty": "The document is empty.",
    "unexpected character, expected a JSON value": "Invalid value.",
    "unexpected character, expected a string key": "Missing a name for object member.",
    "unexpected character, expected ':' after key": "Missing a colon after a name of object member.",
    "unexpected character, expected ',' or ']'": "Missing a comma or ] after an array element.",
    "unexpected character, expected ',' or '}'": "Missing a comma or } after an object member.",
    "unexpected content after document": "The document root must not be followed by other values.",
}
"""Triton's words for parser errors that orjson phrases differently; clients look for them."""


def parse(text: bytes, max_depth: int, *, simd: bool = True) -> Any:
    """Parse one JSON text.

    With `simd`, a number array under `data` of an element of `inputs` may become a flat `numpy` array (float64, int64
    or uint64); without it, everything is plain Python. A leading BOM and trailing NUL bytes are ignored: .NET's writers
    emit the BOM, and clients that send a C string as it is in memory include the NULs.
    Source: rapidjson, with which Triton parses requests.
    Raises: InferError (INVALID) if it is not JSON, is nested deeper than `max_depth`, or has more than MAX_VALUES
    values besides such numbers.
    """
    text = text.removeprefix(_BOM)
    # each level takes two brackets, so most small texts need no bracket count
    if len(text) > 2 * max_depth and brackets_in(text) > max_depth and depth_of(text) > max_depth:
        raise InferError(Code.INVALID, f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")
    if simd and len(text) >= SIMD_BYTES and not has_more_names(text, b'"data"', len(text) // _SIMD_BYTES_EACH):
        document = parse_simd(text)
        if document is not None:
            return document
    if has_more_values(text):
        raise InferError(Code.INVALID, TOO_MANY_VALUES)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if text.endswith(b"\0"):
            return parse(text.rstrip(b"\0"), max_depth, simd=simd)
        if b"NaN" in text or b"Infinity" in text:
            return _parse_non_finite(text)
        reason = f"{_TRITON_MESSAGES.get(error.msg, error.msg)} at {error.pos}"
        raise InferError(Code.INVALID, f"failed to parse the request JSON buffer: {reason}") from None


def _parse_non_finite(text: bytes) -> Any:
    """Parse JSON with NaN, Infinity or -Infinity, which Python clients write and Triton accepts.

    Otherwise as strict as orjson: UTF-8, no lone surrogates, integers of 64 bits and floats above them, and no number
    beyond the range of a double.
    """
    try:
        document = json.loads(text.decode(), parse_int=_integer, parse_float=_float)
        orjson.dumps(document)
    except (ValueError, RecursionError, TypeError) as error:
        raise InferError(Code.INVALID, f"failed to parse the request JSON buffer: {error}") from None
    return document


def _integer(digits: str) -> int | float:
    if len(digits) <= _MAX_DIGITS and -(1 << 63) <= (number := int(digits)) < 1 << 64:
        return number
    return _float(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("number is infinity when parsed as double")
    return number


@functools.cache
def _simdjson() -> Any:
    """Return the module; None if it is not installed, as on Python 3.14, for which it has no wheels."""
    try:
        import simdjson
    except ImportError:
        return None
    return simdjson


def parse_simd(text: bytes) -> Any:
    """Parse with simdjson; None if it fails or is not installed, in which case orjson reports the error.

    Raises: InferError (INVALID) for more than MAX_VALUES values besides the numbers.
    """
    simdjson = _simdjson()
    if simdjson is None or text.startswith(_BOM):
        # reject a second BOM, which simdjson would skip
        return None
    to_python = _LimitedConverter() if may_have_more_values(text) else _to_python
    try:
        # a new parser each time: a parser must outlive everything parsed with it
        document = simdjson.Parser().parse(text)
        if type(document) is not simdjson.Object or not _has_few_keys(document):
            return None
        return {
            key: _convert_inputs(document[key], simdjson, to_python) if key == "inputs" else to_python(document[key])
            for key in document
        }
    except (ValueError, TypeError, RuntimeError, KeyError, UnicodeDecodeError):
        return None


def parse_numbers(text: bytes) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Parse a list of numbers; None if it is anything else, is not valid JSON, or simdjson is not installed."""
    simdjson = _simdjson()
    if simdjson is None:
        return None
    try:
        values = simdjson.Parser().parse(text)
        return np.frombuffer(values.as_buffer(of_type="d"), np.float64) if type(values) is simdjson.Array else None
    except (ValueError, TypeError, RuntimeError, UnicodeDecodeError):
        return None


def _has_few_keys(value: Any) -> bool:
    """Return whether to read an object key by key: each is searched for, and of duplicates the first is found."""
    if len(value) > _MAX_KEYS:
        return False
    return len(set(value)) == len(value)


def _to_python(value: Any) -> Any:
    """Convert what simdjson has parsed to plain Python.

    simdjson counts array elements in 24 bits and sizes its list by that count; more elements would be written past its
    end. That never happens, because MAX_VALUES is smaller.
    """
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return value.as_list() if hasattr(value, "as_list") else value


class _LimitedConverter:
    """Converts several values of one text, as long as they hold at most MAX_VALUES values together."""

    def __init__(self) -> None:
        self._remaining_values = MAX_VALUES

    def __call__(self, value: Any) -> Any:
        if hasattr(value, "as_dict") or hasattr(value, "as_list"):  # looking up `mini` would compute it
            # the contents are written out and counted only if the outer size is within the limit
            self._remaining_values -= (
                len(value) if len(value) > self._remaining_values else values_in(value.mini, self._remaining_values)
            )
            if self._remaining_values < 0:
                raise InferError(Code.INVALID, TOO_MANY_VALUES)
        return _to_python(value)


def _convert_inputs(entries: Any, simdjson: Any, to_python: _Converter) -> Any:
    if type(entries) is not simdjson.Array or len(entries) > _MAX_INPUTS:
        return to_python(entries)
    return [
        _convert_entry(entry, to_python) if type(entry) is simdjson.Object else to_python(entry) for entry in entries
    ]


def _convert_entry(entry: Any, to_python: _Converter) -> dict[str, Any]:
    if not _has_few_keys(entry):
        return dict(to_python(entry))
    datatype = to_python(entry.get("datatype"))
    number_types = _FLOATS if datatype in ("FP32", "FP64") else () if datatype == "BYTES" else _INTEGERS
    return {
        key: _convert_numbers(entry[key], number_types, to_python) if key == "data" else to_python(entry[key])
        for key in entry
    }


def _convert_numbers(values: Any, number_types: _NumberTypes, to_python: _Converter) -> Any:
    if not hasattr(values, "as_buffer"):
        return to_python(values)
    for code, dtype in number_types:
        try:
            return np.frombuffer(values.as_buffer(of_type=code), dtype)
        except (TypeError, ValueError):
            continue
    return to_python(values)
