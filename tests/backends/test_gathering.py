"""Gathering: rows copied one behind the other, with the GIL held for what is little, and left once for what is much."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends import gathering
from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.gathering import FEW, HELD_BYTES, MANY, copied, fill_up, gather
from tests.backends import gil
from tests.backends.fake_cuda import FakeMemory, FakeRuntime

KINDS = ("f4", "f2", "i8", "u1", "?", "c16", "O")
MUCH = HELD_BYTES // 4
"""So many floats are more than is copied with the GIL held, in two parts."""


def numbers(rows: int, length: int, kind: str = "f4", first: int = 0) -> Array:
    return ((np.arange(rows * length) + first) % 2000).reshape(rows, length).astype(kind)  # what half precision holds


def together(parts: list[Array]) -> Array:
    """Gather parts into a buffer in whose place garbage was."""
    buffer = np.full((sum(map(len, parts)), *parts[0].shape[1:]), 113).astype(parts[0].dtype)
    gather(parts, buffer)
    return buffer


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 3 * FEW), st.sampled_from(KINDS))
def test_rows_lie_one_behind_the_other(rows: list[int], length: int, kind: str) -> None:
    parts = [numbers(count, length, kind, first=1000 * place) for place, count in enumerate(rows)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize(("count", "calls"), [(2, 0), (MANY, 1), (1024, 1), (2500, 3)])
def test_many_parts_are_copied_by_one_call_a_thousand(monkeypatch: pytest.MonkeyPatch, count: int, calls: int) -> None:
    made: list[int] = []
    real = gathering._call()

    def call(*takes: Any) -> int:
        made.append(takes[4])
        done: int = real(*takes)
        return done

    monkeypatch.setattr(gathering, "_call", lambda: call)
    parts = [numbers(1, MUCH if count < 1024 else FEW + 1, first=place) for place in range(count)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))
    assert (len(made), sum(made)) == (calls, count if calls else 0)


def test_without_that_call_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_call", lambda: None)
    parts = [numbers(2, MUCH, first=place) for place in range(MANY)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


def test_where_that_call_is_forbidden_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *(ctypes.c_void_p,) * 6)(lambda *_: -1)
    monkeypatch.setattr(gathering, "_call", lambda: forbidden)
    parts = [numbers(2, MUCH, first=place) for place in range(MANY)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize("length", [FEW + 1, MUCH])
@pytest.mark.parametrize(
    "other",
    [
        lambda length: numbers(1, length, "i2"),
        lambda length: numbers(1, length, ">f4"),
        lambda length: np.asfortranarray(numbers(2, length)),
        lambda length: numbers(1, 2 * length)[:, ::2],
    ],
)
def test_what_is_no_row_of_the_buffers_bytes_is_cast(length: int, other: Any) -> None:
    parts = [numbers(2, length)] * MANY + [other(length)]

    np.testing.assert_array_equal(together(parts), np.concatenate(parts))


@pytest.mark.parametrize("count", [1, 2, MANY])
@pytest.mark.parametrize("length", [2, FEW + 1, MUCH])
def test_rows_on_a_device_are_read_where_the_buffer_is_the_hosts(count: int, length: int) -> None:
    """So it is where one Instance of a model is on the CPU, and another on the device."""
    rows = [numbers(1, length, first=place) for place in range(count)]
    runtime = FakeRuntime()
    on_device: list[Any] = [DeviceArray(FakeMemory.holding(runtime, row), 0, row.shape, row.dtype) for row in rows]

    np.testing.assert_array_equal(together(on_device), np.concatenate(rows))


@pytest.mark.parametrize("length", [2, FEW + 1, MUCH])
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_that_do_not_fill_the_buffer_are_an_error(length: int, rows: int) -> None:
    buffer = np.zeros((2, length), np.float32)
    with pytest.raises(ValueError, match=r"."):
        gather([numbers(1, length)] * rows if rows > 1 else [numbers(3, length)], buffer)


def test_little_is_copied_with_the_gil_held() -> None:
    parts, buffer = [numbers(1, 2 * FEW)] * 8, np.zeros((8, 2 * FEW), np.float32)
    output = numbers(8, 2 * FEW)

    def often() -> None:
        """Give another thread the time to be there."""
        for _ in range(500):
            gather(parts, buffer)
            copied(output)
            fill_up(buffer, 4)

    assert not gil.is_left_by(often)


def test_much_is_copied_with_the_gil_left() -> None:
    parts, buffer = [numbers(1, MUCH)] * MANY, np.zeros((MANY, MUCH), np.float32)

    assert gil.is_left_by(lambda: gather(parts, buffer))


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([0, 3, FEW, FEW + 1, MUCH]), st.sampled_from(KINDS))
def test_missing_rows_are_copies_of_the_last(rows: int, missing: int, length: int, kind: str) -> None:
    buffer = numbers(rows + missing, length, kind)
    wanted = np.concatenate([buffer[:rows]] + [buffer[rows - 1 : rows]] * missing)
    fill_up(buffer, rows)

    np.testing.assert_array_equal(buffer, wanted)


@given(st.integers(0, 4), st.sampled_from([0, 3, FEW, FEW + 1, MUCH]), st.sampled_from(KINDS))
def test_a_copy_is_the_same_and_its_own(rows: int, length: int, kind: str) -> None:
    array = numbers(rows, length, kind)
    copy = copied(array)

    assert (copy.shape, copy.dtype, copy.flags.writeable) == (array.shape, array.dtype, True)
    np.testing.assert_array_equal(copy, array)
    assert not np.shares_memory(copy, array)
