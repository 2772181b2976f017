"""Values of TensorFlow models: how Cortex made a model's inputs, and the flat prediction it passed to a handler.

Called by `conversions.py`. Source: Cortex 0.9 and 0.10, tf_api, by the observed behavior of its process: inputs went
through TensorFlow 1.14's make_tensor_proto, answers through protobuf's JSON. `tensor_protos.py` has the rules of the
former.
"""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from penstock.backends.backend import Array
from penstock.backends.errors import InferError
from penstock.backends.signature import TensorSpec
from penstock.server.hooks.conversions import ModelDescription

from .casting import CastError
from .errors import cortex_error, quoted_key, unexpected_error
from .tensor_protos import TensorType, make_array, tensor_type_of


class _Input:
    """One input of the signature."""

    def __init__(self, name: str, signature_def: Mapping[str, Any], spec: TensorSpec | None, batched: bool) -> None:
        self.name = name
        self.spec = spec
        self._tensor_type: TensorType = tensor_type_of(str(signature_def.get("dtype", "")))
        self._dims = [int(dim.get("size", 0)) for dim in signature_def.get("tensorShape", {}).get("dim", ())]
        self._batched = batched

    def convert(self, value: Any) -> Array:
        """Make it from a value. Shapes: complete, with rows if the model has them. Raises: InferError."""
        try:
            array = make_array(value, self._tensor_type)
        except CastError as error:
            raise self.shape_error(str(error)) from error
        return self._with_shape(array)

    def shape_error(self, text: str) -> InferError:
        return cortex_error(quoted_key(self.name), f"expected shape {self._dims}", text)

    def _with_shape(self, array: Array) -> Array:
        if self.spec is None:
            return array
        expected = self.spec.shape
        if self._batched and array.ndim + 1 == len(expected):
            array = array[np.newaxis]
        if array.ndim == len(expected):
            if any(dim not in (-1, length) for dim, length in zip(expected, array.shape, strict=True)):
                raise self.shape_error(f"got shape {list(array.shape)}")
            return array
        single_row = tuple(1 if dim < 0 else dim for dim in expected)
        if math.prod(single_row) == array.size:
            return array.reshape(single_row)
        if expected.count(-1) == 1 and not self._batched and array.size and array.size % math.prod(single_row) == 0:
            return array.reshape(expected)
        raise self.shape_error(f"got shape {list(array.shape)}")


class TensorValues:
    """The rules for one TensorFlow model.

    Shapes: Cortex checked none. If requests share batches, a value with one axis less than the input is one row, and a
    value of the input's rank has as many rows as its length.
    """

    def __init__(self, description: ModelDescription) -> None:
        # a copy, since a handler may modify it
        signatures = copy.deepcopy(dict(description.runtime_metadata["signature_def"]))
        self.signatures: tuple[Any, Any] = (signatures, signatures)
        signature_def = description.runtime_metadata["signature_def"][description.runtime_metadata["signature_key"]]
        signature = description.signature
        self._batched = signature.batched
        self._inputs = {
            name: _Input(name, tensor_info, signature.input.get(name), signature.batched)
            for name, tensor_info in signature_def.get("inputs", {}).items()
        }
        self._optional = {spec.name for spec in signature.inputs if spec.optional}
        self._order = [spec.name for spec in signature.inputs]
        dtypes = {
            name: str(tensor_info.get("dtype", "")) for name, tensor_info in signature_def.get("outputs", {}).items()
        }
        self._outputs = [(spec.name, _flattener(dtypes.get(spec.name, ""))) for spec in signature.outputs]

    def to_inputs(self, value: Any) -> list[Array | None]:
        """Make the model's inputs, in its order. Raises: InferError.

        A bare list or array is taken for a model's only input, which Cortex documented but did not implement.
        """
        if len(self._inputs) == 1 and isinstance(value, list | tuple | np.ndarray):
            value = {next(iter(self._inputs)): value}
        arrays: dict[str, Array] = {}
        for name, member in self._checked_items(value):
            try:
                found = self._inputs.get(name)
            except TypeError as error:  # an unhashable key
                raise unexpected_error(str(error)) from error
            if found is None:
                raise unexpected_error(repr(name))
            arrays[name] = found.convert(member)
        if self._batched:
            self._check_row_counts(arrays)
        return [arrays.get(name) for name in self._order]

    def _checked_items(self, value: Any) -> list[tuple[Any, Any]]:
        """Return the members of a value, in its own order, after checking that none is missing."""
        if isinstance(value, Mapping):
            for name in self._inputs:
                if name not in value and name not in self._optional:
                    raise cortex_error(f'missing key "{name}"')
            return list(value.items())
        if not hasattr(type(value), "__contains__") and not hasattr(type(value), "__iter__"):
            raise unexpected_error(f"argument of type '{type(value).__name__}' is not iterable")
        for name in self._inputs:
            if not _contains(value, name):
                raise cortex_error(f'missing key "{name}"')
        raise unexpected_error(f"'{type(value).__name__}' object has no attribute 'items'")

    def _check_row_counts(self, arrays: Mapping[str, Array]) -> None:
        """Check that all have the same number of rows. Raises: InferError."""
        first, rows = "", -1
        for name, array in arrays.items():
            if rows < 0:
                first, rows = name, len(array)
            elif len(array) != rows:
                raise self._inputs[name].shape_error(f"got {len(array)} rows where {quoted_key(first)} has {rows}")

    def to_prediction(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Return the outputs by name, as flat lists of JSON values. Raises: InferError."""
        return {name: flatten(output) for (name, flatten), output in zip(self._outputs, outputs, strict=True)}


def _contains(value: Any, name: str) -> bool:
    try:
        return name in value
    except Exception as error:
        # raised by the value's own comparison
        raise unexpected_error(str(error)) from error


def _flattener(dtype: str) -> Callable[[Any], list[Any]]:
    """Return the function that makes a flat list of an output of a type."""
    entry = _FLATTENERS.get(dtype)
    if entry is None:

        def fail(_: Any) -> list[Any]:
            raise unexpected_error(repr(dtype))

        return fail
    member, elements = entry

    def flatten(output: Any) -> list[Any]:
        if not output.size:
            # protobuf's JSON omits empty fields, and Cortex then failed to find it
            raise unexpected_error(repr(member))
        return elements(output.ravel())

    return flatten


def _float32_list(array: Array) -> list[Any]:
    """Return float32s as the shortest decimals that identify them, as protobuf does."""
    if np.isfinite(array).all():
        numbers: list[Any] = orjson.loads(orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY))
        return numbers
    return [_json_number(float(str(element))) for element in array]


def _float64_list(array: Array) -> list[Any]:
    if np.isfinite(array).all():
        return list(array.tolist())
    return [_json_number(element) for element in array.tolist()]


def _json_number(value: float) -> Any:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _base64_list(array: Array) -> list[str]:
    return [
        base64.b64encode(element.encode() if isinstance(element, str) else element).decode()
        for element in array.tolist()
    ]


def _complex_list(array: Array) -> list[Any]:
    parts = np.stack([array.real, array.imag], axis=-1).ravel()
    return _float32_list(parts) if parts.dtype == np.float32 else _float64_list(parts)


_FLATTENERS: Mapping[str, tuple[str, Callable[[Array], list[Any]]]] = {
    "DT_INT32": ("intVal", np.ndarray.tolist),
    "DT_INT64": ("int64Val", lambda array: [str(element) for element in array.tolist()]),
    "DT_FLOAT": ("floatVal", _float32_list),
    "DT_DOUBLE": ("doubleVal", _float64_list),
    "DT_STRING": ("stringVal", _base64_list),
    "DT_BOOL": ("boolVal", np.ndarray.tolist),
    "DT_HALF": ("halfVal", lambda array: array.view(np.uint16).tolist()),
    "DT_COMPLEX64": ("scomplexVal", _complex_list),
    "DT_COMPLEX128": ("dcomplexVal", _complex_list),
}
"""The field in which protobuf keeps the values of each TensorFlow type, and its form in JSON. Cortex supports no
others."""
