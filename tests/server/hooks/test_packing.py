"""Sequences and maps that are packed for hooks in another process are unpacked unchanged."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.hooks.packing import PACKED, pack, read_value, unpack, write_outputs

LONG = st.integers(1000, 1100).map(lambda size: b"\xff" * size)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5),
    LONG, st.dates(), st.datetimes(), st.times(),
)  # fmt: skip
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers() | st.binary(max_size=3), inner)
)


def round_trip(outputs: list[Any]) -> Any:
    text, how, arrays = write_outputs(outputs)
    assert how == PACKED
    return read_value(text, how, arrays or [])


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_unpacked_hook_values_equal_the_packed_ones(outputs: list[Any]) -> None:
    assert round_trip(outputs) == outputs


def test_numpy_arrays_and_scalars_keep_their_types_when_packed() -> None:
    array, number, text = round_trip([[np.arange(3, dtype=np.int16), np.float32(0.5), np.str_("a")]])[0]

    assert (array.dtype, array.tolist()) == (np.int16, [0, 1, 2])
    assert (type(number), number, text) == (np.float32, 0.5, "a")


def test_long_bytes_are_packed_as_arrays_outside_the_text() -> None:
    content = b"\xff" * 1_000_000
    text, _, arrays = write_outputs([[content, {b"k": content}, b"short"]])

    assert len(text) < 100
    assert [None if array is None else array.nbytes for array in arrays or []] == [1_000_000, 1_000_000]
    assert round_trip([[content]]) == [[content]]


def test_pack_includes_long_bytes_in_its_text() -> None:
    values = {"day": dt.date(2026, 1, 2), "key": b"\xff" * 5000}

    assert unpack(pack(values)) == values
