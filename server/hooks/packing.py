"""Packing: what a hook's call and its answer look like on their way to a worker process and back.

Written and read on both sides (`call.py` and `worker_replica.py`; `inside.py`), so it needs no more than numpy and
orjson.
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
"""A hook is called. Body: ASKED, the parameters, the value."""
TURN = 33
"""A generator takes steps. Body: STEPS, and what CALL has where it is to begin."""
SHUT = 34
"""A generator that nobody listens to is closed. Body: NUMBER, the generator's."""
ANSWER = 64
"""The worker tells what a generator has yielded. Number: the generator's. Body: YIELDED, and what REPLIED precedes."""
GIVE_WAY = 65
"""The server tells that a call waits. Number: of the last turn that is to end after the step that it is in."""
HUSH = 66
"""The server tells that nobody takes the answers of the generator of that number any more."""
FORGET = 67
"""The server tells that the request of that number has ended: what pre_inference left for the other is not needed."""

ASKED = struct.Struct("<BBBIQ")
"""Which hook (0: pre_inference), what to make of its result, how the value is written, bytes of parameters, request."""
STEPS = struct.Struct("<QQBIQ")
"""The generator, the turn, what to make of answers, the most steps, the bytes of answers from which none is begun."""
NUMBER = struct.Struct("<Q")
REPLIED = struct.Struct("<BQQ")
"""How it went, nanoseconds that the hook took; of a turn's end: 1 + those of the step that found no more answers."""
YIELDED = struct.Struct("<BQQQ")
"""How it went, nanoseconds it was computed and converted, bytes."""

INPUTS, JSON, TENSORS = 0, 1, 2
"""What to make of a hook's result: the model's inputs, the body of a JSON answer, named tensors."""
PLAIN_JSON, FULL_JSON, NAMED, PACKED = 0, 1, 2, 3
"""How a value is written: as orjson does, as Python's json does, as names of the tensors beside it, by `pack`."""
FULL_PARAMETERS = 16
"""Added to how the value is written where the parameters are written as Python's json does."""
_LONG_BYTES = 1024
"""Bytes from here on travel as they are: as text in JSON each may take six, and 60 ns to write and to read."""
DONE, REFUSED, RAISED = 0, 1, 2
"""How a call went: its result follows; an InferError, as JSON; what else the hook raised, as JSON."""


def write_json(value: Any) -> tuple[bytes, int]:
    """Write a value that came as JSON, and say how."""
    try:
        text = orjson.dumps(value)
        # orjson writes null for NaN and infinities too, so this may have been one
        if b"null" not in text:
            return text, PLAIN_JSON
    except TypeError:
        pass
    return json.dumps(value).encode(), FULL_JSON


def read_json(text: bytes, how: int) -> Any:
    """Read what `write_json` has written."""
    return json.loads(text) if how == FULL_JSON else orjson.loads(text)


def write_sample(sample: Any) -> tuple[bytes, int, list[Array | None] | None]:
    """Write a sample, which came as JSON or as arrays by name: text, how it is written, and tensors.

    Raises: TypeError or ValueError for what cannot travel.
    """
    if type(sample) is dict and sample and type(next(iter(sample.values()))) is np.ndarray:
        arrays: list[Array | None] = list(sample.values())
        if all(type(each) is np.ndarray for each in arrays):
            return orjson.dumps(list(sample)), NAMED, arrays
    text, how = write_json(sample)
    return text, how, None


def write_outputs(outputs: list[Any]) -> tuple[bytes, int, list[Array | None] | None]:
    """Write a model's outputs, as `write_sample` does."""
    if all(type(each) is np.ndarray for each in outputs):
        return b"", NAMED, list(outputs)
    arrays: list[Array | None] = []
    return json.dumps(pack(outputs, arrays)).encode(), PACKED, arrays


def read_value(text: bytes, how: int, arrays: list[Array | None]) -> Any:
    """Read what `write_sample` or `write_outputs` has written."""
    if how == NAMED:
        return dict(zip(orjson.loads(text), arrays, strict=True)) if text else arrays
    if how == PACKED:
        return unpack(json.loads(text), arrays)
    return read_json(text, how)


def read_made(form: int, text: bytes, arrays: list[Array | None]) -> Any:
    """Read what was made of a hook's result: inputs, a JSON body, tensors by name."""
    if form == INPUTS:
        return arrays
    return text if form == JSON else dict(zip(orjson.loads(text), arrays, strict=True))


def pack(value: Any, arrays: list[Array | None] | None = None) -> Any:
    """Give a value as JSON, of which `unpack` makes the same again: maps with keys of any type, arrays, dates.

    Arrays are appended to `arrays`, long bytes likewise; without it there may be no arrays.
    Raises: TypeError for what it does not know.
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
    if arrays is not None and isinstance(value, bytes) and len(value) >= _LONG_BYTES:
        arrays.append(np.frombuffer(value, np.uint8))
        return {"long": len(arrays) - 1}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    for kind in (dt.datetime, dt.date, dt.time):
        if isinstance(value, kind):
            return {kind.__name__: value.isoformat()}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def unpack(packed: Any, arrays: Sequence[Array | None] = ()) -> Any:
    """Make a value of what `pack` has given."""
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
    """Write what conversions need of a Signature, as JSON."""
    sides = (signature.inputs, signature.outputs)
    return [[[each.name, each.datatype, each.shape, each.optional] for each in side] for side in sides]


def read_signature(written: list[Any]) -> Signature:
    """Read what `write_signature` has written."""
    inputs, outputs = (tuple(TensorSpec(row[0], row[1], tuple(row[2]), row[3]) for row in side) for side in written)
    return Signature(inputs, outputs)


def tensor_bytes(arrays: Iterable[Array | None]) -> int:
    """Measure what tensors hold."""
    return sum(
        sum(map(len, array.ravel().tolist())) if array.dtype.hasobject else array.nbytes
        for array in arrays
        if array is not None
    )
