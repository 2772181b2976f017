"""The result of a handler is converted to an answer: its status, content type, headers and body."""

from __future__ import annotations

import http
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.abeja.inside.answers import ResponseWriter
from penstock.server.abeja.messages import CallRefusedError
from penstock.server.carrying.messages import read_answer

USUAL = {"X-Abeja-Sys-Meta-Proxy-Version": "2.6.5", "X-Abeja-Sys-Meta-Runtime-Version": "1.1.1"}


def answered(returned: Any, **environ: str) -> tuple[int, str, dict[str, str], bytes]:
    """Give status, type, headers and body."""
    status, content_type, lines, body = read_answer(ResponseWriter(environ, strict=False).pack(returned))
    fields = [line.split(": ", 1) for line in lines.decode().split("\r\n")[:-1]]
    return status, content_type.decode(), dict(fields), body


def headers(metadata: Any) -> dict[str, str]:
    """Give the headers that this metadata adds."""
    found = answered({"metadata": metadata})[2]
    assert USUAL.items() <= found.items()
    return {name: value for name, value in found.items() if name not in USUAL}


def test_an_empty_dict_is_answered_with_the_defaults() -> None:
    assert answered({}) == (200, "text/plain", USUAL, b"")


def test_a_handler_can_set_status_content_type_content_and_headers() -> None:
    returned = {
        "status_code": http.HTTPStatus.CREATED, "content_type": " application/json; charset=utf8 ",
        "content": {"a": 1}, "metadata": {"retry-after": "100"}, "other": object(),
    }  # fmt: skip

    assert answered(returned) == (
        201, "application/json; charset=utf8", USUAL | {"Retry-After": "100"}, b'{"a": 1}',
    )  # fmt: skip


def test_headers_that_identify_the_service_override_those_of_the_handler() -> None:
    environ = {
        "ABEJA_MODEL_ID": "1", "ABEJA_MODEL_VERSION": "a\u2212b c/d", "ABEJA_DEPLOYMENT_ID": "",
        "ABEJA_SERVICE_ID": "s",
    }  # fmt: skip
    expected = {"X-Abeja-Model-Id": "1", "X-Abeja-Model-Version": "a%E2%88%92b%20c%2Fd", "X-Abeja-Service-Id": "s"}

    assert answered({}, **environ)[2] == USUAL | expected
    mine = {"x-abeja-model-id": "mine", "X-Abeja-Sys-Meta-Runtime-Version": "9", "x-abeja-deployment-id": "d"}
    assert answered({"metadata": mine}, **environ)[2] == USUAL | expected | {"X-Abeja-Deployment-Id": "d"}


def test_header_names_are_canonical_and_values_are_one_line() -> None:
    assert headers({"x-ONE": " a\r\nb ", "x_two": None, 1: "n", "x-nul": "a\0b"}) == {
        "X-One": "a  b", "X_two": "", "1": "n", "X-Nul": "a b",
    }  # fmt: skip
    assert headers({"x": "日\ud800"}) == {"X": "日\ufffd"}


def test_invalid_and_reserved_headers_are_omitted() -> None:
    assert headers({"a b": "1", "a:": "1", "日": "1", "": "1"}) == {}
    assert headers({"content-length": "3", "Connection": "close", "transfer-encoding": "chunked", "date": "x"}) == {}
    assert headers([]) == {}


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=20)))
def test_no_metadata_entry_becomes_two_headers(metadata: dict[str, str]) -> None:
    found = headers(metadata)

    assert len(found) <= len(metadata)
    assert not any(control in value for value in found.values() for control in "\r\n\0")


def test_a_content_type_in_the_metadata_takes_precedence() -> None:
    assert answered({"content_type": "text/css", "metadata": {"content-type": "text/html"}})[1] == "text/html"


@pytest.mark.parametrize("empty", ["", " ", None])
def test_an_empty_content_type_in_the_metadata_removes_the_content_type(empty: str | None) -> None:
    assert answered({"content": "x", "metadata": {"Content-Type": empty}}) == (200, "", USUAL, b"x")


@pytest.mark.parametrize("status", [None, 200, 999, 404, np.int64(404), http.HTTPStatus.NOT_FOUND])
def test_a_status_code_is_an_integer_of_three_digits(status: Any) -> None:
    assert answered({"status_code": status})[0] == (status or 200)


@pytest.mark.parametrize("status", [0, -1, 99, 100, 199, 1000, 10**30, "404", 404.0, True, False, [200], b"200"])
def test_an_invalid_status_code_is_an_error(status: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        answered({"status_code": status})


def test_an_answer_without_a_body_has_no_content_type() -> None:
    assert answered({"status_code": 304})[1] == ""


@pytest.mark.parametrize("returned", ["x", b"x", None, [{}], ({}, 200), 200, iter([])])
def test_a_result_that_is_not_a_dict_is_an_error(returned: Any) -> None:
    with pytest.raises(TypeError, match="must return a dict"):
        answered(returned)


@pytest.mark.parametrize("content_type", [None, "", " \t", 5, b"text/plain", ["text/plain"]])
def test_a_content_type_that_is_not_a_nonempty_string_is_an_error(content_type: Any) -> None:
    with pytest.raises(ValueError, match="content_type"):
        answered({"content_type": content_type})


@pytest.mark.parametrize("content_type", ["bad;;", "text/", "multipart/form-data", "text/日本", "text/plain\r\nx: y"])
def test_a_malformed_content_type_is_answered_501(content_type: str) -> None:
    with pytest.raises(CallRefusedError) as caught:
        answered({"content_type": content_type})
    assert (caught.value.status, caught.value.text) == (501, f"Content-Type: [{content_type}] is not supported")


def test_a_malformed_content_type_is_rejected_even_if_a_header_overrides_the_content_type() -> None:
    with pytest.raises(CallRefusedError):
        answered({"content_type": "bad;;", "metadata": {"Content-Type": "text/html"}})


@pytest.mark.parametrize(
    "metadata", ["x: 1", [("x", "1")], 5, {"n": 1}, {"n": True}, {"n": b"1"}, {b"n": "1"}, {(1,): "1"}]
)
def test_metadata_that_is_not_a_dict_of_strings_is_an_error(metadata: Any) -> None:
    with pytest.raises(TypeError, match="metadata"):
        answered({"metadata": metadata})


def test_an_invalid_content_is_reported_before_a_malformed_content_type() -> None:
    with pytest.raises(TypeError):
        answered({"content_type": "bad;;", "content": object()})


def test_the_cache_of_content_types_is_bounded() -> None:
    answers = ResponseWriter({}, strict=False)
    for number in range(1000):
        answers.pack({"content_type": f"text/x{number}"})

    assert len(answers._content_types) <= 256
