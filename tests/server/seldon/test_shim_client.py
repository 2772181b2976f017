"""seldon_core.seldon_client and prediction_pb2_grpc: calls, as a component or a gateway receives them."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from google.protobuf import any_pb2
from seldon_core.proto import prediction_pb2
from seldon_core.seldon_client import SeldonCallCredentials, SeldonClient, SeldonClientException

grpc = pytest.importorskip("grpc")

from seldon_core.proto import prediction_pb2_grpc  # noqa: E402

ARRAY = np.array([[1.0, 2.0]])
ANSWER = {"data": {"names": ["t:0"], "ndarray": [[3.0]]}, "meta": {}}


class _Rest(HTTPServer):
    """Records requests, and answers `answer` with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.came: list[tuple[str, str, dict[str, str]]] = []
        self.status, self.answer = 200, json.dumps(ANSWER).encode()
        self.place = f"127.0.0.1:{self.server_address[1]}"


class _Answering(BaseHTTPRequestHandler):
    server: _Rest

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.came.append((self.path, body, dict(self.headers)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rest]:
    monkeypatch.setenv("no_proxy", "*")
    with _Rest() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Everything:
    """A servicer of all services that returns the request, and fails for the text `fail`."""

    def __init__(self) -> None:
        self.came: list[tuple[str, dict[str, str]]] = []

    def __getattr__(self, name: str) -> Any:
        def answered(request: Any, context: Any) -> Any:
            self.came.append((name, dict(context.invocation_metadata())))
            if name == "Aggregate":
                return prediction_pb2.SeldonMessage(strData=str(len(request.seldonMessages)))
            if name == "SendFeedback":
                return prediction_pb2.SeldonMessage(strData=f"{request.reward}")
            if request.strData == "fail":
                context.abort(grpc.StatusCode.UNKNOWN, "no")
            return request

        return answered


@pytest.fixture(scope="module")
def everything() -> Iterator[tuple[_Everything, str]]:
    servicer = _Everything()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    for name in ("Generic", "Model", "Router", "Transformer", "OutputTransformer", "Combiner", "Seldon"):
        getattr(prediction_pb2_grpc, f"add_{name}Servicer_to_server")(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def _form(body: str) -> Any:
    return json.loads(urllib.parse.parse_qs(body)["json"][0])


@pytest.mark.parametrize("method", ["predict", "transform-input", "transform-output", "route"])
def test_microservice_calls_a_component_over_rest(rest: _Rest, method: str) -> None:
    client = SeldonClient(microservice_endpoint=rest.place)
    outcome = client.microservice(method=method, data=ARRAY, names=["a", "b"])

    (path, body, headers) = rest.came[0]
    assert path == f"/{method}"
    assert headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert _form(body) == {"data": {"names": ["a", "b"], "tensor": {"shape": [1, 2], "values": [1.0, 2.0]}}}
    assert (outcome.success, outcome.msg, outcome.response.data.names[:]) == (True, "", ["t:0"])


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ({"bin_data": b"123"}, {"binData": "MTIz"}),
        ({"str_data": "s"}, {"strData": "s"}),
        ({"json_data": {"a": [1]}}, {"jsonData": {"a": [1.0]}}),
        ({"data": ARRAY, "payload_type": "ndarray"}, {"data": {"ndarray": [[1.0, 2.0]]}}),
    ],
)
def test_each_kind_of_payload_is_sent_in_its_own_field(rest: _Rest, words: dict[str, Any], sent: Any) -> None:
    SeldonClient(microservice_endpoint=rest.place).microservice(method="predict", **words)

    assert _form(rest.came[0][1]) == sent


def test_random_numbers_of_the_given_shape_are_sent_without_a_payload(rest: _Rest) -> None:
    SeldonClient(microservice_endpoint=rest.place).microservice(method="predict", shape=(2, 3))

    assert _form(rest.came[0][1])["data"]["tensor"]["shape"] == [2, 3]


def test_aggregate_sends_several_messages(rest: _Rest) -> None:
    client = SeldonClient(microservice_endpoint=rest.place)
    outcome = client.microservice(method="aggregate", datas=[ARRAY, "s", b"1"])

    assert rest.came[0][0] == "/aggregate"
    assert [next(iter(message)) for message in _form(rest.came[0][1])["seldonMessages"]] == [
        "data",
        "strData",
        "binData",
    ]
    assert len(outcome.request.seldonMessages) == 3


def test_microservice_feedback_sends_feedback_to_a_component(rest: _Rest) -> None:
    question = prediction_pb2.SeldonMessage(strData="q")
    SeldonClient(microservice_endpoint=rest.place).microservice_feedback(question, question, 0.5)

    assert rest.came[0][0] == "/send-feedback"
    assert _form(rest.came[0][1]) == {"request": {"strData": "q"}, "response": {"strData": "q"}, "reward": 0.5}


def test_a_components_error_is_in_the_outcome(rest: _Rest) -> None:
    rest.status, rest.answer = 500, b'{"status":{"code":-1,"info":"no","reason":"R","status":1}}'
    outcome = SeldonClient(microservice_endpoint=rest.place).microservice(method="predict")

    assert (outcome.success, outcome.msg) == (False, "Internal Server Error")
    assert (outcome.response.status.info, outcome.response.status.status) == ("no", prediction_pb2.Status.FAILURE)


def test_an_answer_that_is_not_a_message_is_reported_as_invalid_json(rest: _Rest) -> None:
    rest.answer = b'{"nothing": 1}'
    outcome = SeldonClient(microservice_endpoint=rest.place).microservice(method="predict")

    assert outcome.response is None
    assert outcome.msg.startswith("Invalid JSON: ")


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ({"gateway": "seldon"}, "/api/v1.0/predictions"),
        ({"deployment_name": "d"}, "/seldon/d/api/v1.0/predictions"),
        ({"gateway": "istio", "deployment_name": "d", "namespace": "n"}, "/seldon/n/d/api/v1.0/predictions"),
        ({"deployment_name": "d", "gateway_prefix": "/p"}, "/p/api/v1.0/predictions"),
        ({"deployment_name": "d", "namespace": "n", "http_path": "/x"}, "/seldon/n/d/x"),
    ],
)
def test_predict_calls_a_deployment_at_its_gateway_path(rest: _Rest, words: dict[str, Any], path: str) -> None:
    outcome = SeldonClient(gateway_endpoint=rest.place).predict(data=ARRAY, meta={"k": "v"}, **words)

    assert rest.came[0][0] == path
    assert json.loads(rest.came[0][1])["meta"] == {"tags": {"k": "v"}}
    assert (outcome.success, outcome.response) == (True, ANSWER)


def test_raw_data_is_sent_unchanged(rest: _Rest) -> None:
    raw = {"data": {"ndarray": [[1, "a"]]}}
    client = SeldonClient(gateway_endpoint=rest.place, deployment_name="d", client_return_type="proto")
    outcome = client.predict(raw_data=raw, headers={"X-A": "b"})

    assert json.loads(rest.came[0][1]) == raw
    assert rest.came[0][2]["X-A"] == "b"
    assert outcome.response.data.names[:] == ["t:0"]


def test_a_token_is_sent_as_a_header(rest: _Rest) -> None:
    client = SeldonClient(gateway_endpoint=rest.place, deployment_name="d", ssl=False)
    client.config["call_credentials"] = SeldonCallCredentials("t")
    client.predict(str_data="s")

    assert {name.lower(): value for name, value in rest.came[0][2].items()}["x-auth-token"] == "t"


def test_feedback_is_sent_to_a_deployment(rest: _Rest) -> None:
    client = SeldonClient(gateway_endpoint=rest.place, deployment_name="d")
    question = prediction_pb2.SeldonMessage(strData="q")
    first = client.feedback(question, None, question, reward=1.0)
    client.feedback(raw_request={"reward": 2.0}, gateway="seldon")

    assert [path for path, _, _ in rest.came] == ["/seldon/d/api/v1.0/feedback", "/api/v1.0/feedback"]
    assert json.loads(rest.came[0][1]) == {"request": {"strData": "q"}, "truth": {"strData": "q"}, "reward": 1.0}
    assert json.loads(rest.came[1][1]) == {"reward": 2.0}
    assert first.response == ANSWER


def test_a_gateways_error_is_in_the_outcome(rest: _Rest) -> None:
    rest.status, rest.answer = 404, b""
    outcome = SeldonClient(gateway_endpoint=rest.place, deployment_name="d").predict()

    assert (outcome.success, outcome.msg, outcome.response) == (False, "404:Not Found", None)
    assert repr(outcome).startswith("Success:False message:404:Not Found\nRequest:\n")


@pytest.mark.parametrize(
    ("method", "rpc"),
    [
        ("predict", "Predict"),
        ("transform-input", "TransformInput"),
        ("transform-output", "TransformOutput"),
        ("route", "Route"),
    ],
)
def test_microservice_calls_a_component_over_grpc(everything: tuple[_Everything, str], method: str, rpc: str) -> None:
    servicer, place = everything
    client = SeldonClient(microservice_endpoint=place, transport="grpc")
    outcome = client.microservice(method=method, data=ARRAY)

    assert servicer.came[-1][0] == rpc
    assert outcome.success
    assert outcome.response == outcome.request
    assert outcome.response.data.tensor.values[:] == [1.0, 2.0]


def test_aggregate_feedback_and_custom_data_are_sent_over_grpc(everything: tuple[_Everything, str]) -> None:
    client = SeldonClient(microservice_endpoint=everything[1], transport="grpc")
    packed = any_pb2.Any(type_url="t", value=b"v")

    assert client.microservice(method="aggregate", ndatas=3).response.strData == "3"
    assert client.microservice_feedback(None, None, 0.5).response.strData == "0.5"
    assert client.microservice(method="predict", custom_data=packed).response.customData == packed


def test_predict_and_feedback_call_a_deployment_over_grpc(everything: tuple[_Everything, str]) -> None:
    servicer, place = everything
    client = SeldonClient(gateway_endpoint=place, transport="grpc", deployment_name="d", namespace="n")
    outcome = client.predict(str_data="s", headers={"a": "b"}, client_return_type="dict")

    assert (outcome.request["strData"], outcome.response["strData"]) == ("s", "s")
    assert {"seldon": "d", "namespace": "n", "a": "b"}.items() <= servicer.came[-1][1].items()
    assert client.feedback(reward=2.0, client_return_type="proto").response.strData == "2.0"
    assert client.predict(raw_data=prediction_pb2.SeldonMessage(strData="raw"), gateway="seldon").success
    assert "seldon" not in servicer.came[-1][1]


def test_an_rpc_error_is_in_the_outcome(everything: tuple[_Everything, str]) -> None:
    client = SeldonClient(microservice_endpoint=everything[1], transport="grpc")
    outcome = client.microservice(method="predict", str_data="fail")

    assert (outcome.success, outcome.response) == (False, None)
    assert "no" in outcome.msg


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"gateway": "other"}, "Valid values for gateway"),
        ({"transport": "smoke"}, "Valid values for transport"),
        ({"method": "explain"}, "Valid values for method"),
        ({"client_return_type": "xml"}, "Valid values for client_return_type"),
        ({"data": [[1]]}, "Valid values for data"),
    ],
)
def test_invalid_argument_values_are_rejected(words: dict[str, Any], text: str) -> None:
    with pytest.raises(SeldonClientException, match=text):
        SeldonClient().predict(**words)


def test_unknown_arguments_methods_and_explain_are_rejected() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        SeldonClient(colour=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'datas'"):
        SeldonClient().predict(datas=[])
    with pytest.raises(SeldonClientException, match="pip install seldon-core"):
        SeldonClient().explain()
    with pytest.raises(SeldonClientException, match="Unknown method"):
        SeldonClient().microservice(method="send-feedback")


def test_the_base_servicer_answers_unimplemented(everything: tuple[_Everything, str]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    prediction_pb2_grpc.add_ModelServicer_to_server(prediction_pb2_grpc.ModelServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        prediction_pb2_grpc.ModelStub(channel).Predict(prediction_pb2.SeldonMessage())
    server.stop(None).wait()

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
