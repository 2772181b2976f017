"""JSON texts before they are parsed: their nesting depth and number of values."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.server import json_text
from penstock.server.json_text import (
    brackets_in,
    depth_of,
    has_more_names,
    has_more_values,
    may_have_more_values,
    values_in,
)
from tests.server.v2.documents import ANYTHING

LETTERS = [b"[", b"]", b"{", b"}", b",", b'"', b'""', b"\\", b"a"]
PIECES = st.integers(2, 9) | st.just(1 << 20)


def without_strings(text: bytes) -> bytes | None:
    """Remove strings as a parser would read them; None if a backslash outside of them makes the text invalid JSON."""
    outside, at, inside = b"", 0, False
    while at < len(text):
        byte = text[at : at + 1]
        if byte == b'"':
            inside = not inside
        elif inside:
            at += byte == b"\\"
        elif byte == b"\\":
            return None
        else:
            outside += byte
        at += 1
    return outside


@given(st.lists(st.sampled_from(LETTERS), max_size=24).map(b"".join), PIECES)
def test_brackets_and_commas_within_strings_are_not_counted(text: bytes, piece: int) -> None:
    depth = deepest = 0
    outside = without_strings(text)
    assume(outside is not None)
    for byte in outside or b"":
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)

    with patch.object(json_text, "_PIECE_BYTES", piece):
        assert depth_of(text) == deepest
        assert values_in(text) == sum(map((outside or b"").count, (b",", b"[", b"{")))


@given(ANYTHING, PIECES)
def test_has_more_values_counts_the_values_of_lists_and_objects(document: Any, piece: int) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else max(1, len(inner)) + sum(map(count, inner))

    text, values = json.dumps(document, ensure_ascii=False).encode(), count(document)

    with patch.object(json_text, "_PIECE_BYTES", piece):
        assert not has_more_values(text, values)
        assert values == 0 or has_more_values(text, values - 1)


@pytest.mark.parametrize(
    "text", [b'["%b"]' % (b"," * 5000), b'["%b"]' % (b'\\",[' * 5000), b'{"%b":1}' % (b"{" * 5000)]
)
def test_a_string_with_many_commas_or_brackets_counts_as_one_value(text: bytes) -> None:
    assert not has_more_values(text, 1)


def test_counting_values_stops_soon_after_the_limit() -> None:
    with patch.object(json_text, "_PIECE_BYTES", 10):
        assert values_in(b"0," * 5000, 20) == 25


def test_a_run_of_backslashes_may_be_split_between_pieces() -> None:
    for piece in range(2, 9):
        with patch.object(json_text, "_PIECE_BYTES", piece):
            for count in range(12):
                assert depth_of(b'["' + b"\\" * count + b'"[[["') == (1 if count % 2 else 4)


def test_strings_without_brackets_are_skipped_without_matching_each_string() -> None:
    with patch.object(json_text, "_QUOTE", None):
        assert depth_of(b'{"a":["b","",{"c":[""]}],"":"d"}') == 4


class Counted(bytes):
    """A text that records how often it was counted as a whole, which holds the GIL the whole time."""

    wholes = 0

    def count(self, *looked_for: Any) -> int:
        self.wholes += 1
        return super().count(*looked_for)


def test_a_long_text_is_never_counted_as_a_whole() -> None:
    text = Counted(b'{"inputs":[{"data":[%b0]}]}' % (b"0," * 10_000))

    assert brackets_in(text) == 4
    assert not has_more_names(text, b'"data"', 2)
    assert may_have_more_values(text, 10_003)
    assert not may_have_more_values(text, 10_004)
    assert text.wholes == 0


@given(
    st.lists(st.sampled_from([*LETTERS, b'"data"', b'"data":']), max_size=24).map(b"".join), PIECES, st.integers(0, 9)
)
def test_counts_do_not_depend_on_the_length_of_the_text(text: bytes, piece: int, most: int) -> None:
    for short in (0, 1 << 20):
        with patch.object(json_text, "_PIECE_BYTES", piece), patch.object(json_text, "_SHORT_BYTES", short):
            assert brackets_in(text) == text.count(b"[") + text.count(b"{")
            assert has_more_names(text, b'"data"', most) == (text.count(b'"data"') > most)
