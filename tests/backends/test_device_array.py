"""DeviceArray: a tensor on a device, here a fake one made of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, InferError

BASE = 0x7F00_0000_0000


class Bytes:
    """The memory of device 1, and how often it was copied to the host."""

    def __init__(self, content: bytes, pointer: int = BASE) -> None:
        self.content = content
        self.device = 1
        self.pointer = pointer
        self.byte_size = len(content)
        self.reads = 0

    def read(self, offset: int, into: Array) -> None:
        self.reads += 1
        if offset + into.nbytes > len(self.content):
            raise self.access_error("read", ValueError("too short"))
        into.data.cast("B")[:] = self.content[offset : offset + into.nbytes]

    def access_error(self, doing: str, error: Exception) -> InferError:
        return InferError(Code.INVALID, f"unable to {doing} it")


def of(array: Array, offset: int = 0) -> tuple[DeviceArray, Bytes]:
    memory = Bytes(bytes(offset) + array.tobytes())
    return DeviceArray(memory, offset, array.shape, array.dtype), memory


def test_a_device_array_has_its_shape_and_copies_its_values_on_demand() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array, memory = of(values, 8)

    assert (array.shape, array.ndim, array.size, array.nbytes, len(array)) == ((3, 4), 2, 12, 48, 3)
    assert (array.device, array.pointer) == (1, BASE + 8)
    assert memory.reads == 0
    np.testing.assert_array_equal(np.asarray(array), values)
    np.testing.assert_array_equal(np.asarray(array, np.float64), values.astype(np.float64))
    assert memory.reads == 2


def test_numpy_copies_and_concatenates_device_arrays() -> None:
    values = np.arange(4, dtype=np.int64).reshape(2, 2)
    array, _ = of(values)
    into = np.empty((2, 2), np.int64)
    np.copyto(into, array)
    both = np.concatenate([values, array])

    np.testing.assert_array_equal(into, values)
    np.testing.assert_array_equal(both, np.concatenate([values, values]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5), st.integers(0, 3), st.one_of(st.none(), st.integers(-7, 7)), st.integers(-7, 7))
def test_rows_of_a_device_array_are_sliced_as_in_numpy(rows: int, width: int, start: int | None, stop: int) -> None:
    values = np.arange(rows * width, dtype=np.int16).reshape(rows, width)
    array, _ = of(values, 4)
    np.testing.assert_array_equal(np.asarray(array[start:stop]), values[start:stop])
    assert array[start:stop].shape == values[start:stop].shape


def test_reshaping_a_device_array_makes_a_view() -> None:
    values = np.arange(12, dtype=np.uint8)
    array, memory = of(values)

    assert array.reshape(3, 4).shape == array.reshape((3, -1)).shape == (3, 4)
    assert memory.reads == 0
    np.testing.assert_array_equal(np.asarray(array.reshape(3, 4)[1:2]), values.reshape(3, 4)[1:2])
    for wrong in ((5, 2), (5, -1)):
        with pytest.raises(ValueError, match="cannot reshape"):
            array.reshape(wrong)


def test_indexing_that_would_copy_on_the_device_is_rejected() -> None:
    array, memory = of(np.zeros((4, 2), np.int8))
    with pytest.raises(TypeError, match="rows only"):
        array[0]  # type: ignore[index]
    with pytest.raises(ValueError, match="a step of 1"):
        array[::2]
    with pytest.raises(ValueError, match="must be copied to the host"):
        np.asarray(array, copy=False)
    with pytest.raises(TypeError, match="unsized"):
        len(DeviceArray(memory, 0, (), np.dtype(np.int8)))


def test_reading_unavailable_memory_raises_the_error_of_the_memory() -> None:
    array = DeviceArray(Bytes(b""), 0, (4,), np.dtype(np.int8))
    with pytest.raises(InferError, match="unable to read it"):
        np.asarray(array)


def test_only_device_arrays_with_common_bytes_overlap() -> None:
    memory = Bytes(bytes(1024))
    parts = [DeviceArray(memory, at, (16,), np.dtype(np.uint8)) for at in (0, 8, 16)]
    elsewhere = DeviceArray(Bytes(b"", BASE + 2048), 0, (16,), np.dtype(np.uint8))

    assert parts[0].overlaps(parts[1])
    assert parts[1].overlaps(parts[0])
    assert not parts[0].overlaps(parts[2])
    assert not parts[0].overlaps(elsewhere)
    assert [DeviceArray(memory, at, (1,), np.dtype(np.uint8)).is_aligned for at in (0, 4, 256)] == [True, False, True]
