"""The request object is a mapping and a file, and one call's changes do not reach the next."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.server.abeja.inside.request import HttpHeaders, Request, RequestHead

HEADERS = [("accept", ["*/*"]), ("x-many", ["one", "two"]), ("x-empty", [""])]
FORM = b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\nfirst\r\n--edge\r\n\r\nsecond\r\n--edge--'


def request(body: bytes = b'{"a": 1}', boundary: str | None = None) -> Request:
    fields: dict[str, Any] = {"method": "POST", "type": "text/plain; a=b", "headers": HEADERS, "boundary": boundary}
    return RequestHead(json.loads(json.dumps(fields))).request(body)


def test_a_request_is_an_immutable_mapping() -> None:
    mapping: Any = request()

    assert list(mapping) == ["http_method", "content_type", "headers", "http_headers", "contents"]
    assert (mapping["http_method"], mapping["content_type"], mapping["metadata"]) == ("POST", "text/plain; a=b", None)
    assert mapping.get("missing", 5) == 5
    assert "metadata" not in mapping
    assert mapping == dict(mapping)
    assert mapping != {}
    assert str(mapping) == str(dict(mapping))
    with pytest.raises(TypeError):
        mapping["a"] = 1
    with pytest.raises(TypeError):
        hash(mapping)
    with pytest.raises(KeyError, match="missing"):
        mapping["missing"]


def test_a_request_is_a_readable_file() -> None:
    handler_request = request(b"0123456789")

    assert [
        handler_request.read(3),
        handler_request["contents"][0].read(2),
        handler_request.read(),
        handler_request.read(),
    ] == [
        b"012",
        b"34",
        b"56789",
        b"",
    ]
    assert json.load(request()) == {"a": 1}
    handler_request.close()
    with pytest.raises(ValueError, match="closed"):
        handler_request.read()


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
    form_request = request(b"--edge--", "edge")

    assert form_request["contents"] == []
    with pytest.raises(ValueError, match="no content"):
        form_request.read()
    with pytest.raises(ValueError, match="no content"):
        form_request["metadata"]


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
    fields = {"method": "GET", "type": "t", "headers": HEADERS, "boundary": None}
    head = RequestHead(fields)
    first = head.request(b"x")
    first["headers"][1]["values"].clear()
    first["headers"].pop()
    first["contents"].clear()

    second = head.request(b"y")
    assert second["headers"] == [{"key": name, "values": values} for name, values in HEADERS]
    assert second.read() == b"y"
