"""Conversion between the values of hooks and those of models.

`to_inputs`: the result of pre_inference (or a bare sample) to model inputs; `to_prediction`: a model's outputs to the
argument of post_inference; `to_tensors`: the result of post_inference to the named tensors of an infer answer.
Called on a replica's thread, or on the event loop if a model lacks the hook or the hook runs inline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.datatypes import BY_DTYPE, bf16_to_fp32
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec

_CONVERTED_DATATYPES = frozenset(("BYTES", "BF16"))


def to_inputs(value: Any, signature: Signature) -> list[Array | None]:
    """Return a model's inputs, in order, from a dict by name, or from an array-like value if there is one input.

    Shapes: an array with the input's rank that fits it is used as it is, with any number of rows. Anything else is one
    row: reshaped to the input's shape with 1 for every free axis, or given its row axis. The input's axes in another
    order are refused: reshaping an image whose channels come last would make another image of it.
    Raises: InferError (INVALID), which names the input, what it takes and what was found.
    Source: Cortex 0.10, onnx_serve (conversion), which supports only one row.
    """
    inputs = signature.inputs
    if len(inputs) == 1 and not isinstance(value, Mapping):
        return [_to_input(value, inputs[0])]
    if not isinstance(value, Mapping):
        if not inputs:
            return []
        names = ", ".join(f'"{spec.name}"' for spec in inputs)
        raise InferError(Code.INVALID, f"expected sample to be a dictionary with keys {names}")
    return [_to_input(_find_member(value, spec), spec) for spec in inputs]


def _find_member(value: Mapping[Any, Any], spec: TensorSpec) -> Any:
    if spec.name not in value and not spec.optional:
        found = ", ".join(f'"{key}"'[:80] for key in islice(value, 8)) or "none"
        raise InferError(Code.INVALID, f'missing key "{spec.name}", found {found}')
    return value.get(spec.name)


def _to_input(value: Any, spec: TensorSpec) -> Array | None:
    if value is None and spec.optional:
        return None
    if not spec.is_tensor:
        raise InferError(Code.INVALID, f"input '{spec.name}' is {spec.datatype}, which only tensors can fill")
    try:
        if value is None:
            raise TypeError("found None")
        return _with_shape(_with_datatype(value, spec), spec.shape)
    except InferError:
        raise
    except Exception as error:
        # whatever numpy or the value's own __array__ raises
        expected = f"{spec.datatype} [{','.join(map(str, spec.shape))}]"
        raise InferError(Code.INVALID, f"input '{spec.name}' takes {expected}: {error}") from error


def _with_datatype(value: Any, spec: TensorSpec) -> Array:
    if spec.datatype == "BYTES":
        return map_elements(np.asarray(value, dtype=np.object_), _to_bytes)
    if spec.datatype == "BF16":
        return _to_bfloat16(value)
    dtype = spec.type.dtype
    if not isinstance(value, np.ndarray):
        return np.array(value, dtype=dtype)
    array: Array = np.asarray(value)  # a masked array would be written with fill values
    if array.dtype == dtype:
        return array
    if np.issubdtype(array.dtype, np.number) is not np.issubdtype(dtype, np.number):
        found = array.dtype.str if array.dtype.kind in "US" else array.dtype.name
        raise TypeError(f"expected dtype '{dtype.name}' but found '{found}'")
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _with_shape(array: Array, shape: tuple[int, ...]) -> Array:
    if _fits_shape(array.shape, shape):
        return array
    row, size = _single_row_shape(shape)
    if array.size != size and shape and shape[0] in {-1, 1} and _fits_shape(array.shape, shape[1:]):
        return array[np.newaxis]
    if array.size != size:
        raise ValueError(_shape_text(array))
    if array.ndim > 1 and _has_permuted_axes(array.shape, row):
        raise ValueError(f"{_shape_text(array)}, whose axes are in another order")
    return array.reshape(row)


def _shape_text(array: Array) -> str:
    return f"found an array of shape [{','.join(map(str, array.shape))}]"


def _has_permuted_axes(shape: tuple[int, ...], row: tuple[int, ...]) -> bool:
    found, expected = ([dim for dim in axes if dim != 1] for axes in (shape, row))
    return found != expected and sorted(found) == sorted(expected)


@lru_cache(1024)
def _single_row_shape(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return a shape with 1 for every free axis, and its number of elements."""
    row = tuple(1 if dim < 0 else dim for dim in shape)
    return row, math.prod(row)


def _fits_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(
        expected_dim in {-1, dim} for dim, expected_dim in zip(shape, expected, strict=True)
    )


def map_elements(array: Array, function: Callable[[Any], Any]) -> Array:
    """Return an object array with a function applied to each element."""
    mapped = np.empty(array.size, np.object_)
    mapped[:] = [function(element) for element in array.ravel().tolist()]
    return mapped.reshape(array.shape)


def _to_bytes(element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode("utf-8", "surrogatepass")
    if isinstance(element, bytes):
        return bytes(element)
    raise TypeError(f"expected a string but found {type(element).__name__}")


def _to_bfloat16(value: Any) -> Array:
    """Round to nearest even, on the bits; `uint16` arrays already hold the bits, as everywhere in Penstock."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint16:
            return value
        if value.dtype.name == "bfloat16":
            return value.view(np.uint16)
    with np.errstate(all="ignore"):
        single = np.array(value, dtype="<f4")
    bits = single.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    quiet_nan = (bits >> np.uint64(16)) | np.uint64(0x40)
    return np.where(np.isnan(single), quiet_nan, rounded).astype("<u2").reshape(single.shape)


def to_prediction(outputs: Sequence[Any], signature: Signature) -> list[Any]:
    """Convert outputs to what hooks know from ONNX Runtime: arrays, with `str` for text; lists of dicts.

    Ownership: the list is new, its arrays are the request's own. BF16 is widened to FP32. A BYTES output that is not
    all UTF-8 stays `bytes`.
    """
    return [
        _to_hook_value(output, spec) if spec.datatype in _CONVERTED_DATATYPES else output
        for output, spec in zip(outputs, signature.outputs, strict=True)
    ]


def _to_hook_value(output: Any, spec: TensorSpec) -> Any:
    if spec.datatype == "BYTES":
        try:
            return map_elements(output, lambda element: element.decode() if isinstance(element, bytes) else element)
        except UnicodeDecodeError:
            return output
    return bf16_to_fp32(output)


def to_tensors(result: Any, signature: Signature) -> dict[str, Array]:
    """Convert the result of post_inference to the named tensors of an infer answer.

    A dict names them, possibly with its own names; a list or tuple holds them in the model's order; anything else is
    the first output. An array keeps its type. Numbers take the type of the output with their name, if they are of its
    kind; a string is BYTES. A scalar gets the shape [1].
    Raises: InferError (INVALID) if tensors cannot represent the result; clients must then use predict.
    """
    outputs = signature.outputs
    if isinstance(result, Mapping):
        named_values = list(result.items())
    elif isinstance(result, list | tuple):
        if len(result) > len(outputs):
            text = f"a list of {len(result)}, and the model has {len(outputs)} outputs; return a dict of name and array"
            raise _not_tensor_error(text)
        named_values = [(spec.name, value) for spec, value in zip(outputs, result, strict=False)]
    else:
        named_values = [(outputs[0].name if outputs else "output", result)]
    tensors: dict[str, Array] = {}
    for name, value in named_values:
        if not isinstance(name, str):
            raise _not_tensor_error(f"the key {name!r:.80}; output names must be strings")
        tensors[name] = _to_tensor(name, value, signature.output.get(name))
    return tensors


def _to_tensor(name: str, value: Any, spec: TensorSpec | None) -> Array:
    try:
        try:
            array = np.asarray(value)
        except UnicodeDecodeError:  # for text mixed with bytes, numpy makes text as if the bytes were ASCII
            array = np.asarray(value, dtype=np.object_)
        if array.dtype.kind in "USO":
            array = map_elements(np.asarray(value, dtype=np.object_), _to_bytes)
    except Exception as error:  # a ragged list, a dict, None, or an error in the value's own __array__
        raise _not_tensor_error(f"'{name}' as {_type_name(value)}, which is not a tensor: {error}") from error
    if array.ndim == 0:
        array = array.reshape(1)
    if spec is not None and spec.is_tensor and not isinstance(value, np.ndarray | np.generic):
        dtype = spec.type.dtype
        if array.dtype.kind in "biuf" and spec.datatype != "BF16" and np.can_cast(array.dtype, dtype, "same_kind"):
            with np.errstate(all="ignore"):
                array = array.astype(dtype)
    native = array.dtype.newbyteorder("<")
    if native not in BY_DTYPE:
        raise _not_tensor_error(f"'{name}' as an array of {array.dtype}, which has no datatype in the protocol")
    return np.ascontiguousarray(array, native)


def datatype_of(array: Array) -> str:
    """Return the v2 datatype of an array from `to_tensors`."""
    return BY_DTYPE[array.dtype].name


def _type_name(value: Any) -> str:
    return f"a {type(value).__name__}"


def _not_tensor_error(what: str) -> InferError:
    hint = "use predict instead, or set the request parameter hooks to false"
    return InferError(Code.INVALID, f"post_inference returned {what} ({hint})")
