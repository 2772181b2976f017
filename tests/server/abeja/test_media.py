"""Media types are parsed as by the original's proxy, and rejected if it rejected them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.abeja.media import is_name, parse_media, text_of

GOOD = {
    "text/plain": ("text/plain", {}),
    "TEXT/Plain; Charset=UTF-8": ("text/plain", {"charset": "UTF-8"}),
    "  text/plain ; a = b ": ("text/plain", {"a": "b"}),
    "text": ("text", {}),
    "*/*": ("*/*", {}),
    "text/plain;": ("text/plain", {}),
    'form-data; name="a;b"; filename=c': ("form-data", {"name": "a;b", "filename": "c"}),
    r'f; a="x\"y"; b="C:\d\\e"': ("f", {"a": 'x"y', "b": r"C:\d\e"}),
    'f; a=""': ("f", {"a": ""}),
    "f; a*=utf-8''%e6%97%a5": ("f", {"a": "\xe6\x97\xa5"}),
    "f; a=1; a*=us-ascii''2": ("f", {"a": "2"}),
    "f; a*=latin-1''%e9": ("f", {}),
    "f; a*=utf-8''%zz": ("f", {}),
    "f; a*=x": ("f", {}),
    'f; a*1=y; a*0="x"': ("f", {"a": "xy"}),
    "f; a*0*=utf-8''%41; a*1*=%42; a*2=C; a*4=E": ("f", {"a": "ABC"}),
}
BAD = [
    "", ";", "/", "/plain", "text/", "a/b/c", "bad;;", "text/plain; ;", "text/plain; charset", "text/plain; charset=",
    "text/plain; a=1; a=1", 'text/plain; a="b', "text /plain", "text/plain html", "text/plain, text/html",
    "te@xt/plain", "text/\xe9", "text/plain; a=\xe9", 'f; a="b\nc"', 'f; a="b\\"', "text/plain; a=b c",
]  # fmt: skip


@pytest.mark.parametrize("value", GOOD)
def test_a_valid_media_type_is_parsed_into_type_and_parameters(value: str) -> None:
    assert parse_media(value) == GOOD[value]


@pytest.mark.parametrize("value", BAD)
def test_an_invalid_media_type_is_rejected(value: str) -> None:
    assert parse_media(value) is None


WORD = st.text("abcXYZ0189!#$&+-.^_`{|}~", min_size=1, max_size=8)


@given(WORD, WORD, st.dictionaries(WORD.map(str.lower), st.text(st.characters(min_codepoint=32, max_codepoint=255))))
def test_a_media_type_with_quoted_parameters_is_read_back(kind: str, subkind: str, parameters: dict[str, str]) -> None:
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in parameters.items()}
    value = f"{kind}/{subkind}" + "".join(f'; {name}="{text}"' for name, text in quoted.items())

    assert parse_media(value) == (f"{kind}/{subkind}".lower(), parameters)


@given(st.text(st.characters(max_codepoint=255)))
def test_parse_media_raises_no_exception_for_any_text(value: str) -> None:
    parse_media(value)


def test_each_byte_that_is_not_utf_8_is_replaced() -> None:
    assert text_of(b"a\xe6\x97\xa5b") == "a日b"
    assert text_of(b"\xe6\x97\xff") == "\ufffd\ufffd\ufffd"


def test_only_words_are_header_names() -> None:
    assert [is_name(name) for name in ("x-one", "x_1", "", "a b", "a:", "é", "a\n")] == [True, True, *[False] * 5]
