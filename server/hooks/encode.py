"""JSON encoding of post_inference results, and of predictions without it.

Called on a replica's thread, or on the event loop if a model has no post_inference or the hook runs inline.
Source: Cortex 0.10 with json_tricks: arrays become nested lists, float32 is printed as its double, sets are lists,
dates ISO strings, complex numbers pairs, NaN and infinities the bare words that Python's json reads.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import uuid
from collections.abc import Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import orjson

from penstock.backends.errors import Code, InferError

# Passed through, so that `_to_json_type` alone handles them.
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_LIST_TYPES = (AbstractSet, Sequence, ValuesView)


def to_json(value: Any) -> bytes:
    """Encode a value.

    Raises: InferError (INTERNAL), naming the type that JSON cannot represent.
    """
    try:
        text = orjson.dumps(value, _to_json_type, _OPTIONS)
        if b"null" not in text:
            return text
        # orjson also writes null for NaN and infinities, so this may have been one
        return _encode_with_json(value)
    except InferError:
        raise
    except TypeError as error:
        # orjson hides the exception of `_to_json_type` behind its own
        if isinstance(error.__cause__, InferError):
            raise error.__cause__ from None
        # what orjson rejects but JSON can represent: big integers, lone surrogates, keys that are numpy integers
        return _encode_with_json(value)


def _encode_with_json(value: Any) -> bytes:
    try:
        return json.dumps(_convert_keys(value), default=_to_json_type, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as error:
        text = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InferError(Code.INTERNAL, f"the answer cannot be encoded as JSON: {text}") from error


def _convert_keys(value: Any) -> Any:
    """Convert numpy scalars in dict keys; everything else is left to `_to_json_type`."""
    if isinstance(value, dict):
        return {_convert_key(key): _convert_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_keys(item) for item in value]
    return value


def _convert_key(key: Any) -> Any:
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, enum.Enum):
        key = key.value
    return str(_to_json_type(key)) if isinstance(key, dt.date | dt.time | uuid.UUID) else key


def _to_json_type(value: Any) -> Any:
    """Convert one level of a value to JSON types; the encoder calls this again for its contents."""
    if isinstance(value, np.ndarray | np.generic):
        converted = value.tolist()
        # a type that Python lacks, such as longdouble, is returned unchanged
        if type(converted) is not type(value):
            return converted
    elif isinstance(value, float | complex):  # a float of a subclass, which orjson passes through
        return [value.real, value.imag] if isinstance(value, complex) else float(value)
    elif isinstance(value, dt.date | dt.time):
        return value.isoformat()
    elif isinstance(value, enum.Enum):
        return value.value
    elif isinstance(value, uuid.UUID):
        return str(value)
    elif isinstance(value, Mapping):
        return dict(value)
    elif isinstance(value, _LIST_TYPES) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise InferError(Code.INTERNAL, f"the answer contains {type(value).__name__}, which cannot be encoded as JSON")
