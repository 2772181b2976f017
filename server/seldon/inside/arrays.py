"""Arrays: v2 tensors in the form for user code, and its results as tensors. Called by rows.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.datatypes import DATATYPES

from .seldon_core_classes import SeldonMicroserviceException

if TYPE_CHECKING:
    from penstock.backends.backend import Array

_DTYPES = {name: row.dtype for name, row in DATATYPES.items() if row.size_bytes and name != "BF16"}
_SUPPORTED = frozenset(_DTYPES.values())
_UNKNOWN_TYPE = "Unknown data type returned as payload (must be list or np array):"


def array_of(tensor: Array, datatype: str) -> Array:
    """Return a tensor in the form for user code: strings become numpy's text, as from JSON, if all are UTF-8."""
    if datatype != "BYTES":
        return tensor
    try:
        texts = [element.decode() for element in tensor.ravel().tolist()]
    except UnicodeDecodeError:
        return tensor
    if any(text.endswith("\0") for text in texts):  # numpy would drop the zeros
        return tensor
    return np.array(texts, np.str_).reshape(tensor.shape)


def tensors_of(result: Any, outputs: Sequence[tuple[str, str]]) -> tuple[list[int], list[Array]]:
    """Make tensors of the result of `predict`. `outputs` are (name, datatype), with "" for an undeclared datatype.

    - A dict whose keys are all outputs has them by name.
    - If there are several outputs, a list or tuple of as many arrays has them in order.
    - Anything else is the first output.

    Returns: the positions of the outputs present, and their tensors. Raises: SeldonMicroserviceException for a value
    that is not a tensor.
    """
    names = [name for name, _ in outputs]
    if isinstance(result, dict) and result and all(key in names for key in result):
        positions = [names.index(key) for key in result]
        return positions, [_make_tensor(result[names[position]], outputs[position][1]) for position in positions]
    if len(outputs) > 1 and isinstance(result, (list, tuple)) and len(result) == len(outputs) and _are_arrays(result):
        positions = list(range(len(outputs)))
        return positions, [_make_tensor(each, datatype) for each, (_, datatype) in zip(result, outputs, strict=True)]
    return [0], [_make_tensor(result, outputs[0][1])]


def _are_arrays(values: Sequence[Any]) -> bool:
    return all(isinstance(each, (np.ndarray, list)) for each in values)


def _make_tensor(value: Any, datatype: str) -> Array:
    """Make one tensor: of the declared datatype if the cast loses at most precision, else of its own."""
    if isinstance(value, dict):
        value = json.dumps(value)
    elif hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, (str, bytes, bytearray)):
        return _make_strings([value], (1,))
    if not isinstance(value, (np.ndarray, np.generic, list, int, float)):
        raise SeldonMicroserviceException(_UNKNOWN_TYPE + str(value))
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind in "OUS":
        return _make_strings(array.ravel().tolist(), array.shape)
    declared = _DTYPES.get(datatype)
    if declared is not None and np.can_cast(array.dtype, declared, "same_kind"):
        return array.astype(declared, copy=False)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _SUPPORTED:
        raise SeldonMicroserviceException(f"the v2 protocol has no datatype for {array.dtype}", status_code=500)
    return array


def _make_strings(values: Sequence[Any], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = [value if type(value) is bytes else bytes(value) if isinstance(value, bytearray) else str(value).encode()
                for value in values]  # fmt: skip
    return array.reshape(shape)
