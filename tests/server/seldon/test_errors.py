"""Exceptions are answered as in seldon-core 1.17.1, and logged with their traceback."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import http
from typing import Any

import pytest

from penstock.server.seldon.inside.errors import UNREPORTABLE, exception_text, http_status
from penstock.server.seldon.inside.seldon_core_classes import SeldonMicroserviceException

from .component_calls import ask, ask_service, failed, inside


class Fails:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def predict(self, X: Any, names: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \u00e9"), "bad \u00e9"), (KeyError("k"), "'k'"), (RuntimeError("a", "b"), "('a', 'b')"),
        (Exception(), ""), (NotImplementedError("later"), "later"),
        (TypeError("Model.tags() missing 1 required positional argument: 'X'"),
         "tags() missing 1 required positional argument: 'X'"),
        (TypeError("make.<locals>.Model.f() takes 1 positional argument but 2 were given"),
         "f() takes 1 positional argument but 2 were given"),
        (ValueError("Model.f() takes"), "Model.f() takes"),
    ],
    ids=["text", "a key", "two", "none", "not implemented", "a method", "a local class", "another"],
)  # fmt: skip
def test_the_text_of_an_exception_is_in_the_answer(error: Exception, text: str) -> None:
    assert exception_text(error) == text
    assert ask(Fails(error), {"strData": "a"})[:2] == (500, failed(text))


class WithoutATextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [WithoutATextError(), SeldonMicroserviceException(b"a"), SeldonMicroserviceException("a", status_code=1.5)],
    ids=["no text", "a text of bytes", "a status of no kind"],
)
def test_an_exception_without_a_usable_text_or_status_is_an_internal_error(error: Exception) -> None:
    assert ask(Fails(error), {"strData": "a"})[:2] == (500, failed(UNREPORTABLE))


def test_the_logged_traceback_starts_at_user_code(capfd: pytest.CaptureFixture[str]) -> None:
    ask(Fails(ValueError("bad")), {"strData": "a"})
    log_text = capfd.readouterr().err
    assert "raise self.error" in log_text
    assert "ValueError: bad" in log_text
    assert "endpoints.py" not in log_text


@pytest.mark.parametrize(
    ("code", "status"),
    [(402, 402), ("404", 404), ("404 Gone", 404), (http.HTTPStatus.CREATED, 201), (-1, 500), (99, 500), (1000, 500),
     (True, 500), ("abc", 500)],
    ids=["int", "text", "words", "enum", "negative", "small", "large", "bool", "no number"],
)  # fmt: skip
def test_the_status_code_of_a_raw_answer_is_the_http_status(code: Any, status: int) -> None:
    assert http_status(code) == status


def test_only_predict_raw_sets_the_http_status_from_its_answer() -> None:
    class Raw:
        def predict_raw(self, message: Any) -> Any:
            return {"status": {"code": message["strData"]}}

        transform_input_raw = predict_raw

    service = inside(Raw())
    assert ask_service(service, {"strData": 402})[:2] == (402, '{"status":{"code":402}}\n')
    assert ask_service(service, {"strData": 402}, 2)[:2] == (200, '{"status":{"code":402}}\n')  # type: ignore[arg-type]
    assert ask_service(service, {"strData": 204})[:2] == (204, "")
    assert ask_service(service, {"strData": None})[:2] == (500, failed("Invalid status argument"))
    assert ask_service(service, {"strData": " "})[:2] == (500, failed("Empty status argument"))


def test_metrics_of_a_call_that_exits_are_not_counted_for_the_next_call() -> None:
    class Exits:
        calls = 0

        def predict(self, X: Any, names: Any) -> Any:
            return X

        def metrics(self) -> Any:
            return [{"type": "GAUGE", "key": "a", "value": 1}]

        def tags(self) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise SystemExit(3)
            return {}

    service = inside(Exits())
    with pytest.raises(SystemExit):
        ask_service(service, {"strData": "a"})
    assert ask_service(service, {"strData": "a"}).metrics == [["a", "GAUGE", 1, None]]
