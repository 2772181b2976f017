"""Values of ONNX models: how Cortex made a model's inputs, and how it passed the outputs to a handler.

Called by `conversions.py`. Source: Cortex 0.9 and 0.10, onnx_serve, by the observed behavior of its process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.datatypes import bf16_to_fp32
from penstock.backends.signature import TensorSpec
from penstock.server.hooks.conversions import ModelDescription
from penstock.server.hooks.convert import map_elements

from .casting import CastError, as_array, cast
from .errors import cortex_error, quoted_key, unexpected_error

TYPES: Mapping[str, str] = {
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(bool)": "bool",
    "tensor(string)": "object",
}
"""ONNX's type names to numpy's. An input of any other type cannot be filled."""


class _Input:
    """One input. `target` is its shape in the graph, with 1 for every free axis."""

    def __init__(self, node: Any, spec: TensorSpec | None, relaxed: bool) -> None:
        self.name = str(node.name)
        self._kind = str(node.type)
        self._type = TYPES.get(self._kind, "")
        self._dtype = np.dtype(self._type or np.object_)
        self._is_number = bool(np.issubdtype(self._dtype, np.number))
        dims = [dim if isinstance(dim, int) else None for dim in node.shape]
        self._target = tuple(1 if dim is None else dim for dim in dims)
        self._free = [axis for axis, dim in enumerate(dims) if dim is None] if relaxed else []
        self._spec = spec

    def convert(self, value: Any, *prefix: str) -> Array:
        """Make it from a value. Raises: InferError, with `prefix` before the error."""
        if not self._type:
            raise unexpected_error(repr(self._kind))
        try:
            array = self._with_shape(self._with_dtype(value))
        except ValueError as error:
            raise cortex_error(*prefix, "failed to convert to numpy array", str(error)) from error
        if self._dtype.hasobject:
            array = map_elements(array, _to_bytes)
        return fit_shape(array, self._spec)

    def _with_dtype(self, value: Any) -> Array:
        # as in Cortex: an array of a subclass, such as a matrix, is rebuilt like a list
        if type(value) is not np.ndarray:
            return as_array(value, self._dtype)
        if value.dtype == self._dtype:
            return value
        if np.issubdtype(value.dtype, np.number) is not self._is_number:
            raise CastError(f"expected dtype '{self._type}' but found '{value.dtype}'")
        return cast(value, self._dtype)

    def _with_shape(self, array: Array) -> Array:
        if self._free:
            shape, target = array.shape, self._target
            if len(shape) == len(target) and all(
                shape[axis] == length or axis in self._free for axis, length in enumerate(target)
            ):
                return array
            if len(self._free) == 1:
                return array.reshape([-1 if axis in self._free else length for axis, length in enumerate(target)])
            if len(shape) + 1 == len(target) and self._free[0] == 0:
                return self._with_shape(array[np.newaxis])
        return array.reshape(self._target)


class OnnxValues:
    """The rules for one ONNX model.

    Shapes: a value is reshaped to the input's shape with 1 for every free axis, so that it is one row. With relaxed
    shapes:

    - a value that has the input's rank and fits it is used as it is, with any number of rows;
    - otherwise, a single free axis gets the length that results;
    - if several axes are free, a value with one axis less is one row.
    """

    def __init__(self, description: ModelDescription) -> None:
        self.signatures: tuple[Any, Any] = (list(description.inputs), list(description.outputs))
        specs = description.signature.input
        relaxed = bool(description.settings.get("relaxed_shapes"))
        self._inputs = [_Input(node, specs.get(str(node.name)), relaxed) for node in description.inputs]
        names = [each.name for each in self._inputs]
        self._order = [names.index(spec.name) if spec.name in names else None for spec in description.signature.inputs]
        nodes = {str(node.name): node for node in description.outputs}
        self._outputs = [_output_restorer(spec, nodes.get(spec.name)) for spec in description.signature.outputs]

    def to_inputs(self, value: Any) -> list[Array | None]:
        """Make the model's inputs, in its order. Raises: InferError."""
        if len(self._inputs) == 1:
            only = self._inputs[0]
            if isinstance(value, dict):
                arrays = [only.convert(_find_member(value, only.name))]
            else:
                arrays = [only.convert(value, quoted_key(only.name))]
        elif self._inputs and not isinstance(value, dict):
            names = ", ".join(f'"{each.name}"' for each in self._inputs)
            raise cortex_error(f"expected sample to be a dictionary with keys {names}")
        else:
            arrays = [each.convert(_find_member(value, each.name), quoted_key(each.name)) for each in self._inputs]
        return [None if at is None else arrays[at] for at in self._order]

    def to_prediction(self, outputs: Sequence[Any]) -> list[Any]:
        """Return arrays, of `str` if they hold text, and lists of dicts, each as from a run of its own.

        Ownership: the list is new, its arrays are the request's own.
        """
        return [restore(output) for restore, output in zip(self._outputs, outputs, strict=True)]


def _find_member(value: dict[Any, Any], name: str) -> Any:
    found = value.get(name)
    if found is None:
        raise cortex_error(f'missing key "{name}"')
    return found


def fit_shape(array: Array, spec: TensorSpec | None) -> Array:
    """Reshape an array to the Engine's shape of its input, which has an axis if the graph has a scalar."""
    if spec is None or array.ndim == len(spec.shape):
        return array
    shape = tuple(1 if dim < 0 else dim for dim in spec.shape)
    return array.reshape(shape) if math.prod(shape) == array.size else array


def _output_restorer(spec: TensorSpec, node: Any) -> Callable[[Any], Any]:
    """Return the function that restores an output to the runtime's own form."""
    # a graph's scalar is (1,) to the Engine; an output of unknown rank is declared like a scalar, and also gets this
    # shape if it is one number
    is_scalar = node is not None and not list(node.shape) and spec.shape == (1,)

    def restore(output: Any) -> Any:
        if not isinstance(output, np.ndarray):
            return output
        if spec.datatype == "BYTES":
            output = map_elements(output, _to_text)
        elif spec.datatype == "BF16":
            output = bf16_to_fp32(output)
        return output.reshape(()) if is_scalar and output.shape == (1,) else output

    return restore


def _to_bytes(element: Any) -> bytes:
    """Return an element of a string tensor as ONNX Runtime reads it: str() of any value."""
    if isinstance(element, bytes):
        return element
    try:
        return str(element).encode()
    except UnicodeEncodeError as error:
        raise unexpected_error("Unable to extract string contents! (encoding issue)") from error
    except Exception as error:
        # raised by the value's own __str__
        raise unexpected_error(str(error)) from error


def _to_text(element: Any) -> Any:
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element
