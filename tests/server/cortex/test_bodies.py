"""Bodies as Flask read them: which are read, as what values, and which are malformed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.cortex.bodies import MalformedError, encoding_of, is_json, parse_sample

DEPTH = 100
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


def same(one: Any, other: Any) -> bool:
    """Compare types too, and NaN with itself."""
    return repr(one) == repr(other)


def depth(value: Any) -> int:
    """Count the lists and dicts around the innermost value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=latin-1", "application/vnd.api+json", " application/json",
     "application/json,x"],
)  # fmt: skip
def test_a_json_content_type_is_recognized(content_type: str) -> None:
    assert is_json(content_type.encode())


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "text/json", "application/x-www-form-urlencoded", "application/jsonp", ";", "text/x+json"],
)  # fmt: skip
def test_other_content_types_are_not_json(content_type: str) -> None:
    assert not is_json(content_type.encode())


@given(JSON, st.sampled_from(ENCODINGS), st.booleans())
def test_json_written_by_python_is_read_back_in_every_encoding(value: Any, encoding: str, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        body = text.encode(encoding)
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can represent
        return

    assert same(parse_sample(body, DEPTH), json.loads(text))


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_python_s_json_reads_them(body: bytes) -> None:
    try:
        expected = json.loads(body.decode(encoding_of(body)))
    except ValueError:
        with pytest.raises(MalformedError):
            parse_sample(body, DEPTH)
    else:
        assert same(parse_sample(body, DEPTH), expected)


@given(st.text('[]{}":,0123456789.-+eE ntfalsru\\NIiy', max_size=40))
def test_anything_like_json_is_read_as_python_s_json_reads_it(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(MalformedError):
            parse_sample(text.encode(), DEPTH)
    else:
        assert same(parse_sample(text.encode(), DEPTH), expected)


def test_the_last_of_several_equal_keys_is_used() -> None:
    assert parse_sample(b'{"a": 1, "a": 2}', DEPTH) == {"a": 2}


def test_special_and_long_numbers_are_read_as_python_reads_them() -> None:
    match = parse_sample(b"[NaN, -Infinity, 1e400, 123456789012345678901234567890, -9223372036854775809, 1.0]", DEPTH)

    assert math.isnan(match[0])
    assert match[1:3] == [-math.inf, math.inf]
    assert same(match[3:], [123456789012345678901234567890, -9223372036854775809, 1.0])


@given(st.lists(st.integers(-(10**45), 10**45) | st.floats(allow_nan=False), max_size=5))
def test_long_numbers_beside_fractions_are_read_as_python_reads_them(numbers: list[float]) -> None:
    text = json.dumps([*numbers, 0.0012345678901234567])

    assert same(parse_sample(text.encode(), DEPTH), json.loads(text))


@given(st.integers(1, 45), st.integers(1, 60), st.integers(1, 60))
def test_all_digits_before_and_after_a_decimal_point_are_read(before: int, behind: int, other: int) -> None:
    text = f'[{"7" * before}.{"3" * behind}, {"8" * before}, {{"a": -{"9" * other}}}, 0.{"1" * other}]'

    assert same(parse_sample(text.encode(), DEPTH), json.loads(text))


@given(JSON, st.integers(1, 6))
def test_only_bodies_nested_deeper_than_the_limit_are_rejected(value: Any, most: int) -> None:
    body = json.dumps(value).encode()
    if depth(value) > most and len(body) > 2 * most:
        with pytest.raises(MalformedError):
            parse_sample(body, most)
    elif depth(value) <= most:
        assert same(parse_sample(body, most), json.loads(body))


@pytest.mark.parametrize(
    "body", [b"", b" ", b"{bad", b"{'a': 1}", b"[1,]", b'"\xff"', b'"\xed\xa0\x80"', b"\x00", b"1 2"]
)
def test_a_body_that_is_not_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_sample(body, DEPTH)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("count", [101, 5000, 200_000])
def test_a_body_that_is_nested_too_deeply_is_malformed(opening: bytes, count: int) -> None:
    with pytest.raises(MalformedError):
        parse_sample(opening * count + b"1" + (b"]" if opening == b"[" else b"}") * count, DEPTH)


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    texts = ['[{"' * 50, "\\", '"]'] * 3

    assert parse_sample(json.dumps(texts).encode(), DEPTH) == texts
    assert parse_sample(b"[" * 100 + b"]" * 100, DEPTH) is not None


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        (b"\xef\xbb\xbf{", "utf-8-sig"), (b"{}", "utf-8"), (b"", "utf-8"), (b"\0\0\0[", "utf-32-be"),
        (b"[\0\0\0", "utf-32-le"), (b"\0[\0]", "utf-16-be"), (b"[\0]\0", "utf-16-le"), (b"\x001", "utf-16-be"),
        (b"1\0", "utf-16-le"), (b"\xff\xfe[\0", "utf-16"), (b"\0\0\xfe\xff", "utf-32"), (b"1\x002", "utf-8"),
        (b"1\x002x", "utf-8"),
    ],
)  # fmt: skip
def test_the_encoding_is_detected_from_the_first_bytes(head: bytes, encoding: str) -> None:
    assert encoding_of(head) == encoding


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_body_with_too_many_values_is_malformed(encoding: str) -> None:
    with pytest.raises(MalformedError, match="more than 4194304 values"):
        parse_sample(("[" + "[]," * (1 << 21) + "[]]").encode(encoding), DEPTH)
