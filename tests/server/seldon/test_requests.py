"""The message of a request is found where Flask 2.2 and seldon-core 1.17.1 look for it."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import pytest

from .component_calls import answer_of, ask, failed, inside, posted


class Ident:
    def predict(self, X: Any, features_names: Any = None) -> Any:
        return X


A = '{"meta":{},"strData":"a"}\n'
NOT_FOUND = failed("Can't find JSON in data", "MICROSERVICE_BAD_DATA")
BODY = b'{"strData":"a"}'
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", A), ("application/json; charset=latin-1", A), ("APPLICATION/JSON", A),
        ("application/vnd.x+json", A), ("application/json, text/plain", A), ("", NOT_FOUND), ("text/plain", NOT_FOUND),
        ("text/json", NOT_FOUND), (FORM, NOT_FOUND), ("application/octet-stream", NOT_FOUND),
        ("multipart/form-data", failed("Invalid request data type: {}", "MICROSERVICE_BAD_DATA")),
    ],
)  # fmt: skip
def test_a_body_is_read_only_if_its_content_type_is_json(content_type: str, body: str) -> None:
    assert posted(Ident(), BODY, content_type).body == body


def test_a_form_takes_precedence_over_the_query_and_the_query_over_the_body() -> None:
    query, field = 'json={"strData":"query"}', b"x=1&json=" + quote('{"strData":"field +"}').encode()
    assert posted(Ident(), BODY, "application/json", query).decoded["strData"] == "query"
    assert posted(Ident(), field, FORM, query).decoded["strData"] == "field +"
    assert posted(Ident(), b"json=&json=5", FORM, query).decoded["strData"] == "query"


@pytest.mark.parametrize("body", [b"{", b"", b"null", b'{"a":1,}', b'{"strData":"\xe9"}'])
def test_a_malformed_body_is_rejected_as_bad_data(body: bytes) -> None:
    assert ask(Ident(), body)[:2] == (400, NOT_FOUND)


def test_a_body_nested_too_deeply_is_an_internal_error() -> None:
    answer = ask(Ident(), b"[" * 100_000 + b"]" * 100_000)
    assert answer.status == 500
    assert answer.decoded["status"]["info"].startswith("maximum recursion depth exceeded")


def test_a_malformed_query_is_an_internal_error() -> None:
    answer = posted(Ident(), b"", "", "json={")
    text = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert answer[:2] == (500, failed(text))


def test_raw_methods_receive_the_raw_body_with_payload_passthrough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD_PASSTHROUGH", "true")

    class Reverses:
        def predict_raw(self, payload: Any) -> Any:
            return payload[::-1]

    assert ask(Reverses(), b"abc").body == "cba"
    assert posted(Reverses(), b"abc", "text/plain").body == "cba"
    assert posted(Reverses(), b"abc", FORM).body == ""
    assert posted(Reverses(), b"abc", "text/plain", "json=xy").body == "yx"


def test_a_result_that_is_not_bytes_is_an_error_with_payload_passthrough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAYLOAD_PASSTHROUGH", "true")
    user = type("Numbers", (), {"predict_raw": lambda self, payload: [b"a", 3]})()
    text = "sequence item 1: expected a bytes-like object, int found"
    assert ask(user, b"abc")[:2] == (500, failed(text))


def part(name: str, value: str, *, file: bool = False, more: str = "") -> str:
    named = f'name="{name}"' + ('; filename="f"' if file else "")
    return f"--x\r\nContent-Disposition: form-data; {named}{more}\r\n\r\n{value}\r\n"


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (part("data", '{"ndarray":[[1]]}') + "--x--\r\n", '{"data":{"names":["t:0"],"ndarray":[[1]]},"meta":{}}\n'),
        (part("strData", "a") + "--x--", A),
        (part("strData", "a", file=True) + "--x--", A),
        (part("strData", "b") + part("strData", "a", file=True) + "--x--", A),
        (part("binData", "\x00\xff\r\nab\n", file=True) + "--x--", '{"binData":"AP8NCmFiCg==","meta":{}}\n'),
        (part("jsonData", '{"b":1}') + part("meta", '{"puid":"p"}') + "--x--",
         '{"jsonData":{"b":1},"meta":{"puid":"p"}}\n'),
        ("before\r\n" + part("strData", "a") + "--x--\r\nbehind", A),
        (part("strData", "a").replace("\r\n", "\n") + "--x--", A),
        (part('b"; name="strData', "a") + "--x--", A),
        (part("strData", "a") + part("strData", "b") + "--x--", A),
        (part("strData", "a"), failed("Invalid request data type: {}", "MICROSERVICE_BAD_DATA")),
        ("--x\r\nno colon\r\n\r\na\r\n--x--", failed("Invalid request data type: {}", "MICROSERVICE_BAD_DATA")),
        (part("jsonData", "{") + "--x--",
         failed("Expecting property name enclosed in double quotes: line 1 column 2 (char 1)")),
        (part("strData", "\xe9", more="\r\nContent-Type: text/plain; charset=nope") + "--x--",
         failed("unknown encoding: nope")),
        (part("strData", "\xe9", more="\r\nContent-Type: text/plain; charset=latin-1") + "--x--",
         '{"meta":{},"strData":"\\u00e9"}\n'),
    ],
    ids=["data", "text", "a file of text", "both", "bytes", "meta", "around", "line feeds", "two names", "twice",
         "no end", "no header", "no json", "unknown charset", "a charset"],
)  # fmt: skip
def test_the_fields_and_files_of_a_multipart_form_are_the_message(form: str, body: str) -> None:
    assert posted(Ident(), form.encode("latin-1"), MULTIPART).body == body


def test_a_health_check_ignores_the_request_body() -> None:
    class Well:
        def health_status(self) -> Any:
            return [1, 2]

    answer = answer_of(inside(Well()).call(32, 1, bytes((6, 0)), [])[0])
    assert answer.body == '{"data":{"names":[],"tensor":{"shape":[2],"values":[1,2]}},"meta":{}}\n'


@pytest.mark.parametrize(
    ("headers", "content", "text"),
    [
        ('; "' + ";" * 80_000, b"a", "Invalid request data type: {}"),
        ("\r\nX: y" + "z" * (1 << 16), b"a", "Invalid request data type: {}"),
        ("\r\nContent-Type: a/b; charset=punycode", b"a" * 160_000 + b"-" + b"9" * 160_000, "not a text charset"),
    ],
    ids=["parameters", "long", "punycode"],
)  # fmt: skip
def test_a_multipart_form_is_parsed_in_linear_time(headers: str, content: bytes, text: str) -> None:
    head = f"--x\r\nContent-Disposition: form-data; name=strData{headers}\r\n\r\n".encode()
    start = time.process_time()

    assert text in posted(Ident(), head + content + b"\r\n--x--\r\n", MULTIPART).body
    assert time.process_time() - start < 2.0
