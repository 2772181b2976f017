"""Where arguments stand in a request: query, form, JSON, headers and cookies."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.inside import requests
from penstock.server.deepaas.inside.answers import Refusal
from penstock.server.deepaas.inside.requests import ABSENT, request_line

from .calling import FORM, asked, call_of, parts

URLENCODED = "application/x-www-form-urlencoded"
PAIRS = st.lists(st.tuples(st.text(), st.text()), max_size=5)


def refused(request: Any, part: str) -> tuple[int, bytes, bytes]:
    """Read a part of a request that is not to be read. Returns: status, content type and body of the answer."""
    with pytest.raises(Refusal) as refusal:
        getattr(request, part)
    status, content_type, _, body = read_answer(refusal.value.answer)
    return status, content_type, body


class TestQueries:
    @given(PAIRS)
    def test_hold_what_was_encoded_in_order(self, pairs: list[tuple[str, str]]) -> None:
        found = asked(query=pairs).line.query
        wanted = {name: [text for other, text in pairs if other == name] for name, _ in pairs}
        usable = {name: [text.encode("utf-8", "replace").decode() for text in texts] for name, texts in wanted.items()}
        assert {name: found[name.encode("utf-8", "replace").decode()] for name in found} == {
            name.encode("utf-8", "replace").decode(): texts for name, texts in usable.items()
        }

    def test_may_have_names_without_values(self) -> None:
        assert asked(query="a&b=&a=1").line.query == {"a": ["", "1"], "b": [""]}

    def test_are_utf_8_though_they_travel_as_latin_1(self) -> None:
        assert asked(query="a=é".encode().decode("latin-1")).line.query == {"a": ["é"]}


class TestHeaders:
    def test_have_all_values_of_a_name_in_any_letters(self) -> None:
        request = asked(headers=(("X-Many", "a"), ("x-many", "b")))
        assert request.line.headers["x-many"] == ["a", "b"]

    def test_that_are_no_utf_8_are_kept_as_surrogates(self) -> None:
        assert asked(headers=(("x", "h\xe9"),)).line.headers["x"] == ["h\udce9"]

    def test_of_the_same_bytes_are_read_once(self) -> None:
        line = call_of(headers=(("x", "read once"),)).split(b"\n")[0]
        assert request_line(line) is request_line(bytes(line))

    def test_are_forgotten_when_there_are_many(self) -> None:
        for number in range(3 * requests._MAX_CACHED):
            asked(query=f"a={number}")
        assert len(requests._CACHED_LINES) <= requests._MAX_CACHED

    def test_are_not_remembered_when_they_are_long(self) -> None:
        long = "a=" + "x" * requests._MAX_CACHED_BYTES
        assert asked(query=long).line is not asked(query=long).line
        assert asked(query="a=x").line is asked(query="a=x").line


class TestCookies:
    @pytest.mark.parametrize(
        ("said", "found"),
        [
            ("a=1; b=2", {"a": ["1"], "b": ["2"]}),
            ("a=1; a=2", {"a": ["2"]}),
            ('a="x y"; b=c%20d', {"a": ["x y"], "b": ["c%20d"]}),
            (";;=;a b;c", {"a": [""], "b": [""], "c": [""]}),
            ("a=1 2; b=3", {"a": ["1"], "2": [""], "b": ["3"]}),
            (r'a="x;y\"\303"; b=\"; c="d', {"a": ['x;y"\u00c3'], "b": ['\\"'], "c": ['"d']}),
            ("a\xc3\xa9=1; b=\xc3\xa9; a,b=2", {"b": ["\u00e9"]}),
        ],
    )
    def test_are_read(self, said: str, found: dict[str, list[str]]) -> None:
        assert asked(headers=(("cookie", said),)).line.cookies == found

    @pytest.mark.parametrize(
        "date",
        [
            "Wed, 09 Jun 2021 10:18:14 GMT",
            "Wednesday, 09-Jun-21 10:18:14 GMT",
            "Wed, 09 Jun 2021 10:18:14 +0200",
            "Wed Jun  9 10:18:14 2021",
        ],
    )
    def test_may_be_dates_with_their_blanks(self, date: str) -> None:
        assert asked(headers=(("cookie", f"a={date}; b=1"),)).line.cookies == {"a": [date], "b": ["1"]}

    def test_that_are_no_dates_end_at_a_blank(self) -> None:
        cookies = asked(headers=(("cookie", "a=someWednesday, 09 Jun 2021 10:18:14 GMT; b=Mon, 1"),)).line.cookies

        assert (cookies["a"], cookies["b"]) == (["someWednesday,"], ["Mon,"])

    def test_need_not_be_there(self) -> None:
        assert asked().line.cookies == {}


class TestJson:
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_is_what_was_sent(self, value: Any) -> None:
        assert asked(json.dumps(value).encode(), "application/json").json == value

    @pytest.mark.parametrize("kind", ["application/json", "Application/JSON; x=y", "application/problem+json"])
    def test_counts_for_its_types(self, kind: str) -> None:
        assert asked(b"[1]", kind).json == [1]

    @pytest.mark.parametrize("kind", ["", "text/json", "application/jsonp", "application/x/json", "json", "x/y+json"])
    def test_does_not_count_for_others(self, kind: str) -> None:
        assert asked(b"[1]", kind).json is ABSENT

    def test_may_be_of_another_charset(self) -> None:
        assert asked('["é"]'.encode("utf-16"), "application/json; charset=utf-16").json == ["é"]

    def test_of_no_bytes_is_absent(self) -> None:
        assert asked(b"", "application/json").json is ABSENT

    @pytest.mark.parametrize(
        "body", [b"{bad", b" ", b"\xff", b"\xef\xbb\xbf1", b"[" * 100_000], ids=["cut", "blank", "bytes", "bom", "deep"]
    )
    def test_that_is_none_is_refused(self, body: bytes) -> None:
        wanted = (400, b"application/json", b'{"json": ["Invalid JSON body."]}')
        assert refused(asked(body, "application/json"), "json") == wanted

    def test_in_a_charset_that_nobody_knows_is_refused(self) -> None:
        assert refused(asked(b"1", "application/json; charset=none-such"), "json")[0] == 400


class TestForms:
    @given(PAIRS)
    def test_written_like_queries_hold_what_was_encoded(self, pairs: list[tuple[str, str]]) -> None:
        clean = [
            (name.encode("utf-8", "replace").decode(), text.encode("utf-8", "replace").decode()) for name, text in pairs
        ]
        found = asked(urlencode(clean).encode(), URLENCODED).form
        assert found == {name: [text for other, text in clean if other == name] for name, _ in clean}

    def test_may_be_of_another_charset(self) -> None:
        assert asked(b"a=\xe9", f"{URLENCODED}; charset=latin-1").form == {"a": ["é"]}

    @pytest.mark.parametrize(
        "said", [(b"a=\xe9", URLENCODED), (b"a=1", f"{URLENCODED}; charset=none-such"), (b"x", FORM)]
    )
    def test_that_are_none_are_refused(self, said: tuple[bytes, str]) -> None:
        wanted = (400, b"application/json", b'{"form": ["Invalid form body."]}')
        assert refused(asked(*said), "form") == wanted

    @pytest.mark.parametrize("kind", ["", "text/plain", "multipart/mixed; boundary=edge"])
    def test_of_other_types_have_nothing_in_them(self, kind: str) -> None:
        assert asked(parts(("a", b"1")), kind).form == {}

    @given(st.binary(), st.sampled_from([FORM, URLENCODED, "application/json", "application/json; charset=utf-16"]))
    def test_and_json_of_any_bytes_are_read_or_refused(self, body: bytes, kind: str) -> None:
        request = asked(body, kind)
        for part in ("form", "json"):
            status = 400
            try:
                getattr(request, part)
            except Refusal as refusal:
                status = read_answer(refusal.answer)[0]
            assert status == 400


@given(st.text(st.characters(codec="latin-1")), st.text(st.characters(codec="latin-1")))
def test_cookies_of_any_bytes_are_read(said: str, more: str) -> None:
    found = asked(headers=(("cookie", said), ("cookie", more))).line.cookies
    assert all(name and name == name.strip() and len(values) == 1 for name, values in found.items())
