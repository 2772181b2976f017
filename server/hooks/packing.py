"""Packing: the encoding of hook calls and their answers for worker processes.

Used on both sides (`call.py` and `worker_replica.py`; `worker_service.py`), so it needs only numpy and orjson.
"""

from __future__ import annotations

import datetime as dt
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from penstock.backends.backend import Array
from penstock.backends.signature import Signature, TensorSpec

CALL = 32
"""A hook call. Body: CALL_HEADER, the parameters, the value."""
STEP_GENERATOR = 33
"""A generator takes steps. Body: STEP_HEADER, followed by the body of CALL if it is to begin."""
CLOSE_GENERATOR = 34
"""Close a generator whose answers are no longer wanted. Body: REQUEST_NUMBER, the generator's."""
ANSWER = 64
"""From the worker: a generator has yielded. Number: the generator's. Body: ANSWER_HEADER, then what follows
REPLY_HEADER in a reply."""
PREEMPT = 65
"""From the server: a call is waiting. Number: the last turn that must end after its current step."""
CANCEL_GENERATOR = 66
"""From the server: the answers of the generator with this number are no longer wanted."""
DISCARD_PARAMETERS = 67
"""From the server: the request with this number has ended, and what pre_inference left for it is not needed."""

CALL_HEADER = struct.Struct("<BBBIQ")
"""Which hook (0: pre_inference), result conversion, value encoding, size of the parameters, request number."""
STEP_HEADER = struct.Struct("<QQBIQ")
"""Generator, turn, answer conversion, maximum steps, and the size of answers from which no step begins."""
REQUEST_NUMBER = struct.Struct("<Q")
REPLY_HEADER = struct.Struct("<BQQ")
"""Outcome, nanoseconds of the hook; at the end of a turn: 1 + those of the step that found no more answers."""
ANSWER_HEADER = struct.Struct("<BQQQ")
"""Outcome, nanoseconds of computation and of conversion, size in bytes."""

INPUTS, JSON, TENSORS = 0, 1, 2
"""Result conversions: the model's inputs, the body of a JSON answer, named tensors."""
PLAIN_JSON, PYTHON_JSON, TENSOR_NAMES, PACKED = 0, 1, 2, 3
"""Value encodings: orjson's JSON, Python's json, names of the accompanying tensors, `pack`."""
PYTHON_JSON_PARAMETERS = 16
"""Added to the value encoding if the parameters are encoded by Python's json."""
_MIN_RAW_BYTES = 1024
"""Bytes from this length on travel unencoded: as text in JSON each may take six, and 60 ns to write and to read."""
DONE, INFER_ERROR, EXCEPTION = 0, 1, 2
"""Outcomes: a result follows; an InferError as JSON; another exception of the hook as JSON."""


def write_json(value: Any) -> tuple[bytes, int]:
    """Encode a value that came as JSON. Returns: the text and its encoding."""
    try:
        text = orjson.dumps(value)
        # orjson also writes null for NaN and infinities, so this may have been one
        if b"null" not in text:
            return text, PLAIN_JSON
    except TypeError:
        pass
    return json.dumps(value).encode(), PYTHON_JSON


def read_json(text: bytes, encoding: int) -> Any:
    """Decode the output of `write_json`."""
    return json.loads(text) if encoding == PYTHON_JSON else orjson.loads(text)


def write_sample(sample: Any) -> tuple[bytes, int, list[Array | None] | None]:
    """Encode a sample that came as JSON or as arrays by name. Returns: text, encoding and tensors.

    Raises: TypeError or ValueError for values that cannot be sent.
    """
    if type(sample) is dict and sample and type(next(iter(sample.values()))) is np.ndarray:
        arrays: list[Array | None] = list(sample.values())
        if all(type(each) is np.ndarray for each in arrays):
            return orjson.dumps(list(sample)), TENSOR_NAMES, arrays
    text, encoding = write_json(sample)
    return text, encoding, None


def write_outputs(outputs: list[Any]) -> tuple[bytes, int, list[Array | None] | None]:
    """Encode a model's outputs, like `write_sample`."""
    if all(type(each) is np.ndarray for each in outputs):
        return b"", TENSOR_NAMES, list(outputs)
    arrays: list[Array | None] = []
    return json.dumps(pack(outputs, arrays)).encode(), PACKED, arrays


def read_value(text: bytes, encoding: int, arrays: list[Array | None]) -> Any:
    """Decode the output of `write_sample` or `write_outputs`."""
    if encoding == TENSOR_NAMES:
        return dict(zip(orjson.loads(text), arrays, strict=True)) if text else arrays
    if encoding == PACKED:
        return unpack(json.loads(text), arrays)
    return read_json(text, encoding)


def read_result(conversion: int, text: bytes, arrays: list[Array | None]) -> Any:
    """Decode a converted hook result: inputs, a JSON body, tensors by name."""
    if conversion == INPUTS:
        return arrays
    return text if conversion == JSON else dict(zip(orjson.loads(text), arrays, strict=True))


def pack(value: Any, arrays: list[Array | None] | None = None) -> Any:
    """Return a JSON representation that `unpack` reverses: maps with keys of any type, arrays, dates.

    Arrays and long bytes are appended to `arrays`; without it, arrays are not allowed.
    Raises: TypeError for unknown types.
    """
    if isinstance(value, np.generic) and value.dtype.kind not in "biuf":
        value = value.item()
    if arrays is not None and isinstance(value, np.ndarray | np.generic):
        arrays.append(np.asarray(value))
        return {"array": len(arrays) - 1} if isinstance(value, np.ndarray) else {"scalar": len(arrays) - 1}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {"map": [[pack(key, arrays), pack(item, arrays)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [pack(item, arrays) for item in value]
    if arrays is not None and isinstance(value, bytes) and len(value) >= _MIN_RAW_BYTES:
        arrays.append(np.frombuffer(value, np.uint8))
        return {"long": len(arrays) - 1}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    for kind in (dt.datetime, dt.date, dt.time):
        if isinstance(value, kind):
            return {kind.__name__: value.isoformat()}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def unpack(packed: Any, arrays: Sequence[Array | None] = ()) -> Any:
    """Decode the output of `pack`."""
    if isinstance(packed, list):
        return [unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    match kind:
        case "map":
            return {unpack(key, arrays): unpack(item, arrays) for key, item in content}
        case "array":
            return arrays[content]
        case "scalar":
            return arrays[content][()]  # type: ignore[index]
        case "long":
            return arrays[content].tobytes()  # type: ignore[union-attr]
        case "bytes":
            return content.encode("latin-1")
    return getattr(dt, kind).fromisoformat(content)


def write_signature(signature: Signature) -> list[Any]:
    """Encode what conversions need of a Signature, as JSON."""
    sides = (signature.inputs, signature.outputs)
    return [[[each.name, each.datatype, each.shape, each.optional] for each in side] for side in sides]


def read_signature(encoded: list[Any]) -> Signature:
    """Decode the output of `write_signature`."""
    inputs, outputs = (tuple(TensorSpec(row[0], row[1], tuple(row[2]), row[3]) for row in side) for side in encoded)
    return Signature(inputs, outputs)


def tensor_bytes(arrays: Iterable[Array | None]) -> int:
    """Return the size of tensors in bytes."""
    return sum(
        sum(map(len, array.ravel().tolist())) if array.dtype.hasobject else array.nbytes
        for array in arrays
        if array is not None
    )
