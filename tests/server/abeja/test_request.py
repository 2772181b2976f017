"""The request object is a mapping and a file, and one call's changes do not reach the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.server.abeja.inside.request import HttpHeaders, Request, RequestHead

HEADERS = [("accept", ["*/*"]), ("x-many", ["one", "two"]), ("x-empty", [""])]
FORM = b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\nfirst\r\n--edge\r\n\r\nsecond\r\n--edge--'


def request(body: bytes = b'{"a": 1}', boundary: str | None = None) -> Request:
    said: dict[str, Any] = {"method": "POST", "type": "text/plain; a=b", "headers": HEADERS, "boundary": boundary}
    return RequestHead(json.loads(json.dumps(said))).request(body)


def test_a_request_is_an_immutable_mapping() -> None:
    made: Any = request()

    assert list(made) == ["http_method", "content_type", "headers", "http_headers", "contents"]
    assert (made["http_method"], made["content_type"], made["metadata"]) == ("POST", "text/plain; a=b", None)
    assert made.get("missing", 5) == 5
    assert "metadata" not in made
    assert made == dict(made)
    assert made != {}
    assert str(made) == str(dict(made))
    with pytest.raises(TypeError):
        made["a"] = 1
    with pytest.raises(TypeError):
        hash(made)
    with pytest.raises(KeyError, match="missing"):
        made["missing"]


def test_a_request_is_a_readable_file() -> None:
    made = request(b"0123456789")

    assert [made.read(3), made["contents"][0].read(2), made.read(), made.read()] == [b"012", b"34", b"56789", b""]
    assert json.load(request()) == {"a": 1}
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made.read()


def test_the_body_of_a_request_is_a_read_only_file() -> None:
    body = request(b"a\nb")["contents"][0]["body"]

    assert [body.peek(1)[:1], body.readline(), body.seek(0), list(body)] == [b"a", b"a\n", 0, [b"a\n", b"b"]]
    assert not body.writable()


def test_a_form_has_one_content_per_part() -> None:
    first, second = request(FORM, "edge")["contents"]

    assert dict(first) == {
        "content_type": None,
        "metadata": None,
        "body": first["body"],
        "file_name": None,
        "form_name": "a",
    }
    assert [first.read(), second.read(), second["form_name"]] == [b"first", b"second", None]


def test_reading_a_form_without_parts_is_an_error() -> None:
    made = request(b"--edge--", "edge")

    assert made["contents"] == []
    with pytest.raises(ValueError, match="no content"):
        made.read()
    with pytest.raises(ValueError, match="no content"):
        made["metadata"]


def test_headers_are_case_insensitive_and_have_one_item_per_value() -> None:
    headers = request()["http_headers"]

    assert [headers["X-MANY"], headers["missing"], headers.get("missing", "d")] == ["two", None, "d"]
    assert headers.get_all("X-Many") == ["one", "two"]
    assert ["x-empty" in headers, "missing" in headers, headers.has_key("Accept")] == [True, False, True]
    assert list(headers) == [("accept", "*/*"), ("x-many", "one"), ("x-many", "two"), ("x-empty", "")]
    assert (len(headers), list(headers.keys()), list(headers.values())) == (
        4, ["accept", "x-many", "x-many", "x-empty"], ["*/*", "one", "two", ""],
    )  # fmt: skip
    assert headers == HttpHeaders(tuple(headers.items()))
    assert headers != {}


def test_changes_that_a_call_makes_to_its_request_do_not_affect_the_next_call() -> None:
    said = {"method": "GET", "type": "t", "headers": HEADERS, "boundary": None}
    asked = RequestHead(said)
    first = asked.request(b"x")
    first["headers"][1]["values"].clear()
    first["headers"].pop()
    first["contents"].clear()

    second = asked.request(b"y")
    assert second["headers"] == [{"key": name, "values": values} for name, values in HEADERS]
    assert second.read() == b"y"
