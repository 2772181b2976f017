"""How contents are encoded: the rules, and the additions of Penstock. tests/abeja has all recorded cases."""

from __future__ import annotations

import array
import csv
import io
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.abeja.inside.content import ContentEncoder

ORIGINAL, OURS = ContentEncoder(strict=True), ContentEncoder(strict=False)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=4
)


def encoded(content: Any, media: str = "text/plain") -> bytes:
    """Encode a content, and check that both modes agree."""
    strict = ORIGINAL.encode(content, media)
    if hasattr(content, "seek"):
        content.seek(0)
    assert OURS.encode(content, media) == strict
    return strict


@settings(max_examples=40)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_a_dict_is_encoded_as_json(content: dict[str, Any]) -> None:
    assert json.loads(encoded(content)) == content
    assert encoded(content) == json.dumps(content).encode()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_encoded_as_utf_8(content: str) -> None:
    assert encoded(content).decode() == content


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=3))
def test_a_list_of_dicts_is_encoded_as_one_line_of_json_each(content: list[Any]) -> None:
    assert [json.loads(line) for line in encoded(content).split(b"\n")] == content


@given(st.lists(st.binary()))
def test_a_list_of_bytes_is_concatenated(content: list[bytes]) -> None:
    assert encoded(content) == b"".join(content)


@given(st.binary())
def test_a_file_is_encoded_as_its_remaining_content(content: bytes) -> None:
    assert encoded(io.BytesIO(content)) == content
    assert encoded(io.BufferedReader(io.BytesIO(content))) == content


@given(st.binary())
def test_bytes_are_sent_unchanged_or_as_numbers_in_strict_mode(content: bytes) -> None:
    digits = b"\n".join(b"%d" % byte for byte in content)
    for like in (content, bytearray(content), memoryview(content), array.array("B", content)):
        assert OURS.encode(like, "text/plain") == content
        assert ORIGINAL.encode(like, "text/plain") == digits


@given(
    st.lists(st.text(min_size=1), min_size=1, unique=True).flatmap(
        lambda names: st.lists(st.fixed_dictionaries({name: st.text() for name in names}), min_size=1)
    )
)
def test_a_table_encoded_as_csv_is_read_back_unchanged(rows: list[dict[str, str]]) -> None:
    read = list(csv.reader(io.StringIO(encoded(rows, "text/csv").decode(), newline="")))

    assert read == [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (None, b""), ([], b""), ("", b""), ({}, b"{}"), (0, b"0"), (False, b"false"), (3, b"3"), (1.5, b"1.5"),
        (math.inf, b"Infinity"),
        (["a", b"b", 3, {"c": 4}, None, b"z"], b'ab\n3\n{"c": 4}\nnullz'),
        (("a", 1), b"a\n1"),
        (range(3), b"0\n1\n2"),
        ([b"", "x"], b"\nx"),
        ([("a", 1), ("b", 2)], b'["a", 1]\n["b", 2]'),
        ([[("a", 1), ("b", 2)]], b'{"a": 1, "b": 2}'),
        ([[1, 2], [3]], b"[1, 2]\n[3]"),
        ({"a": np.array([1.5]), "b": np.int64(3), "c": np.float32(0.5)}, b'{"a": [1.5], "b": 3, "c": 0.5}'),
        (np.array([7]), b"7"), (np.array([0]), b""), (np.array([]), b""), (np.zeros((2, 0)), b""), (np.int64(3), b"3"),
        (array.array("i", [1, 2]), b"1\n2"), (memoryview(array.array("d", [1.5, 2.5])), b"1.5\n2.5"),
    ],
)  # fmt: skip
def test_contents_are_encoded_as_the_original_encoded_them(content: Any, body: bytes) -> None:
    assert encoded(content) == body


@pytest.mark.parametrize(
    ("content", "body"),
    [
        ({"a": np.bool_(True)}, b'{"a": true}'),
        (np.bool_(False), b"false"),
        (np.array([1, 2]), b"1\n2"),
        (np.array([[1, 2], [3, 4]]), b"[1, 2]\n[3, 4]"),
        ([memoryview(b"a"), "b"], b"a\nb"),
    ],
)
def test_contents_that_fail_in_strict_mode_are_encoded_otherwise(content: Any, body: bytes) -> None:
    assert OURS.encode(content, "text/plain") == body
    with pytest.raises((TypeError, ValueError)):
        ORIGINAL.encode(content, "text/plain")


@pytest.mark.parametrize("content", [object(), {"a": b"x"}, {"a": {1}}, 1j, [[(1, 2, 3)]], ["\ud800"], {(1, 2): 3}])
def test_a_content_that_cannot_be_encoded_is_an_error(content: Any) -> None:
    for encoder in (ORIGINAL, OURS):
        with pytest.raises((TypeError, ValueError)):
            encoder.encode(content, "text/plain")


@pytest.mark.parametrize("rows", [[{"a": 1}, {"b": 2}], [{"a": 1}, 5], [1], [[1, 2]]])
def test_rows_that_are_not_a_table_are_an_error(rows: Any) -> None:
    for encoder in (ORIGINAL, OURS):
        with pytest.raises((ValueError, AttributeError, TypeError)):
            encoder.encode(rows, "text/csv")
