"""JSON of a request: parsed fast, bounded in depth, and numbers straight into buffers where there are many."""

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
    MOST_VALUES,
    TOO_MANY_VALUES,
    brackets_in,
    depth_of,
    has_more_names,
    has_more_values,
    may_have_more_values,
    values_in,
)

SIMD_BYTES = 4096
"""From this size on simdjson, which makes no Python float per number: 19 us against 37 for 512 numbers, 3.7 ms against
11 for 150,000; but 10 us against 4 for 64, since reading around the numbers costs it more (perf/micro.py)."""
_SIMD_BYTES_EACH = 1024
"""Nor for inputs that are smaller than this on average: for 60 of four numbers it takes 3.6 times what orjson does."""

NO_OBJECT = "failed to parse the request JSON buffer: the request must be a JSON object"
_BOM = b"\xef\xbb\xbf"
_MOST_KEYS = 64
_MOST_INPUTS = 4096
"""More of them than any model has are not read one by one, which takes 7 us for each: 150 s for what 64 MiB hold."""
_MOST_DIGITS = 20
_Plain = Callable[[Any], Any]
_Tried = tuple[tuple[str, Any], ...]
_FLOATS: _Tried = (("d", np.float64),)
"""What an array of numbers is tried as. Each that fails costs 4 us, so the datatype decides what is worth trying."""
_INTEGERS: _Tried = (("i", np.int64), ("u", np.uint64))
"""Never floats: above 2**53 they are other numbers, and no other datatype takes them."""
_TRITONS = {
    "Input is a zero-length, empty document": "The document is empty.",
    "input data is empty": "The document is empty.",
    "unexpected character, expected a JSON value": "Invalid value.",
    "unexpected character, expected a string key": "Missing a name for object member.",
    "unexpected character, expected ':' after key": "Missing a colon after a name of object member.",
    "unexpected character, expected ',' or ']'": "Missing a comma or ] after an array element.",
    "unexpected character, expected ',' or '}'": "Missing a comma or } after an object member.",
    "unexpected content after document": "The document root must not be followed by other values.",
}
"""What Triton's parser says where orjson says the same in other words; clients look for it."""


def parse(text: bytes, max_depth: int, *, simd: bool = True) -> Any:
    """Parse one JSON text.

    With `simd`, an array of numbers under `data` of an element of `inputs` may become a flat `numpy` array (float64,
    int64 or uint64); without, all is plain Python. A BOM before it and zeros behind it are passed over: .NET's writers
    put the one there, and who sends a string of C's as it lies in memory the others.
    Source: rapidjson, by which Triton reads requests.
    Raises: InferError (INVALID) when it is no JSON, is nested deeper than `max_depth`, or has more than MOST_VALUES
    besides such numbers.
    """
    text = text.removeprefix(_BOM)
    # a depth takes two brackets, so that most small texts need no look at theirs
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
        said = f"{_TRITONS.get(error.msg, error.msg)} at {error.pos}"
        raise InferError(Code.INVALID, f"failed to parse the request JSON buffer: {said}") from None


def _parse_non_finite(text: bytes) -> Any:
    """Parse JSON that has NaN, Infinity or -Infinity, which Python's own clients write and Triton reads.

    In all else as strict as orjson: UTF-8, no lone surrogate, integers of 64 bits and floats above them, and no digits
    that are more than a double can be.
    """
    try:
        document = json.loads(text.decode(), parse_int=_integer, parse_float=_float)
        orjson.dumps(document)
    except (ValueError, RecursionError, TypeError) as error:
        raise InferError(Code.INVALID, f"failed to parse the request JSON buffer: {error}") from None
    return document


def _integer(digits: str) -> int | float:
    if len(digits) <= _MOST_DIGITS and -(1 << 63) <= (number := int(digits)) < 1 << 64:
        return number
    return _float(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("number is infinity when parsed as double")
    return number


@functools.cache
def _simdjson() -> Any:
    """Give the module; None where it is not installed, as on Python 3.14, for which it has no wheels."""
    try:
        import simdjson
    except ImportError:
        return None
    return simdjson


def parse_simd(text: bytes) -> Any:
    """Parse with simdjson; None when it cannot or is not there, and orjson is to say why.

    Raises: InferError (INVALID) for more than MOST_VALUES besides the numbers.
    """
    simdjson = _simdjson()
    if simdjson is None or text.startswith(_BOM):
        # of a second BOM: simdjson skips it
        return None
    plain = _Counted() if may_have_more_values(text) else _plain
    try:
        # a parser of its own: one that is kept must outlive all that was parsed with it
        document = simdjson.Parser().parse(text)
        if type(document) is not simdjson.Object or not _few_keys(document):
            return None
        return {
            key: _inputs(document[key], simdjson, plain) if key == "inputs" else plain(document[key])
            for key in document
        }
    except (ValueError, TypeError, RuntimeError, KeyError, UnicodeDecodeError):
        return None


def numbers_of(text: bytes) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Parse a list of numbers; None when it is anything else, or no JSON, or simdjson is not there."""
    simdjson = _simdjson()
    if simdjson is None:
        return None
    try:
        values = simdjson.Parser().parse(text)
        return np.frombuffer(values.as_buffer(of_type="d"), np.float64) if type(values) is simdjson.Array else None
    except (ValueError, TypeError, RuntimeError, UnicodeDecodeError):
        return None


def _few_keys(value: Any) -> bool:
    """Whether an object may be read key by key: each is searched for, and of equal ones the first is found."""
    if len(value) > _MOST_KEYS:
        return False
    return len(set(value)) == len(value)


def _plain(value: Any) -> Any:
    """Make plain Python of what simdjson has parsed.

    It counts what an array has in 24 bits, and its list has room for so many: more would be written behind its end. So
    much is never asked for: MOST_VALUES are fewer.
    """
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return value.as_list() if hasattr(value, "as_list") else value


class _Counted:
    """Makes the same of several values of one text, while they are no more than MOST_VALUES together."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def __call__(self, value: Any) -> Any:
        if hasattr(value, "as_dict") or hasattr(value, "as_list"):  # not `mini`, which would write it
            # what is in it is written again to be counted only where it alone is not too much
            self._left -= len(value) if len(value) > self._left else values_in(value.mini, self._left)
            if self._left < 0:
                raise InferError(Code.INVALID, TOO_MANY_VALUES)
        return _plain(value)


def _inputs(entries: Any, simdjson: Any, plain: _Plain) -> Any:
    if type(entries) is not simdjson.Array or len(entries) > _MOST_INPUTS:
        return plain(entries)
    return [_entry(entry, plain) if type(entry) is simdjson.Object else plain(entry) for entry in entries]


def _entry(entry: Any, plain: _Plain) -> dict[str, Any]:
    if not _few_keys(entry):
        return dict(plain(entry))
    datatype = plain(entry.get("datatype"))
    tried = _FLOATS if datatype in ("FP32", "FP64") else () if datatype == "BYTES" else _INTEGERS
    return {key: _numbers(entry[key], tried, plain) if key == "data" else plain(entry[key]) for key in entry}


def _numbers(values: Any, tried: _Tried, plain: _Plain) -> Any:
    if not hasattr(values, "as_buffer"):
        return plain(values)
    for code, dtype in tried:
        try:
            return np.frombuffer(values.as_buffer(of_type=code), dtype)
        except (TypeError, ValueError):
            continue
    return plain(values)
