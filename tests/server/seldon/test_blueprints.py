"""A component's `model_error_handler` answers its errors, run by Flask itself as in seldon-core."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from seldon_core.flask_utils import SeldonMicroserviceException

from penstock.server.seldon.messages import CALL, Endpoint, PayloadKind, read_answer

from .component_calls import ask, ask_service, failed, inside

flask = pytest.importorskip("flask")


class UserCustomException(Exception):  # noqa: N818 - the seed's
    def __init__(self, message: str, app_code: int, status_code: int) -> None:
        super().__init__()
        self.message, self.app_code, self.status_code = message, app_code, status_code

    def to_dict(self) -> dict[str, Any]:
        return {"status": {"status": self.status_code, "message": self.message, "app_code": self.app_code}}


class OtherError(Exception):
    pass


def blueprint(*also: str) -> Any:
    """Make the blueprint of Seldon's example, with further handlers if requested."""
    new_blueprint = flask.Blueprint("error_handlers", __name__)

    @new_blueprint.app_errorhandler(UserCustomException)  # type: ignore[untyped-decorator]
    def custom(error: UserCustomException) -> Any:
        response = flask.jsonify(error.to_dict())
        response.status_code = error.status_code
        return response

    if "exception" in also:
        new_blueprint.register_error_handler(OtherError, lambda error: "only in the blueprint's own URLs")
        new_blueprint.app_errorhandler(Exception)(lambda error: "never: the original's own is registered later")
    if "other" in also:

        @new_blueprint.app_errorhandler(OtherError)  # type: ignore[untyped-decorator]
        def other(error: OtherError) -> Any:
            return f"{flask.request.path} {flask.request.get_json()}", 499, {"X-Said": "yes"}

    if "hooks" in also:

        @new_blueprint.before_app_request  # type: ignore[untyped-decorator]
        def before() -> Any:
            flask.g.before = "before"

        @new_blueprint.after_app_request  # type: ignore[untyped-decorator]
        def after(response: Any) -> Any:
            response.headers["X-After"] = flask.g.before
            return response

    return new_blueprint


class MyModel:
    def __init__(self, *also: str) -> None:
        self.model_error_handler = blueprint(*also)

    def predict(self, X: Any, features_names: Any, **kwargs: Any) -> Any:
        if X == "custom":
            raise UserCustomException("Test-Error-Msg", 1402, 402)
        if X == "other":
            raise OtherError("text")
        if X == "seldon":
            raise SeldonMicroserviceException("no", 403, reason="R")
        if X == "404":
            flask.abort(404)
        if X == "response":
            flask.abort(flask.make_response("body", 418))
        return X


def test_an_exception_named_in_the_blueprint_gets_its_body_and_status() -> None:
    body = '{"status":{"app_code":1402,"message":"Test-Error-Msg","status":402}}\n'
    assert ask(MyModel(), {"strData": "custom"}) == (402, body, [], "")


def test_exceptions_not_named_in_the_blueprint_are_answered_as_without_a_blueprint() -> None:
    service = inside(MyModel("exception"))
    assert ask_service(service, {"strData": "fine"}).body == '{"meta":{},"strData":"fine"}\n'
    assert ask_service(service, {"strData": "other"})[:2] == (500, failed("text"))
    assert ask_service(service, {"strData": "seldon"})[:2] == (403, failed("no", "R"))
    assert ask_service(service, {"strData": "404"}).decoded["status"]["info"].startswith("404 Not Found: ")
    assert ask_service(service, b"{")[:2] == (400, failed("Can't find JSON in data", "MICROSERVICE_BAD_DATA"))


def test_an_error_handler_reads_the_request_and_its_headers_are_sent() -> None:
    answer = ask(MyModel("other"), {"strData": "other"})
    assert answer[:2] == (499, "/predict {'strData': 'other'}")
    assert answer.lines == "text/html; charset=utf-8\r\nX-Said: yes\r\n"


def test_before_and_after_request_hooks_run_for_successful_requests() -> None:
    service = inside(MyModel("hooks"))
    assert not service.description.health
    assert not service.description.batches
    answer = ask_service(service, {"strData": "fine"})
    assert answer[:2] == (200, '{"meta":{},"strData":"fine"}\n')
    assert answer.lines == "application/json\r\nX-After: before\r\n"
    assert ask_service(service, {"strData": "custom"}).lines == "application/json\r\nX-After: before\r\n"


def test_an_abort_with_a_response_is_answered_with_that_response() -> None:
    answer = ask(MyModel(), {"strData": "response"})
    assert (answer[:2], answer.lines) == ((418, "body"), "text/html; charset=utf-8\r\n")

    class WithoutBlueprint:
        def predict(self, X: Any, names: Any) -> Any:
            flask.abort(flask.Response("body", 418))

    assert ask(WithoutBlueprint(), {"strData": "a"})[:2] == (418, "body")


def test_flask_functions_that_need_an_app_work_without_a_blueprint() -> None:
    class Writes:
        def predict_raw(self, message: Any) -> Any:
            response = flask.jsonify(message)
            return response.get_json() if message["jsonData"] else response

    assert ask(Writes(), {"jsonData": 1}).body == '{"jsonData":1}\n'
    assert ask(Writes(), {"jsonData": 0})[:2] == (500, failed("Object of type Response is not JSON serializable"))


def test_an_exception_in_an_error_handler_is_an_internal_error() -> None:
    class Broken(MyModel):
        def __init__(self) -> None:
            self.model_error_handler = flask.Blueprint("broken", __name__)
            self.model_error_handler.app_errorhandler(OtherError)(lambda error: 1 / 0)

    answer = ask(Broken(), {"strData": "other"})
    assert answer.status == 500
    assert answer.decoded["status"]["info"].startswith("500 Internal Server Error: ")


class Looking:
    def predict(self, X: Any, names: Any) -> list[Any]:
        request = flask.request
        return [request.headers.get("X-Tenant"), request.path, request.args.get("a"), request.content_type]


def test_flask_request_has_the_clients_path_query_and_headers() -> None:
    head = {
        "method": "POST", "type": "application/json", "query": "a=5", "path": "/api/v1.0/predictions",
        "headers": [["x-tenant", "acme"], ["content-type", "application/json"], ["content-length", "7"]],
    }  # fmt: skip
    service = inside(Looking())
    assert service.description.reads_request
    call = (
        bytes((Endpoint.PREDICT, PayloadKind.HTTP)) + json.dumps(head).encode() + b"\n" + b'{"data": {"ndarray": [1]}}'
    )
    reply = read_answer(service.call(CALL, 1, call, [])[0])
    assert json.loads(reply[3])["data"]["ndarray"] == ["acme", "/api/v1.0/predictions", "5", "application/json"]


@pytest.mark.parametrize("handled", [False, True], ids=["without a blueprint", "with one"])
def test_values_stored_in_flask_g_are_gone_in_the_next_call(*, handled: bool) -> None:
    class Remembers:
        def predict(self, X: Any, names: Any) -> Any:
            flask.g.methods = [*flask.g.get("methods", ()), flask.request.method]
            return flask.g.methods

    if handled:
        handlers = blueprint()
        handlers.before_app_request(lambda: None)
        Remembers.model_error_handler = handlers  # type: ignore[attr-defined]
    service = inside(Remembers())
    call = bytes((Endpoint.PREDICT, PayloadKind.JSON)) + b'{"data": {"ndarray": [1]}}'
    replies = [read_answer(service.call(CALL, number, call, [])[0]) for number in (1, 2)]

    assert [json.loads(reply[3])["data"]["ndarray"] for reply in replies] == [["POST"]] * 2


def test_opening_a_component_ignores_modules_that_raise_on_attribute_access(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.chdir(tmp_path)

    assert not inside(Looking()).description.reads_request
