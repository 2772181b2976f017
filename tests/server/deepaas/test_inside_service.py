"""The service in a model's workers: predictions, trainings, and the desk's answers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import marshmallow
import pytest
from aiohttp import web
from marshmallow import fields, validate

from penstock.backends.errors import Code, InferError
from penstock.server.deepaas.inside.built_in import BuiltIn
from penstock.server.deepaas.inside.service import IMPORTABLE, DeepaasInside
from penstock.server.deepaas.messages import CHECK, METADATA, PROGRESS, TRAIN, ModelDescription

from .worker_calls import FORM, answered, call_of, opened, parts, predicted, sent_json

TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
FILE = fields.Raw(load_default=None, metadata={"type": "file", "location": "form"})
CHOICES = validate.OneOf(["application/zip", "application/json"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have uploads in a folder of their own, and restore sys.path afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def raising(error: BaseException) -> Any:
    """Make a function that raises."""

    def method(**_: Any) -> Any:
        raise error

    return method


def trained(service: DeepaasInside, call: bytes = b"") -> Any:
    """Run a training in a trainer."""
    return json.loads(service.call(TRAIN, 1, call or call_of(), [])[0])


class TestPredictions:
    def test_a_prediction_is_the_models_result_as_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = SimpleNamespace(
            get_predict_args=lambda: {"a-b": fields.Int(load_default=3)}, predict=lambda **arguments: arguments
        )
        service = opened(monkeypatch, model)
        assert answered(service) == (
            200, "application/json; charset=utf-8", "", b'{"status": "OK", "predictions": {"a-b": 3}}',
        )  # fmt: skip
        assert predicted(service, sent_json({"a-b": "4"})) == {"a-b": 4}

    def test_invalid_arguments_are_answered_with_422_or_400_and_a_missing_method_with_501(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = opened(monkeypatch, SimpleNamespace(get_predict_args=lambda: {"a": fields.Int()}))
        assert answered(service, call_of(query="a=x"))[::3] == (422, b'{"a": ["Not a valid integer."]}')
        assert answered(service, call_of(b"{", "application/json"))[0] == 400
        assert answered(service)[::3] == (501, b"501: Not implemented by underlying model (loaded 'm')")

    @pytest.mark.parametrize(
        "error", [ValueError("x"), NotImplementedError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr
    )
    def test_an_exception_of_predict_fails_only_its_own_call(
        self, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        service = opened(monkeypatch, SimpleNamespace(predict=raising(error)))
        assert answered(service) == answered(service) == (500, "text/plain; charset=utf-8", "", TROUBLE)

    def test_the_exception_of_predict_is_shown_if_configured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, SimpleNamespace(predict=raising(ValueError("boom"))), show_errors=True)
        assert answered(service)[3] == TROUBLE + b"\n\nValueError: boom"

    def test_an_http_exception_of_predict_is_answered_with_its_status(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, SimpleNamespace(predict=raising(web.HTTPNotFound(reason="no such cat"))))
        assert answered(service)[::3] == (404, b"404: no such cat")

    def test_a_result_that_is_not_json_is_answered_with_500(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert answered(opened(monkeypatch, SimpleNamespace(predict=lambda: b"x")))[::3] == (500, TROUBLE)

    def test_changing_a_default_does_not_affect_the_next_prediction(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def predict(seen: list[int]) -> list[int]:
            seen.append(1)
            return seen

        declared = {"seen": fields.List(fields.Int(), load_default=[])}
        service = opened(monkeypatch, SimpleNamespace(get_predict_args=lambda: declared, predict=predict))
        assert predicted(service) == predicted(service) == [1]

    def test_a_process_forked_by_user_code_may_exit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, SimpleNamespace(predict=raising(SystemExit(3))))
        child = os.fork()
        if child == 0:
            try:
                service.call(32, 1, call_of(), [])
            except SystemExit as error:
                os._exit(int(str(error.code)))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


class TestFiles:
    def predict(self, data: Any) -> Any:
        return [*data[:1], *data[2:], Path(data.filename).read_text(), data.filename]

    def test_an_uploaded_file_exists_for_the_duration_of_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, SimpleNamespace(get_predict_args=lambda: {"data": FILE}, predict=self.predict))
        found = predicted(service, call_of(parts(("data", b"content", "f.txt", "text/plain")), FORM))
        assert found[:4] == ["data", "text/plain", "f.txt", "content"]
        assert not Path(found[4]).exists()

    def test_an_uploaded_file_is_removed_after_a_failed_call(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        model = SimpleNamespace(get_predict_args=lambda: {"data": FILE}, predict=raising(ValueError()))
        service = opened(monkeypatch, model)
        assert answered(service, call_of(parts(("data", b"content", "f.txt")), FORM))[0] == 500
        assert [path for path in folder.rglob("*") if path.is_file()] == []
        service.close()
        assert list(folder.iterdir()) == []

    def test_a_returned_upload_is_sent_before_it_is_removed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        declared = {"data": FILE, "accept": fields.Str(validate=CHOICES)}

        def predict(data: Any, accept: str) -> Any:
            with Path(data.filename).open("rb") as file:
                return file

        model = SimpleNamespace(get_predict_args=lambda: declared, predict=predict)
        status, kind, lines, body = answered(
            opened(monkeypatch, model), call_of(parts(("data", b"content", "f.txt")), FORM)
        )
        assert (status, kind, body) == (200, "application/zip", b"content")
        assert lines.startswith("Content-Disposition: attachment; filename=")


class TestContentTypes:
    MODEL = SimpleNamespace(
        get_predict_args=lambda: {"accept": fields.Str(validate=CHOICES)}, predict=lambda accept: accept
    )

    def test_the_content_type_is_the_accept_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, self.MODEL)
        assert answered(service)[1::2] == ("application/zip", b"application/zip")
        assert predicted(service, call_of(query={"accept": "*/*"})) == "*/*"
        assert predicted(service, call_of(query={"accept": "application/json"})) == "application/json"
        assert answered(service, call_of(query={"accept": "text/html"}))[0] == 422

    def test_the_content_type_may_be_selected_by_the_accept_header(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, self.MODEL, accept_header=True)
        assert predicted(service, call_of(headers=(("accept", "application/json"),))) == "application/json"

    def test_a_result_that_does_not_fit_the_accepted_type_is_answered_with_500(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = SimpleNamespace(get_predict_args=self.MODEL.get_predict_args, predict=lambda accept: {"a": 1})
        assert answered(opened(monkeypatch, model))[::3] == (500, TROUBLE)


class TestResponseSchemas:
    FIELDS: ClassVar = {"label": fields.Str(required=True), "probability": fields.Float()}

    @pytest.mark.parametrize("schema", [FIELDS, marshmallow.Schema.from_dict(FIELDS)], ids=["dict", "class"])
    @pytest.mark.parametrize(
        "value", [{"label": "a", "probability": "0.25"}, {"label": "a"}, {}, "x", [], {"label": 1}]
    )
    def test_a_response_schema_checks_the_result_and_does_not_change_it(
        self, monkeypatch: pytest.MonkeyPatch, schema: Any, value: Any
    ) -> None:
        service = opened(monkeypatch, SimpleNamespace(schema=schema, predict=lambda: value))
        if isinstance(value, dict) and value.get("label") == "a":
            assert answered(service)[::3] == (200, json.dumps(value).encode())
        else:
            expected = b"500: ERROR validating model response, check server logs."
            assert answered(service) == (500, "text/plain; charset=utf-8", "", expected)

    def test_an_unexpected_exception_of_a_response_schema_is_answered_with_500(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schema = {"a": fields.Function(deserialize=lambda value: 1 // 0)}
        service = opened(monkeypatch, SimpleNamespace(schema=schema, predict=lambda: {"a": 1}))
        expected = b"500: Unknown ERROR validating response, check server logs."
        assert answered(service)[::3] == (500, expected)

    @pytest.mark.parametrize(
        "schema", [5, "text", int, marshmallow.Schema()], ids=["number", "text", "type", "instance"]
    )
    def test_an_invalid_response_schema_fails_the_load(self, monkeypatch: pytest.MonkeyPatch, schema: Any) -> None:
        with pytest.raises(InferError) as error:
            opened(monkeypatch, SimpleNamespace(schema=schema))
        assert error.value.code is Code.INVALID


class TestOpening:
    def test_opening_warms_the_model_once_in_predicting_and_training_workers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warmed: list[str] = []
        model = SimpleNamespace(warm=lambda: warmed.append("warm"))
        for role, times in (("desk", 0), ("predict", 1), ("train", 2)):
            opened(monkeypatch, model, role)
            assert len(warmed) == times
        opened(monkeypatch, model, warm=False)
        assert len(warmed) == 2

    @pytest.mark.parametrize("error", [ValueError("cold"), SystemExit("cold")], ids=repr)
    def test_opening_fails_if_warm_raises(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        with pytest.raises(InferError, match=r"model 'm' .*: cold"):
            opened(monkeypatch, SimpleNamespace(warm=raising(error)))

    def test_opening_fails_if_the_module_does_not_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InferError, match="ModuleNotFoundError"):
            opened(monkeypatch, SimpleNamespace(), target="no.such.module")

    def test_opening_adds_the_bundled_deepaas_package_at_the_end_of_the_path(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sys.path[:] = [path for path in sys.path if path != IMPORTABLE]
        opened(monkeypatch, SimpleNamespace())
        opened(monkeypatch, SimpleNamespace())
        assert sys.path.index(IMPORTABLE) == len(sys.path) - 1

    def test_opening_a_desk_returns_the_description_of_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = SimpleNamespace(
            predict=lambda **_: 1, get_predict_args=lambda: {"accept": fields.Str(validate=CHOICES)},
            schema={"a": fields.Bool()},
        )  # fmt: skip
        description = ModelDescription.read(opened(monkeypatch, model, "desk").on_open()[0])
        assert (description.predicts, description.trains) == (True, False)
        assert description.predict_args["produces"] == ["application/zip", "application/json", "*/*"]
        assert description.train_args == {"parameters": [], "definitions": {}}
        assert description.schema["name"] == "ModelPredictionResponse"
        assert opened(monkeypatch, model).on_open()[0] == b""

    def test_opening_succeeds_if_the_model_cannot_be_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Odd(fields.Raw):
            @property
            def validators(self) -> Any:
                raise RuntimeError

            @validators.setter
            def validators(self, _: Any) -> None:
                """Forget them."""

        desk = opened(monkeypatch, SimpleNamespace(train=print, get_train_args=lambda: {"a": Odd()}), "desk")
        assert ModelDescription.read(desk.on_open()[0]) == ModelDescription(predicts=False, trains=True)


class TestDesks:
    def test_the_desk_answers_metadata_with_the_requested_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = opened(monkeypatch, SimpleNamespace(get_metadata=lambda: {"author": "A"}), "desk")
        for path, href in ((b"", "/v2/models/m"), (b"/base/v2/models/m", "/base/v2/models/m")):
            found = answered_metadata(desk, path)
            assert found == {"id": "m", "name": "m", "links": [{"rel": "self", "href": href}], "author": "A"}

    def test_the_desk_answers_failed_metadata_with_500(self, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = opened(monkeypatch, SimpleNamespace(get_metadata=lambda: None), "desk")
        assert answered(desk, kind=METADATA)[0] == 500

    def test_the_desk_checks_the_arguments_of_trainings(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        declared = {"sleep": fields.Int(required=True), "data": FILE, "day": fields.Date()}
        desk = opened(monkeypatch, SimpleNamespace(get_train_args=lambda: declared, train=print), "desk")
        assert answered(desk, kind=CHECK)[::3] == (422, b'{"sleep": ["Missing data for required field."]}')
        form = call_of(parts(("data", b"x", "f.txt", "text/plain"), ("day", b"2020-01-02")), FORM, query="sleep=3")
        expected = b'{"sleep": 3, "data": ["data", "text/plain", "f.txt"], "day": "2020-01-02"}'
        assert answered(desk, form, CHECK) == (200, "application/json; charset=utf-8", "", expected)
        assert list(folder.iterdir()) == []

    def test_the_desk_answers_501_for_a_model_without_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert answered(opened(monkeypatch, SimpleNamespace(), "desk"), kind=CHECK)[0] == 501

    def test_the_desk_rejects_other_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InferError):
            answered(opened(monkeypatch, SimpleNamespace(), "desk"), kind=63)


def answered_metadata(desk: DeepaasInside, path: bytes) -> Any:
    """Ask a desk for metadata."""
    from penstock.server.carrying.messages import read_answer

    return json.loads(read_answer(desk.call(METADATA, 1, path, [])[0])[3])


class TestTrainings:
    def test_a_training_reports_that_it_begins_and_returns_its_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def train(a: int) -> dict[str, int]:
            calls.append(a)
            return {"acc": a}

        model = SimpleNamespace(get_train_args=lambda: {"a": fields.Int()}, train=train)
        service = opened(monkeypatch, model, "train")
        channel: Any = service._channel
        monkeypatch.setattr(channel, "send", lambda kind, number: calls.append(kind))
        assert trained(service, call_of(query="a=5")) == {"output": {"acc": 5}}
        assert calls == [PROGRESS, 5]

    def test_an_uploaded_file_exists_until_the_training_ends(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        model = SimpleNamespace(
            get_train_args=lambda: {"data": FILE}, train=lambda data: Path(data.filename).read_text()
        )
        form = call_of(parts(("data", b"content", "f.txt")), FORM)
        assert trained(opened(monkeypatch, model, "train"), form) == {"output": "content"}
        assert [path for path in folder.rglob("*") if path.is_file()] == []

    def test_a_training_reports_the_reason_of_an_http_exception_that_cannot_be_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def train() -> None:
            try:
                raise OSError("no pictures")
            except OSError as error:
                raise web.HTTPBadRequest(reason=error) from error  # type: ignore[arg-type]

        assert trained(opened(monkeypatch, SimpleNamespace(train=train), "train")) == {"error": "no pictures"}

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (ValueError("boom"), "boom"), (KeyError("k"), "'k'"), (RuntimeError(), ""),
            (SystemExit(3), "SystemExit: 3"),
            (web.HTTPNotFound(reason="none"), "none"),
        ],
        ids=repr,
    )  # fmt: skip
    def test_a_training_reports_its_exception(
        self, monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
    ) -> None:
        assert trained(opened(monkeypatch, SimpleNamespace(train=raising(error)), "train")) == {"error": message}

    @pytest.mark.parametrize(("result", "text"), [(b"x", "b'x'"), ({"saved in m"}, "{'saved in m'}")], ids=repr)
    def test_a_training_whose_result_is_not_json_succeeds_with_its_text(
        self, monkeypatch: pytest.MonkeyPatch, result: Any, text: str
    ) -> None:
        assert trained(opened(monkeypatch, SimpleNamespace(train=lambda: result), "train")) == {"output": text}

    def test_a_training_that_cannot_begin_reports_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = trained(opened(monkeypatch, SimpleNamespace(), "train"))
        assert found == {"error": "501: Not implemented by underlying model (loaded 'm')"}


class TestBuiltIn:
    def test_the_built_in_model_s_schema_is_one_that_every_marshmallow_3_loads(self) -> None:
        labels: Any = BuiltIn.schema["labels"]
        assert isinstance(labels.inner.nested, type)  # `Nested` takes dicts only since 3.15

    def test_the_built_in_model_predicts_in_the_accepted_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = opened(monkeypatch, BuiltIn())
        assert sorted(json.loads(answered(service)[3])) == ["data", "parameter"]
        body, query = parts(("data", b"x", "f.txt")), "parameter=1"
        for accept, begin in (
            ("application/json", b'{"date'),
            ("text/plain", b"data:image"),
            ("image/png", b"\x89PNG"),
        ):
            status, kind, _, found = answered(service, call_of(body, FORM, query=query, headers=(("accept", accept),)))
            assert (status, kind.split(";")[0], found[: len(begin)]) == (200, accept, begin)

    def test_the_built_in_model_trains(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert trained(opened(monkeypatch, BuiltIn(), "train"), call_of(query="sleep=0")) == {"output": None}
