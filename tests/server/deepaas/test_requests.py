"""The parts of a request that hold arguments: query, form, JSON, headers and cookies."""

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

from .worker_calls import FORM, call_of, parts, request_of

URLENCODED = "application/x-www-form-urlencoded"
PAIRS = st.lists(st.tuples(st.text(), st.text()), max_size=5)


def refused(request: Any, part: str) -> tuple[int, bytes, bytes]:
    """Read a part of a request that must be rejected. Returns: status, content type and body of the answer."""
    with pytest.raises(Refusal) as refusal:
        getattr(request, part)
    status, content_type, _, body = read_answer(refusal.value.answer)
    return status, content_type, body


class TestQueries:
    @given(PAIRS)
    def test_a_query_has_the_encoded_pairs_in_order(self, pairs: list[tuple[str, str]]) -> None:
        found = request_of(query=pairs).line.query
        expected = {name: [text for other, text in pairs if other == name] for name, _ in pairs}
        usable = {
            name: [text.encode("utf-8", "replace").decode() for text in texts] for name, texts in expected.items()
        }
        assert {name: found[name.encode("utf-8", "replace").decode()] for name in found} == {
            name.encode("utf-8", "replace").decode(): texts for name, texts in usable.items()
        }

    def test_a_query_may_have_names_without_values(self) -> None:
        assert request_of(query="a&b=&a=1").line.query == {"a": ["", "1"], "b": [""]}

    def test_a_query_is_decoded_as_utf_8(self) -> None:
        assert request_of(query="a=é".encode().decode("latin-1")).line.query == {"a": ["é"]}


class TestHeaders:
    def test_a_header_has_all_of_its_values_regardless_of_case(self) -> None:
        request = request_of(headers=(("X-Many", "a"), ("x-many", "b")))
        assert request.line.headers["x-many"] == ["a", "b"]

    def test_header_bytes_that_are_not_utf_8_are_kept_as_surrogates(self) -> None:
        assert request_of(headers=(("x", "h\xe9"),)).line.headers["x"] == ["h\udce9"]

    def test_equal_request_lines_are_parsed_once(self) -> None:
        line = call_of(headers=(("x", "read once"),)).split(b"\n")[0]
        assert request_line(line) is request_line(bytes(line))

    def test_the_number_of_cached_request_lines_is_bounded(self) -> None:
        for number in range(3 * requests._MAX_CACHED):
            request_of(query=f"a={number}")
        assert len(requests._CACHED_LINES) <= requests._MAX_CACHED

    def test_long_request_lines_are_not_cached(self) -> None:
        long = "a=" + "x" * requests._MAX_CACHED_BYTES
        assert request_of(query=long).line is not request_of(query=long).line
        assert request_of(query="a=x").line is request_of(query="a=x").line


class TestCookies:
    @pytest.mark.parametrize(
        ("cookie", "found"),
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
    def test_cookies_are_parsed_as_by_the_original(self, cookie: str, found: dict[str, list[str]]) -> None:
        assert request_of(headers=(("cookie", cookie),)).line.cookies == found

    @pytest.mark.parametrize(
        "date",
        [
            "Wed, 09 Jun 2021 10:18:14 GMT",
            "Wednesday, 09-Jun-21 10:18:14 GMT",
            "Wed, 09 Jun 2021 10:18:14 +0200",
            "Wed Jun  9 10:18:14 2021",
        ],
    )
    def test_a_cookie_may_be_a_date_with_spaces(self, date: str) -> None:
        assert request_of(headers=(("cookie", f"a={date}; b=1"),)).line.cookies == {"a": [date], "b": ["1"]}

    def test_a_cookie_that_is_not_a_date_ends_at_a_space(self) -> None:
        cookies = request_of(headers=(("cookie", "a=someWednesday, 09 Jun 2021 10:18:14 GMT; b=Mon, 1"),)).line.cookies

        assert (cookies["a"], cookies["b"]) == (["someWednesday,"], ["Mon,"])

    def test_a_request_without_cookies_has_none(self) -> None:
        assert request_of().line.cookies == {}


class TestJson:
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_a_json_body_is_the_value_that_was_sent(self, value: Any) -> None:
        assert request_of(json.dumps(value).encode(), "application/json").json == value

    @pytest.mark.parametrize("kind", ["application/json", "Application/JSON; x=y", "application/problem+json"])
    def test_a_body_with_a_json_content_type_is_parsed(self, kind: str) -> None:
        assert request_of(b"[1]", kind).json == [1]

    @pytest.mark.parametrize("kind", ["", "text/json", "application/jsonp", "application/x/json", "json", "x/y+json"])
    def test_a_body_with_another_content_type_is_not_parsed_as_json(self, kind: str) -> None:
        assert request_of(b"[1]", kind).json is ABSENT

    def test_a_json_body_is_decoded_in_its_charset(self) -> None:
        assert request_of('["é"]'.encode("utf-16"), "application/json; charset=utf-16").json == ["é"]

    def test_an_empty_body_has_no_json(self) -> None:
        assert request_of(b"", "application/json").json is ABSENT

    @pytest.mark.parametrize(
        "body", [b"{bad", b" ", b"\xff", b"\xef\xbb\xbf1", b"[" * 100_000], ids=["cut", "blank", "bytes", "bom", "deep"]
    )
    def test_an_invalid_json_body_is_rejected(self, body: bytes) -> None:
        expected = (400, b"application/json", b'{"json": ["Invalid JSON body."]}')
        assert refused(request_of(body, "application/json"), "json") == expected

    def test_a_json_body_in_an_unknown_charset_is_rejected(self) -> None:
        assert refused(request_of(b"1", "application/json; charset=none-such"), "json")[0] == 400


class TestForms:
    @given(PAIRS)
    def test_a_urlencoded_form_has_the_encoded_pairs(self, pairs: list[tuple[str, str]]) -> None:
        clean = [
            (name.encode("utf-8", "replace").decode(), text.encode("utf-8", "replace").decode()) for name, text in pairs
        ]
        found = request_of(urlencode(clean).encode(), URLENCODED).form
        assert found == {name: [text for other, text in clean if other == name] for name, _ in clean}

    def test_a_form_is_decoded_in_its_charset(self) -> None:
        assert request_of(b"a=\xe9", f"{URLENCODED}; charset=latin-1").form == {"a": ["é"]}

    @pytest.mark.parametrize(
        "form", [(b"a=\xe9", URLENCODED), (b"a=1", f"{URLENCODED}; charset=none-such"), (b"x", FORM)]
    )
    def test_an_invalid_form_is_rejected(self, form: tuple[bytes, str]) -> None:
        expected = (400, b"application/json", b'{"form": ["Invalid form body."]}')
        assert refused(request_of(*form), "form") == expected

    @pytest.mark.parametrize("kind", ["", "text/plain", "multipart/mixed; boundary=edge"])
    def test_a_body_with_another_content_type_is_an_empty_form(self, kind: str) -> None:
        assert request_of(parts(("a", b"1")), kind).form == {}

    @given(st.binary(), st.sampled_from([FORM, URLENCODED, "application/json", "application/json; charset=utf-16"]))
    def test_any_body_is_either_parsed_or_rejected(self, body: bytes, kind: str) -> None:
        request = request_of(body, kind)
        for part in ("form", "json"):
            status = 400
            try:
                getattr(request, part)
            except Refusal as refusal:
                status = read_answer(refusal.answer)[0]
            assert status == 400


@given(st.text(st.characters(codec="latin-1")), st.text(st.characters(codec="latin-1")))
def test_any_cookie_header_is_parsed(cookie: str, more: str) -> None:
    found = request_of(headers=(("cookie", cookie), ("cookie", more))).line.cookies
    assert all(name and name == name.strip() and len(values) == 1 for name, values in found.items())
