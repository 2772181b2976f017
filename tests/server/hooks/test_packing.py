"""What hooks are told of sequences and maps, on its way to another process: the same comes out."""

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


def there_and_back(outputs: list[Any]) -> Any:
    text, how, arrays = write_outputs(outputs)
    assert how == PACKED
    return read_value(text, how, arrays or [])


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_whatever_hooks_are_told_comes_out_as_it_went_in(outputs: list[Any]) -> None:
    assert there_and_back(outputs) == outputs


def test_arrays_and_numbers_of_numpy_keep_their_kind() -> None:
    array, number, text = there_and_back([[np.arange(3, dtype=np.int16), np.float32(0.5), np.str_("a")]])[0]

    assert (array.dtype, array.tolist()) == (np.int16, [0, 1, 2])
    assert (type(number), number, text) == (np.float32, 0.5, "a")


def test_long_bytes_travel_beside_the_text_and_not_in_it() -> None:
    content = b"\xff" * 1_000_000
    text, _, arrays = write_outputs([[content, {b"k": content}, b"short"]])

    assert len(text) < 100
    assert [None if array is None else array.nbytes for array in arrays or []] == [1_000_000, 1_000_000]
    assert there_and_back([[content]]) == [[content]]


def test_what_has_no_arrays_beside_it_has_them_in_its_text() -> None:
    told = {"day": dt.date(2026, 1, 2), "key": b"\xff" * 5000}

    assert unpack(pack(told)) == told
