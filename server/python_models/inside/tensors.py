"""Tensors of model.py: named numpy arrays, Triton's datatypes, strings as bytes, and DLPack.

Source: python_backend, src/pb_tensor.cc, src/pb_stub_utils.cc and src/resources/triton_python_backend_utils.py.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from penstock.backends.backend import Array

from .errors import TritonModelException, as_text

BYTES, BF16 = 13, 14
_NUMPY_TYPES = (
    np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32,
    np.float64, np.object_,
)  # fmt: skip
_TYPE_NUMBERS: dict[np.dtype[Any], int] = {np.dtype(kind): number for number, kind in enumerate(_NUMPY_TYPES, 1)}
_CONFIG_NAMES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING",
)  # fmt: skip
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    f"TYPE_{name}": kind for name, kind in zip(_CONFIG_NAMES, _NUMPY_TYPES, strict=True)
} | {"TYPE_BOOL": bool}
_LENGTH = struct.Struct("<I")
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_UINT, _BFLOAT = 1, 4
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_DEVICE_OFFSET, _CODE_OFFSET = 8, 20
"""Offsets in a DLManagedTensor: the device type, and the type code of the elements. Source: dlpack.h."""


def triton_to_numpy_type(data_type: int) -> Any:
    """Return numpy's type for a Triton type number, None for anything else: some models pass names."""
    return next((kind for number, kind in enumerate(_NUMPY_TYPES, 1) if number == data_type), None)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return Triton's number for a numpy type, None if there is none."""
    dtype = np.dtype(data_type)
    return BYTES if dtype.kind == "S" else _TYPE_NUMBERS.get(dtype)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return numpy's type for a name as in a model's configuration. Raises: KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """Encode strings, each after its length, as `bytes`; an empty tuple if there are none, None for other types."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    parts: list[bytes] = []
    for element in as_bytes(input_tensor).ravel().tolist():
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """Decode the result of `serialize_byte_tensor` to one dimension. Raises: ValueError if it is truncated."""
    payload = bytes(encoded_tensor)
    elements: list[bytes] = []
    position = 0
    while position < len(payload):
        begin = position + _LENGTH.size
        if begin > len(payload):
            raise ValueError(f"a string's length is cut off: incomplete length field at byte {position}")
        position = begin + _LENGTH.unpack_from(payload, position)[0]
        if position > len(payload):
            raise ValueError(f"string extends beyond buffer: to byte {position} of {len(payload)}")
        elements.append(payload[begin:position])
    return np.array(elements, np.object_)


def as_bytes(array: Array) -> Array:
    """Return strings as an array of `bytes`: this array if it already is one."""
    elements = array.ravel().tolist()
    if array.dtype.hasobject and all(type(element) is bytes for element in elements):
        return array
    encoded = np.empty(len(elements), np.object_)
    encoded[:] = [element if type(element) is bytes else str(element).encode() for element in elements]
    return encoded.reshape(array.shape)


class Tensor:
    """A named array. `outgoing` is the form that is sent: strings as `bytes`, as of when the tensor was created.

    Raises: TritonModelException for an invalid name or datatype; TypeError if it is not an array.
    """

    __slots__ = ("_array", "_dtype", "_name", "outgoing")

    def __init__(self, name: str | bytes, numpy_array: Array) -> None:
        value: Any = numpy_array
        if not isinstance(value, np.ndarray):
            raise TypeError(f"Tensor(name: str, numpy_array: numpy.ndarray): got {type(name)} and {type(numpy_array)}")
        name = as_text("the name of a Tensor", name)
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        number = _TYPE_NUMBERS.get(numpy_array.dtype)
        if number is None:
            number = numpy_to_triton_type(numpy_array.dtype)
            if number is None:
                raise TritonModelException("NumPy dtype is not supported.")
        numpy_array = np.asarray(numpy_array)  # a masked array would be sent with its fill values
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        self._name = name
        self._dtype = number
        self._array = numpy_array
        self.outgoing = as_bytes(numpy_array) if number == BYTES else numpy_array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array, which is writable. Raises: TritonModelException for BF16, which numpy lacks."""
        if self._dtype == BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._array

    def triton_dtype(self) -> int:
        return self._dtype

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return whether it is in CPU memory: all tensors here are."""
        return True

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the same memory, or over a copy if it is read-only."""
        if self._dtype == BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = self._array if self._array.flags.writeable else self._array.copy()
        capsule = array.__dlpack__()
        if self._dtype == BF16:
            ctypes.c_uint8.from_address(_capsule_pointer(capsule, b"dltensor") + _CODE_OFFSET).value = _BFLOAT
        return capsule

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: Any) -> Tensor:
        """Create a tensor over the memory of a DLPack capsule, or of an object that provides one."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        capsule = tensor
        if type(tensor).__name__ != "PyCapsule":
            if not hasattr(tensor, "__dlpack__"):
                raise TritonModelException(
                    "Provided tensor is not supported. Tensor must be a DLPack capsule or have a `__dlpack__` attribute"
                )
            if tensor.__dlpack_device__()[0] == _CUDA:
                raise TritonModelException(_NO_GPU)
            capsule = tensor.__dlpack__()
        array, is_bf16 = _from_capsule(capsule)
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        result = Tensor(name, array)
        if is_bf16:
            result._dtype = BF16
        return result


_NO_GPU = "A tensor in GPU memory cannot be sent: move it to the CPU first."


class _Capsule:
    """Passes a capsule to numpy."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def _from_capsule(capsule: Any) -> tuple[Array, bool]:
    """Return the array, and whether its elements are BF16, as bit patterns."""
    address = _capsule_pointer(capsule, b"dltensor")
    device = ctypes.c_int32.from_address(address + _DEVICE_OFFSET).value
    if device not in {_CPU, _CUDA_HOST}:
        raise TritonModelException(
            _NO_GPU if device == _CUDA else f"DLDevice type {device} is not support by Python backend."
        )
    code = ctypes.c_uint8.from_address(address + _CODE_OFFSET)
    is_bf16 = code.value == _BFLOAT
    if is_bf16:
        code.value = _UINT
    return np.from_dlpack(_Capsule(capsule)), is_bf16


def received_tensor(name: str, array: Array, number: int = 0) -> Tensor:
    """Create the tensor of an array received from the server. `number`: its datatype, 0 for the array's own."""
    tensor = Tensor.__new__(Tensor)
    tensor._name = name  # noqa: SLF001
    tensor._array = tensor.outgoing = array  # noqa: SLF001
    tensor._dtype = number or _TYPE_NUMBERS[array.dtype]  # noqa: SLF001
    return tensor
