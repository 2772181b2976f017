"""Casting: makes arrays of users' values like the numpy of Cortex's time, with the same error texts.

Called by `onnx_values.py` and `tensor_values.py`. Every function raises CastError for any failure.
Source: numpy 1.17.3 on Python 3.6, by its observed behavior. It differs from numpy 2: an integer that does not fit
wraps around, text becomes a bool through int(), and its error texts are older.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np

from penstock.backends.backend import Array

_SEQUENCE = "setting an array element with a sequence."
_NUMPY_STR = re.compile(r"np\.str_\((.*)\)$", re.DOTALL)
_UNENCODABLE = re.compile(r"could not convert string to float: (['\"].*\\ud.*)$", re.DOTALL)
_COMPLEX_ERROR = re.compile(r"^(float|int)\(\) argument must be .*, not 'complex'$")


class CastError(ValueError):
    """A value that cannot be converted to the required type. Its text is that of numpy 1.17.3."""


def as_array(value: Any, dtype: np.dtype[Any]) -> Array:
    """Make an array of any value, like `np.array(value, dtype)`."""
    try:
        with np.errstate(all="ignore"):
            if isinstance(value, np.generic):
                return np.asarray(value).astype(dtype)
            return np.array(value, dtype=dtype)
    except OverflowError as error:
        return _wrap_integers(np.array(value, dtype=np.object_), dtype, error)
    except Exception as error:
        # any exception of numpy, or of the value's own __array__
        if str(error).startswith(_SEQUENCE):
            return _ragged_array(value, dtype)
        raise CastError(_numpy_message(error)) from error


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast an array, like `array.astype(dtype)`."""
    try:
        with np.errstate(all="ignore"):
            if array.dtype.kind == "S" and not dtype.hasobject:
                array = array.astype(np.str_)
            if array.dtype.kind == "U" and dtype == np.bool_:
                array = array.astype(np.int64)
            elif array.dtype.kind == "c" and dtype.kind in "biuf":
                array = array.real if dtype.kind != "b" else array != 0
            return array.astype(dtype)
    except OverflowError as error:
        return _wrap_integers(array.astype(np.object_), dtype, error)
    except Exception as error:
        # elements of an array of objects may raise anything
        raise CastError(_numpy_message(error)) from error


def to_bfloat16(array: Array) -> Array:
    """Round to nearest even, on the bits, and return these as `uint16`, the form for BF16 here."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    single = np.ascontiguousarray(cast(array, np.dtype("<f4"))).reshape(array.shape)
    bits = single.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    quiet_nan = (bits >> np.uint64(16)) | np.uint64(0x40)
    return np.where(np.isnan(single), quiet_nan, rounded).astype("<u2").reshape(array.shape)


def _wrap_integers(array: Array, dtype: np.dtype[Any], error: OverflowError) -> Array:
    """Convert integers that do not fit to their lowest bits."""
    if dtype.kind not in "iu":
        raise CastError(_numpy_message(error)) from error
    # numpy tries an unsigned long if a long is too small, for uint32 and uint64 only
    limit = 2**64 if dtype.kind == "u" and dtype.itemsize >= 4 else 2**63
    mask = 2 ** (8 * dtype.itemsize) - 1
    wrapped: list[int] = []
    try:
        for element in array.ravel().tolist():
            if isinstance(element, list | tuple):
                raise CastError(_SEQUENCE)
            number = int(element)
            if not -(2**63) <= number < limit:
                raise CastError("Python int too large to convert to C long")
            wrapped.append(number & mask)
    except CastError:
        raise
    except Exception as unconvertible:
        raise CastError(_numpy_message(unconvertible)) from unconvertible
    return np.array(wrapped, f"<u{dtype.itemsize}").view(dtype).reshape(array.shape)


def _ragged_array(value: Any, dtype: np.dtype[Any]) -> Array:
    """Report the error for lists of different lengths; as bools, each element is true if it is not empty."""
    try:
        array = np.array(value, dtype=np.object_)
        if dtype == np.bool_:
            return array.astype(dtype)
        elements = array.ravel().tolist()
    except Exception as error:
        raise CastError(_SEQUENCE) from error
    # the first wrong element is reported, even before the first list
    for element in elements:
        if isinstance(element, list | tuple | np.ndarray):
            break
        as_array(element, dtype)
    raise CastError(_SEQUENCE)


def _numpy_message(error: Exception) -> str:
    """Return the text that numpy and Python had then."""
    text = str(error)
    if text.startswith(_SEQUENCE):
        return _SEQUENCE
    found = _COMPLEX_ERROR.match(text)
    if found:
        return f"can't convert complex to {found[1]}"
    if text == "could not convert string to float: ''":
        return "could not convert string to float: "
    unencodable = _UNENCODABLE.match(text)
    if unencodable:
        return _utf8_error(ast.literal_eval(unencodable[1])) or text
    return _NUMPY_STR.sub(r"\1", text).replace(" or a real number, not '", " or a number, not '")


def _utf8_error(text: str) -> str:
    """Return why a text has no UTF-8 encoding, which conversion to float used; "" if it has one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return str(error)
    return ""
