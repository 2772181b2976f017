"""seldon_core.wrapper: the Flask app with which users test their components, and the metrics that it counts."""

from __future__ import annotations

import io
import os
from typing import Any
from unittest.mock import Mock

import pytest
from seldon_core.flask_utils import SeldonMicroserviceException
from seldon_core.metadata import SeldonInvalidMetadataError, validate_model_metadata
from seldon_core.metrics import BINS, SeldonMetrics, create_counter, create_gauge, create_timer
from seldon_core.user_model import SeldonResponse

flask = pytest.importorskip("flask")

from seldon_core import flask_utils  # noqa: E402
from seldon_core.utils import json_to_seldon_message, seldon_message_to_json  # noqa: E402
from seldon_core.wrapper import (  # noqa: E402
    SeldonModelGRPC,
    get_grpc_server,
    get_metrics_microservice,
    get_rest_microservice,
)

NDARRAY = {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}}


class Ident:
    def predict(self, X: Any, features_names: Any = None) -> Any:  # noqa: N803
        return X


class Measured(Ident):
    def metrics(self) -> Any:
        return [
            create_counter("calls", 1),
            {**create_gauge("level", 2.5), "tags": {"of": "all"}},
            create_timer("t", 20),
        ]


def _client(user: Any, metrics: Any = None) -> Any:
    app = get_rest_microservice(user, metrics or SeldonMetrics())
    app.config["TESTING"] = True
    return app.test_client()


@pytest.mark.parametrize("path", ["/predict", "/api/v1.0/predictions", "/api/v0.1/predictions"])
def test_a_prediction_equals_seldon_cores_byte_for_byte(path: str) -> None:
    response = _client(Ident()).post(path, json=NDARRAY)

    assert (response.status_code, response.content_type) == (200, "application/json")
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert response.data == b'{"data":{"names":["t:0","t:1"],"ndarray":[[1,2]]},"meta":{}}\n'


def test_a_message_is_read_from_the_query_a_form_or_multipart_parts() -> None:
    client = _client(Ident())
    parts = {"strData": (io.BytesIO(b"c"), "c.txt")}

    assert client.get("/predict", query_string={"json": '{"strData":"a"}'}).json["strData"] == "a"
    assert client.post("/predict", data={"json": '{"strData":"b"}'}).json["strData"] == "b"
    assert client.post("/predict", data=parts, content_type="multipart/form-data").json["strData"] == "c"


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/health/ping", 200, "pong"),
        ("GET", "/health/status", 200, '"strData":"healthy"'),
        ("GET", "/metadata", 200, '"versions":[""]'),
        ("GET", "/seldon.json", 200, '"openapi"'),
        ("GET", "/nope", 500, "404 Not Found"),
        ("GET", "/", 500, "404 Not Found"),
        ("DELETE", "/predict", 500, "405 Method Not Allowed"),
        ("OPTIONS", "/predict", 200, ""),
        ("POST", "/predict", 400, "Can't find JSON in data"),
        ("POST", "/route", 400, "Can't find JSON in data"),
    ],
)
def test_every_path_is_answered_as_in_seldon_core(method: str, path: str, status: int, text: str) -> None:
    response = _client(Ident()).open(path, method=method)

    assert response.status_code == status
    assert text in response.get_data(as_text=True)


def test_invalid_metadata_fails_only_metadata_requests() -> None:
    class Bad(Ident):
        def init_metadata(self) -> Any:
            return {"versions": "v1"}

    client = _client(Bad())

    assert (client.get("/metadata").status_code, client.post("/predict", json=NDARRAY).status_code) == (500, 200)


def test_an_exception_is_answered_with_its_status_and_reason() -> None:
    class Refuses:
        def predict(self, X: Any, names: Any, meta: Any = None) -> Any:  # noqa: N803
            raise SeldonMicroserviceException("no", status_code=403, reason="R")

    response = _client(Refuses()).post("/predict", json=NDARRAY)

    assert response.status_code == 403
    assert response.json == {"status": {"code": -1, "info": "no", "reason": "R", "status": 1}}


def test_a_blueprints_error_handler_answers_exceptions() -> None:
    class Handled:
        model_error_handler = flask.Blueprint("error_handlers", __name__)

        def predict(self, X: Any, names: Any) -> Any:  # noqa: N803
            raise ZeroDivisionError("zero")

    def on_error(error: Any) -> Any:
        return flask.jsonify({"was": str(error)}), 402

    Handled.model_error_handler.app_errorhandler(ZeroDivisionError)(on_error)
    response = _client(Handled()).post("/predict", json=NDARRAY)

    assert (response.status_code, response.json) == (402, {"was": "zero"})


def test_seldon_model_grpc_calls_the_component() -> None:
    metrics = SeldonMetrics()
    rpc = SeldonModelGRPC(Measured(), metrics)
    message = json_to_seldon_message(NDARRAY)

    answer = seldon_message_to_json(rpc.Predict(message, None))
    assert answer["data"] == {"names": ["t:0", "t:1"], "ndarray": [[1.0, 2.0]]}
    assert "calls_total{" in metrics.generate_metrics()[0]
    assert rpc.Metadata(None, None).versions[:] == [""]
    with pytest.raises(SeldonMicroserviceException) as caught:
        rpc.Route(message, None)
    assert caught.value.message == "Route not defined"
    with pytest.raises(NotImplementedError, match="GraphMetadata not available on the Model level"):
        rpc.GraphMetadata(None, None)


def test_get_grpc_server_serves_a_component() -> None:
    grpc = pytest.importorskip("grpc")
    from seldon_core.proto import prediction_pb2_grpc

    server = get_grpc_server(Ident(), SeldonMetrics(), annotations={"seldon.io/grpc-max-message-size": "1000000"})
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = prediction_pb2_grpc.SeldonStub(channel).Predict(json_to_seldon_message({"strData": "s"}))
    server.stop(None).wait()

    assert answer.strData == "s"


def test_feedback_is_answered_with_tags_and_its_metrics_are_counted() -> None:
    class Learns:
        def send_feedback(self, features: Any, names: Any, reward: Any, truth: Any, routing: Any = None) -> Any:
            return SeldonResponse([reward], tags={"a": 1}, metrics=[create_gauge("g", 1)])

    metrics = SeldonMetrics()
    response = _client(Learns(), metrics).post("/send-feedback", json={"request": NDARRAY, "reward": 0.5})

    assert response.json["data"]["ndarray"] == [0.5]
    assert response.json["meta"]["tags"] == {"a": 1.0}
    page, _ = metrics.generate_metrics()
    assert "seldon_api_model_feedback_reward_total{" in page
    assert 'method="feedback"' in page


def test_metrics_are_counted_and_shown_on_the_metrics_page() -> None:
    metrics = SeldonMetrics(worker_id_func=lambda: "w")
    client = _client(Measured(), metrics)
    client.post("/predict", json=NDARRAY)
    returned = client.post("/predict", json=NDARRAY).json["meta"]["metrics"]
    page = get_metrics_microservice(metrics).test_client().get("/metrics").get_data(as_text=True)
    lines = {line.partition("{")[0]: line for line in page.splitlines() if 'le="' not in line and line[0] != "#"}

    assert [metric["key"] for metric in returned] == ["calls", "level", "t"]
    assert returned[1]["tags"] == {"method": "predict", "of": "all"}
    assert lines["calls_total"].endswith(" 2.0")
    assert lines["level"].endswith(" 2.5")
    assert lines["t_sum"].endswith(" 0.04")
    assert 'worker_id="w"' in lines["calls_total"]
    assert metrics.data["w"]["COUNTER", "calls", "method-predict"] == {"value": 2, "tags": {"method": "predict"}}
    assert metrics.data["w"]["GAUGE", "level", "method-predict_of-all"]["value"] == 2.5
    counts, total = metrics.data["w"]["TIMER", "t", "method-predict"]["value"]
    assert (len(counts), sum(counts), total) == (len(BINS) - 1, 2, 0.04)
    metrics.clear()
    assert metrics.data == {}
    assert metrics.generate_metrics() == ("", "text/plain; version=0.0.4; charset=utf-8")


def test_metrics_have_the_workers_pid_and_extra_labels() -> None:
    metrics = SeldonMetrics(extra_default_labels={"zone": "a"})
    metrics.update([{"key": "k", "value": 1}], "x")
    metrics.update_reward(0)
    page, _ = metrics.generate_metrics()

    assert f'worker_id="{os.getpid()}",zone="a"}} 1.0' in page
    assert 'method="x"' in page
    assert "feedback" not in page


def test_a_mock_of_seldon_metrics_can_be_used() -> None:
    metrics = Mock(spec=SeldonMetrics)

    assert _client(Measured(), metrics).post("/predict", json=NDARRAY).status_code == 200
    metrics.update.assert_called_once()


def test_validate_model_metadata_rejects_invalid_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREDICTIVE_UNIT_IMAGE", "reg:5000/org/img:0.3")
    found = validate_model_metadata({"platform": "p"})

    assert (found["name"], found["versions"], found["platform"]) == ("reg:5000/org/img", ["0.3"], "p")
    with pytest.raises(SeldonInvalidMetadataError, match="'versions' cannot be 'v1'"):
        validate_model_metadata({"versions": "v1"})


class _Request:
    """An app with one view, to test flask_utils."""

    def __init__(self, view: Any) -> None:
        app = flask.Flask(__name__)
        app.add_url_rule("/", "view", view, methods=["GET", "POST"])
        self.client = app.test_client()


def test_get_request_works_in_a_users_own_flask_views() -> None:
    client = _Request(lambda: flask_utils.jsonify(flask_utils.get_request())).client
    form = {
        "strData": "s",
        "jsonData": '{"a":1}',
        "binData": (io.BytesIO(b"12"), "b"),
        "other": (io.BytesIO(b"o"), "o"),
    }

    assert client.post("/", json={"a": 1}).json == {"a": 1}
    assert client.get("/?json=[1]").json == [1]
    assert client.post("/", data={"json": '{"b":2}'}).json == {"b": 2}

    def multipart() -> Any:
        read = flask_utils.get_request()
        return flask_utils.jsonify({**read, "binData": read["binData"].decode()})

    response = _Request(multipart).client.post("/", data=form, content_type="multipart/form-data")
    assert response.json == {"strData": "s", "jsonData": {"a": 1}, "binData": "MTI=", "other": "o"}


@pytest.mark.parametrize("body", [b"", b"{", b"null"])
def test_get_request_rejects_a_body_that_is_not_json(body: bytes) -> None:
    def view() -> Any:
        with pytest.raises(SeldonMicroserviceException) as caught:
            flask_utils.get_request()
        return caught.value.message

    response = _Request(view).client.post("/", data=body, content_type="application/json" if body else "text/plain")

    assert response.data == b"Can't find JSON in data"


def test_get_request_returns_the_raw_body_with_skip_decoding() -> None:
    client = _Request(lambda: flask_utils.jsonify(flask_utils.get_request(True), skip_encoding=True)).client

    assert client.post("/", data=b"raw").data == b"raw"
    assert client.get("/?json={}").data == b"{}"
