"""Gathering rows into one buffer: small copies hold the GIL, and large ones release it once."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends import gathering
from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, PartUnreadable
from penstock.backends.gathering import (
    GIL_HELD_BYTES,
    NUMPY_GIL_ELEMENTS,
    VECTORED_PARTS,
    copy_array,
    gather,
    repeat_last_row,
)
from tests.backends import gil
from tests.backends.fake_cuda import FakeMemory, FakeRuntime
from tests.shared import SharedArrays

KINDS = ("f4", "f2", "i8", "u1", "?", "c16", "O")
MUCH = GIL_HELD_BYTES // 4
"""With two parts of this many floats, the copy releases the GIL."""


def numbers(rows: int, length: int, kind: str = "f4", first: int = 0) -> Array:
    return (
        ((np.arange(rows * length) + first) % 2000).reshape(rows, length).astype(kind)
    )  # values that half precision can hold


def together(parts: list[Array]) -> Array:
    """Gather parts into a buffer filled with garbage."""
    buffer = np.full((sum(map(len, parts)), *parts[0].shape[1:]), 113).astype(parts[0].dtype)
    gather(parts, buffer)
    return buffer


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 3 * NUMPY_GIL_ELEMENTS), st.sampled_from(KINDS)
)
def test_gathered_rows_are_concatenated(rows: list[int], length: int, kind: str) -> None:
    parts = [numbers(count, length, kind, first=1000 * place) for place, count in enumerate(rows)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize(("count", "calls"), [(2, 0), (VECTORED_PARTS, 1), (1024, 1), (2500, 3)])
def test_many_parts_are_copied_by_one_kernel_call_per_1024(
    monkeypatch: pytest.MonkeyPatch, count: int, calls: int
) -> None:
    counts: list[int] = []
    real = gathering._readv_without_gil()

    def call(*takes: Any) -> int:
        counts.append(takes[4])
        done: int = real(*takes)
        return done

    monkeypatch.setattr(gathering, "_readv_without_gil", lambda: call)
    parts = [numbers(1, MUCH if count < 1024 else NUMPY_GIL_ELEMENTS + 1, first=place) for place in range(count)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))
    assert (len(counts), sum(counts)) == (calls, count if calls else 0)


def test_numpy_copies_the_parts_without_process_vm_readv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_readv_without_gil", lambda: None)
    parts = [numbers(2, MUCH, first=place) for place in range(VECTORED_PARTS)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


def test_numpy_copies_the_parts_when_process_vm_readv_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *(ctypes.c_void_p,) * 6)(lambda *_: -1)
    monkeypatch.setattr(gathering, "_readv_without_gil", lambda: forbidden)
    parts = [numbers(2, MUCH, first=place) for place in range(VECTORED_PARTS)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize("length", [NUMPY_GIL_ELEMENTS + 1, MUCH])
@pytest.mark.parametrize(
    "other",
    [
        lambda length: numbers(1, length, "i2"),
        lambda length: numbers(1, length, ">f4"),
        lambda length: np.asfortranarray(numbers(2, length)),
        lambda length: numbers(1, 2 * length)[:, ::2],
    ],
)
def test_parts_of_another_type_or_layout_are_converted(length: int, other: Any) -> None:
    parts = [numbers(2, length)] * VECTORED_PARTS + [other(length)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize("count", [1, 2, VECTORED_PARTS])
@pytest.mark.parametrize("length", [2, NUMPY_GIL_ELEMENTS + 1, MUCH])
def test_rows_on_a_device_are_gathered_into_a_host_buffer(count: int, length: int) -> None:
    """As when one Instance of a model is on the CPU, and another on the device."""
    rows = [numbers(1, length, first=place) for place in range(count)]
    runtime = FakeRuntime()
    on_device: list[Any] = [DeviceArray(FakeMemory.holding(runtime, row), 0, row.shape, row.dtype) for row in rows]

    np.testing.assert_array_equal(together(on_device), np.concatenate(rows))


@pytest.fixture
def shared(tmp_path: Path) -> SharedArrays:
    return SharedArrays(tmp_path)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of parts of each call of the kernel."""
    counts: list[int] = []
    for name in ("_readv_without_gil", "_readv_holding_gil"):
        real = getattr(gathering, name)()

        def call(*takes: Any, real: Any = real) -> int:
            counts.append(takes[4])
            done: int = real(*takes)
            return done

        monkeypatch.setattr(gathering, name, lambda call=call: call)
    return counts


@pytest.mark.parametrize("length", [2, NUMPY_GIL_ELEMENTS + 1, 2 * MUCH])
@pytest.mark.parametrize("beside", [0, 3])
def test_rows_in_shared_memory_are_read_in_the_same_call_as_other_rows(
    shared: SharedArrays, monkeypatch: pytest.MonkeyPatch, length: int, beside: int
) -> None:
    rows = [numbers(1, length, first=place) for place in range(3 + beside)]
    parts: list[Any] = [shared.hold(str(number), row) if number % 2 == 0 else row for number, row in enumerate(rows)]
    counts = counted(monkeypatch)

    np.testing.assert_array_equal(together(parts), np.concatenate(rows))
    assert counts == ([len(rows)] if length > NUMPY_GIL_ELEMENTS else [])


def test_up_to_1024_rows_in_shared_memory_take_one_call(shared: SharedArrays, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = numbers(1500, NUMPY_GIL_ELEMENTS + 1)
    shared_rows = shared.hold("r", rows)
    counts = counted(monkeypatch)

    np.testing.assert_array_equal(together([shared_rows[row : row + 1] for row in range(1500)]), rows)
    assert counts == [1024, 476]


@pytest.mark.parametrize("size", [0, 4096])
@pytest.mark.parametrize("length", [2 * NUMPY_GIL_ELEMENTS, MUCH])
def test_a_row_in_truncated_shared_memory_is_an_error_that_names_its_region(
    shared: SharedArrays, length: int, size: int
) -> None:
    """The kernel's copy from a truncated mapping comes up short, where a load would raise SIGBUS."""
    rows = [numbers(4, length, first=place) for place in range(5)]
    parts = [shared.hold(str(number), row) for number, row in enumerate(rows)]
    shared.truncate("3", size)
    with pytest.raises(PartUnreadable) as caught:
        together(parts)

    text = "Invalid shared memory region: '3', its file is smaller than when it was registered"
    assert (caught.value.part_index, caught.value.code, caught.value.message) == (3, Code.INVALID, text)
    np.testing.assert_array_equal(together(parts[:3]), np.concatenate(rows[:3]))


@pytest.mark.parametrize("why", ["no call", "no address"])
def test_rows_in_shared_memory_are_read_one_by_one_without_the_kernel_call(
    shared: SharedArrays, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    rows = [numbers(1, MUCH, first=place) for place in range(3)]
    parts: list[Any] = [shared.hold("0", rows[0]), rows[1], shared.hold("2", rows[2])]
    if why == "no call":
        monkeypatch.setattr(gathering, "_readv_without_gil", lambda: None)
    else:
        parts[2].memory.pointer = 0

    np.testing.assert_array_equal(together(parts), np.concatenate(rows))
    shared.truncate("2")
    with pytest.raises(PartUnreadable):
        together(parts)


def test_only_large_copies_from_shared_memory_release_the_gil(shared: SharedArrays) -> None:
    little, much = (
        [shared.hold(f"{size} {at}", numbers(1, size)) for at in range(4)] for size in (2 * NUMPY_GIL_ELEMENTS, MUCH)
    )
    buffers = [np.zeros((4, size), np.float32) for size in (2 * NUMPY_GIL_ELEMENTS, MUCH)]

    def often(parts: list[Any], buffer: Array) -> None:
        for _ in range(200):
            gather(parts, buffer)

    assert not gil.is_left_by(lambda: often(little, buffers[0]))
    assert gil.is_left_by(lambda: often(much, buffers[1]))


def test_converted_and_device_rows_are_gathered_with_rows_in_shared_memory(shared: SharedArrays) -> None:
    rows = [numbers(1, MUCH, first=place) for place in range(3)]
    on_device: Any = DeviceArray(FakeMemory.holding(FakeRuntime(), rows[1]), 0, rows[1].shape, rows[1].dtype)
    for other in (on_device, rows[1].astype(">f4"), np.asfortranarray(np.tile(rows[1], (2, 1)))[:1]):
        parts = [shared.hold(f"0 {id(other)}", rows[0]), other, shared.hold(f"2 {id(other)}", rows[2])]
        np.testing.assert_array_equal(together(parts), np.concatenate(rows))


@pytest.mark.parametrize("length", [2, NUMPY_GIL_ELEMENTS + 1, MUCH])
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_that_do_not_fill_the_buffer_are_an_error(shared: SharedArrays, length: int, rows: int) -> None:
    buffer = np.zeros((2, length), np.float32)
    parts = [numbers(1, length)] * rows if rows > 1 else [numbers(3, length)]
    wrong = "could not broadcast|different structures|Output array is the wrong shape"
    for parts_given in (parts, [shared.hold("r", parts[0]), *parts[1:]]):
        with pytest.raises(ValueError, match=wrong):
            gather(parts_given, buffer)

        assert not buffer.any()


def test_small_copies_hold_the_gil() -> None:
    parts, buffer = [numbers(1, 2 * NUMPY_GIL_ELEMENTS)] * 8, np.zeros((8, 2 * NUMPY_GIL_ELEMENTS), np.float32)
    output = numbers(8, 2 * NUMPY_GIL_ELEMENTS)

    def often() -> None:
        """Run long enough for another thread to be scheduled."""
        for _ in range(500):
            gather(parts, buffer)
            copy_array(output)
            repeat_last_row(buffer, 4)

    assert not gil.is_left_by(often)


def test_large_copies_release_the_gil() -> None:
    parts, buffer = [numbers(1, MUCH)] * VECTORED_PARTS, np.zeros((VECTORED_PARTS, MUCH), np.float32)

    def often() -> None:
        """Run long enough for another thread to be scheduled, even on a busy machine."""
        for _ in range(50):
            gather(parts, buffer)

    assert gil.is_left_by(often)


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0, 3, NUMPY_GIL_ELEMENTS, NUMPY_GIL_ELEMENTS + 1, MUCH]),
    st.sampled_from(KINDS),
)
def test_missing_rows_are_copies_of_the_last_row(rows: int, missing: int, length: int, kind: str) -> None:
    buffer = numbers(rows + missing, length, kind)
    expected = np.concatenate([buffer[:rows]] + [buffer[rows - 1 : rows]] * missing)
    repeat_last_row(buffer, rows)

    np.testing.assert_array_equal(buffer, expected)


@given(
    st.integers(0, 4), st.sampled_from([0, 3, NUMPY_GIL_ELEMENTS, NUMPY_GIL_ELEMENTS + 1, MUCH]), st.sampled_from(KINDS)
)
def test_a_copied_array_is_equal_and_shares_no_memory(rows: int, length: int, kind: str) -> None:
    array = numbers(rows, length, kind)
    copy = copy_array(array)

    assert (copy.shape, copy.dtype, copy.flags.writeable) == (array.shape, array.dtype, True)
    np.testing.assert_array_equal(copy, array)
    assert not np.shares_memory(copy, array)
