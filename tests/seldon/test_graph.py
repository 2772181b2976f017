"""Graphs over live REST and gRPC: one server answers as Seldon's orchestrator in front of components does."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from penstock.server.seldon.protos import message_class
from tests.live import Live, live_server

PREDICTIONS, FEEDBACK = "/api/v1.0/predictions", "/api/v1.0/feedback"
pytestmark = pytest.mark.slow

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MODULES = {
    "adder/Adder": """
        import os, time

        class Adder:
            def __init__(self, number=1):
                self.number = number
                self.rewards = 0.0
            def predict(self, X, names):
                if isinstance(X, str):
                    if X == "exit":
                        os._exit(3)
                    if X == "sleep":
                        time.sleep(600)
                    raise ValueError(X)
                return X + self.number
            def send_feedback(self, features, names, reward, truth, routing=None):
                self.rewards += reward
                return [[self.number, self.rewards]]
            def tags(self):
                return {"added": self.number}
    """,
    "halver/Halver": """
        class Halver:
            def transform_input(self, X, names):
                return X if isinstance(X, str) else X / 2
            def transform_output(self, X, names):
                return X * 100
            def tags(self):
                return {"halved": True}
    """,
    "looker/Looker": """
        import flask

        class Looker:
            def _seen(self):
                wanted = ("X-Tenant", "Seldon-Puid", "Content-Type", "X-Twice")
                return [flask.request.path, *(flask.request.headers.get(name) for name in wanted)]
            def transform_input(self, X, names):
                return {"before": X, "seen": self._seen()}
            def predict(self, X, names):
                return {"before": X, "seen": self._seen()}
    """,
    "sum/Sum": """
        class Sum:
            def aggregate(self, Xs, names):
                return sum(Xs[1:], Xs[0])
            def metrics(self):
                return [{"type": "COUNTER", "key": "summed", "value": 2}]
    """,
    "bandit/Bandit": """
        class Bandit:
            '''Chooses the branch with the best rewards, and untried branches first.'''
            def __init__(self, branches):
                self.rewards = [[] for _ in range(branches)]
            def route(self, X, names):
                unknown = [each for each, rewards in enumerate(self.rewards) if not rewards]
                if unknown:
                    return unknown[0]
                means = [sum(rewards) / len(rewards) for rewards in self.rewards]
                return means.index(max(means))
            def send_feedback(self, features, names, reward, truth, routing=None):
                self.rewards[routing].append(reward)
    """,
}


class Answer(NamedTuple):
    """An answer over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.body)


def ask(live: Live, path: str, message: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """POST a message, or GET."""
    with closing(http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=60)) as connection:
        body = None if message is None else json.dumps(message)
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request("GET" if message is None else "POST", path, body, all_headers)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


def call(live: Live, rpc: str, message: Any, answer: str = "SeldonMessage", timeout: float = 60) -> Any:
    """Call an RPC of the service Seldon."""
    with grpc.insecure_channel(live.grpc_address) as channel:
        method = channel.unary_unary(
            f"/seldon.protos.Seldon/{rpc}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=message_class(answer).FromString,
        )
        return method(message, timeout=timeout)


def metrics(live: Live, name: str) -> dict[str, float]:
    """Return the series of a metric, by their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{live.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def of_node(series: dict[str, float], node: str) -> list[float]:
    return [value for labels, value in series.items() if f'model_name="{node}"' in labels]


def serve(folder: Path, text: str, **settings: Any) -> Any:
    for place, module in MODULES.items():
        path = folder / f"{place}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(line.removeprefix("        ") for line in module.splitlines()))
    file = folder / "graph.yaml"
    file.write_text(text)
    return live_server(file, dialect="seldon", **settings)


def matrix(*numbers: float) -> dict[str, Any]:
    return {"data": {"ndarray": [list(numbers)]}}


# -- what nodes see of a request -------------------------------------------------------------------------------

LOOKING = """\
apiVersion: machinelearning.seldon.io/v1
kind: SeldonDeployment
metadata: {name: looking}
spec:
  predictors:
  - name: main
    componentSpecs:
    - spec:
        containers:
        - {name: first, image: "reg.io/org/looker:1"}
        - {name: second, image: "reg.io/org/looker:1"}
    graph:
      name: first
      type: TRANSFORMER
      children: [{name: second, type: MODEL}]
"""


def test_nodes_read_the_requests_headers_and_puid_from_flask(tmp_path: Path) -> None:
    with serve(tmp_path, LOOKING) as live:
        sent = {"X-Tenant": "acme", "X-Twice": "ä".encode().decode("latin-1")}
        answer = ask(live, PREDICTIONS, {"jsonData": 5}, sent)
        ids = answer.headers["seldon-puid"]
        second = answer.json["jsonData"]
        assert second["seen"] == ["/predict", "acme", ids, "application/json", sent["X-Twice"]]
        first = second["before"]
        assert first == {"before": 5, "seen": ["/transform-input", *second["seen"][1:]]}

        other = ask(live, PREDICTIONS, {"jsonData": 5}, {"Seldon-Puid": "mine"}).json["jsonData"]
        assert other["seen"] == ["/predict", None, "mine", "application/json", None]


# -- an A/B test, as a manifest --------------------------------------------------------------------------------

AB = """\
apiVersion: machinelearning.seldon.io/v1
kind: SeldonDeployment
metadata: {name: ab, namespace: prod}
spec:
  predictors:
  - name: main
    annotations: {version: v7}
    labels: {version: v7}
    svcOrchSpec:
      env: [{name: SELDON_ENABLE_ROUTING_INJECTION, value: "true"}]
    componentSpecs:
    - spec:
        containers:
        - {name: one, image: "reg.io/org/adder:1"}
        - {name: two, image: "reg.io/org/adder:2"}
    graph:
      name: chance
      implementation: RANDOM_ABTEST
      parameters: [{name: ratioA, value: "0.5", type: FLOAT}]
      children:
      - {name: one, type: MODEL, parameters: [{name: number, value: "1", type: INT}]}
      - {name: two, type: MODEL, parameters: [{name: number, value: "2", type: INT}]}
"""


@pytest.fixture(scope="module")
def ab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("ab"), AB) as live:
        yield live


def test_each_request_of_an_ab_test_goes_to_the_branch_in_its_routing(ab: Live) -> None:
    branches = set()
    for _ in range(40):
        answer = ask(ab, PREDICTIONS, matrix(10, 20)).json
        branch = answer["meta"]["routing"]["chance"]
        name = ("one", "two")[branch]
        assert answer == {
            "data": {"names": ["t:0", "t:1"], "ndarray": [[11 + branch, 21 + branch]]},
            "meta": {
                "requestPath": {name: f"reg.io/org/adder:{branch + 1}"},
                "routing": {"chance": branch, name: -1},
                "tags": {"added": branch + 1},
            },
        }
        branches.add(branch)
    assert branches == {0, 1}


def test_feedback_goes_to_the_branch_that_answered(ab: Live) -> None:
    answer = ask(ab, PREDICTIONS, matrix(1)).json
    name, other = ("one", "two") if answer["meta"]["routing"]["chance"] == 0 else ("two", "one")
    series = metrics(ab, "seldon_api_model_feedback_reward_total")
    before = {each: sum(of_node(series, each)) for each in ("one", "two")}
    feedback = {"request": matrix(1), "response": answer, "reward": 0.5}
    response = ask(ab, FEEDBACK, feedback)
    # the first node is built in and takes no feedback: as in Seldon's orchestrator, the feedback is returned
    assert (response.status, response.json) == (200, feedback)
    series = metrics(ab, "seldon_api_model_feedback_reward_total")
    assert sum(of_node(series, name)) == before[name] + 0.5
    assert sum(of_node(series, other)) == before[other]


def test_paths_with_an_ingress_prefix_reach_only_their_own_deployment(ab: Live) -> None:
    assert ask(ab, "/seldon/prod/ab/api/v0.1/predictions", matrix(1)).status == 200
    assert ask(ab, "/seldon/test/ab/api/v1.0/predictions", matrix(1)).status == 404
    assert ask(ab, "/seldon/prod/other/api/v1.0/predictions", matrix(1)).status == 404


def test_an_answer_has_the_puid_of_its_request_or_a_new_puid(ab: Live) -> None:
    assert UUID.fullmatch(ask(ab, PREDICTIONS, matrix(1)).headers["seldon-puid"])
    answer = ask(ab, PREDICTIONS, matrix(1), {"Seldon-Puid": "mine"})
    assert answer.headers["seldon-puid"] == "mine"
    assert "puid" not in answer.json["meta"]


def test_the_orchestrators_metrics_count_requests_and_calls(ab: Live) -> None:
    assert 0 in {ask(ab, PREDICTIONS, matrix(1)).json["meta"]["routing"]["chance"] for _ in range(40)}
    requests = metrics(ab, "seldon_api_executor_server_requests_seconds_count")
    labels = (
        '{code="200",deployment_name="ab",method="post",predictor_name="main",predictor_version="v7",'
        'service="predictions"}'
    )
    assert requests[labels] >= 1
    calls = metrics(ab, "seldon_api_executor_client_requests_seconds_count")
    one = [labels for labels in calls if 'model_name="one"' in labels and 'service="/predict"' in labels]
    assert one == [
        (
            '{code="200",deployment_name="ab",method="post",model_image="reg.io/org/adder",model_name="one",'
            'model_version="1",predictor_name="main",predictor_version="v7",service="/predict"}'
        )
    ]
    path = "seldon_api_executor_server_requests_seconds_bucket"
    assert len([labels for labels in metrics(ab, path) if 'service="predictions"' in labels]) == 15


def test_options_requests_are_answered_for_cross_origin_pages(ab: Live) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", ab.http_port)) as connection:
        connection.request("OPTIONS", PREDICTIONS)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        assert answer.headers["access-control-allow-methods"] == "GET, OPTIONS, POST"


def test_unknown_paths_and_methods_are_answered_as_by_seldons_orchestrator(ab: Live) -> None:
    answer = ask(ab, "/predict", matrix(1))
    assert (answer.status, answer.body) == (404, b"404 page not found\n")
    assert ask(ab, PREDICTIONS).status == 405


@pytest.mark.parametrize(("path", "body"), [("/ready", b""), ("/live", b""), ("/ping", b"pong")])
def test_ready_live_and_ping_probes_are_answered(ab: Live, path: str, body: bytes) -> None:
    answer = ask(ab, path)
    assert (answer.status, answer.body) == (200, body)


def test_graph_nodes_are_also_models_of_the_v2_protocol(ab: Live) -> None:
    assert ask(ab, "/v2/models/two/ready").status == 200


def test_metadata_and_status_of_a_graph_and_its_nodes_are_answered(ab: Live) -> None:
    one = ask(ab, "/api/v1.0/metadata/one").json
    assert (one["name"], one["versions"]) == ("reg.io/org/adder", ["1"])
    graph = ask(ab, "/api/v1.0/metadata").json
    assert (graph["name"], sorted(graph["models"]), graph["graphinputs"]) == ("main", ["one", "two"], [])
    assert ask(ab, "/api/v1.0/status/one").json["strData"] == "healthy"
    assert ask(ab, "/api/v1.0/metadata/none").status == 500


# -- a transformer, two models combined, and an output transformer, nested ---------------------------------------

COMBINED = """\
name: combined
annotations: {seldon.io/rest-timeout: "1000"}
graph:
  name: out
  type: OUTPUT_TRANSFORMER
  component: halver:Halver
  children:
  - name: in
    type: TRANSFORMER
    component: halver:Halver
    children:
    - name: sum
      type: COMBINER
      children:
      - {name: one, component: "adder:Adder", parameters: {number: 1}}
      - {name: two, component: "adder:Adder", parameters: {number: 2}}
"""


@pytest.fixture(scope="module")
def combined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("combined"), COMBINED) as live:
        yield live


def test_a_request_goes_through_transformers_models_and_a_combiner(combined: Live) -> None:
    answer = ask(combined, PREDICTIONS, {"data": {"names": ["a", "b"], "tensor": {"shape": [1, 2], "values": [2, 4]}}})
    found = answer.json
    assert found["data"] == {"names": ["t:0", "t:1"], "tensor": {"shape": [1, 2], "values": [500.0, 700.0]}}
    assert found["meta"]["tags"] == {"added": 2, "halved": True}
    assert found["meta"]["metrics"] == [{"key": "summed", "type": "COUNTER", "value": 2}]
    assert found["meta"]["puid"] == answer.headers["seldon-puid"]
    assert found["meta"]["routing"] == {"in": -1, "one": -1, "out": -1, "sum": -1, "two": -1}
    assert sorted(found["meta"]["requestPath"]) == ["in", "one", "out", "sum", "two"]
    assert of_node(metrics(combined, "summed_total"), "sum")[0] >= 2


def test_a_grpc_request_goes_through_transformers_models_and_a_combiner(combined: Live) -> None:
    message = message_class("SeldonMessage")()
    message.data.tensor.shape.extend([1, 2])
    message.data.tensor.values.extend([2, 4])
    answer = call(combined, "Predict", message)
    assert list(answer.data.tensor.values) == [500.0, 700.0]
    assert dict(answer.meta.routing) == {"in": -1, "one": -1, "out": -1, "sum": -1, "two": -1}
    assert UUID.fullmatch(answer.meta.puid)
    counted = metrics(combined, "seldon_api_executor_server_requests_seconds_count")
    assert any('service="/seldon.protos.Seldon/Predict"' in labels and 'code="OK"' in labels for labels in counted)


def test_metadata_of_a_graph_and_its_nodes_is_answered_over_grpc(combined: Live) -> None:
    empty = message_class("SeldonModelMetadataRequest")()
    graph = call(combined, "GraphMetadata", empty, "SeldonGraphMetadata")
    assert (graph.name, sorted(graph.models)) == ("default", ["in", "one", "out", "sum", "two"])
    request = message_class("SeldonModelMetadataRequest")(name="one")
    assert list(call(combined, "ModelMetadata", request, "SeldonModelMetadata").versions) == [""]


def test_feedback_over_grpc_reaches_the_models(combined: Live) -> None:
    feedback = message_class("Feedback")(reward=0.25)
    before = sum(of_node(metrics(combined, "seldon_api_model_feedback_reward_total"), "two"))
    call(combined, "SendFeedback", feedback)
    assert sum(of_node(metrics(combined, "seldon_api_model_feedback_reward_total"), "two")) == before + 0.25


def test_the_error_of_a_failing_node_is_answered_over_http(combined: Live) -> None:
    answer = ask(combined, PREDICTIONS, {"strData": "<oops>"})
    assert answer.status == 500
    assert answer.json["status"] == {
        "code": -1, "info": "<oops>", "reason": "MICROSERVICE_INTERNAL_ERROR", "status": 1,
    }  # fmt: skip
    assert b"\\u003coops\\u003e" in answer.body
    assert ask(combined, PREDICTIONS, matrix(2)).status == 200


def test_the_error_of_a_failing_node_is_answered_over_grpc(combined: Live) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(combined, "Predict", message_class("SeldonMessage")(strData="oops"))
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "Exception calling application: oops"


# -- a router of one's own -------------------------------------------------------------------------------------

BANDIT = """\
name: bandit
graph:
  name: arms
  type: ROUTER
  component: bandit:Bandit
  parameters: {branches: 2}
  children:
  - {name: one, component: "adder:Adder", parameters: {number: 1}}
  - {name: two, component: "adder:Adder", parameters: {number: 2}}
"""


def test_a_bandit_router_learns_the_best_branch_from_feedback(tmp_path: Path) -> None:
    with serve(tmp_path, BANDIT) as live:
        for reward in (0.1, 0.9):
            answer = ask(live, PREDICTIONS, matrix(1)).json
            response = ask(live, FEEDBACK, {"request": matrix(1), "response": answer, "reward": reward})
            assert response.status == 200
        for _ in range(5):
            answer = ask(live, PREDICTIONS, matrix(1)).json
            assert answer["meta"]["routing"]["arms"] == 1
            assert answer["data"]["ndarray"] == [[3]]


# -- one node that harms only its own request ----------------------------------------------------------------------

ALONE = """\
apiVersion: machinelearning.seldon.io/v1alpha2
kind: SeldonDeployment
metadata:
  name: alone
  annotations: {penstock.io/classifier: "adder:Adder"}
spec:
  predictors:
  - name: default
    graph: {name: classifier, type: MODEL, endpoint: {type: REST}, children: []}
"""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Live]:
    with serve(tmp_path, ALONE) as live:
        yield live


def test_a_graph_of_one_model_answers_as_the_component_alone(alone: Live) -> None:
    answer = ask(alone, PREDICTIONS, {"data": {"ndarray": [[1, 9007199254740993]]}, "meta": {"puid": "mine"}})
    assert answer.body == (
        b'{"data":{"names":["t:0","t:1"],"ndarray":[[2,9007199254740994]]},"meta":{"puid":"mine",'
        b'"requestPath":{"classifier":"NOT_IMPLEMENTED:NOT_IMPLEMENTED"},"tags":{"added":1}}}\n'
    )
    assert answer.headers["content-type"] == "application/json"
    response = ask(alone, FEEDBACK, {"request": matrix(1), "reward": 1.0})
    assert (response.status, response.json["data"]) == (200, {"ndarray": [[1, 1]], "names": ["t:0", "t:1"]})


def test_a_node_that_dies_fails_its_request_and_is_restarted(alone: Live) -> None:
    answer = ask(alone, PREDICTIONS, {"strData": "exit"})
    assert (answer.status, answer.json["status"]["status"]) == (503, "FAILURE")
    assert ask(alone, "/live").status == 200
    assert ask(alone, PREDICTIONS, matrix(1)).status == 200


def test_a_node_that_exceeds_its_time_limit_does_not_block_other_requests(tmp_path: Path) -> None:
    limited = BANDIT.replace("graph:", 'annotations: {seldon.io/rest-timeout: "1500"}\ngraph:')
    with serve(tmp_path, limited, exit_timeout_secs=0) as live:
        answer = ask(live, PREDICTIONS, {"strData": "sleep"})
        assert answer.status == 500
        assert answer.json == {
            "status": {"code": 500, "info": "node 'one' did not answer within 1.5 s", "status": "FAILURE"},
        }  # fmt: skip
        assert ask(live, "/ping").body == b"pong"
        response = {"meta": {"routing": {"arms": -2}}}
        assert ask(live, FEEDBACK, {"response": response, "reward": 1.0}).status == 200


def test_a_call_ends_at_the_clients_deadline_and_the_graph_keeps_serving(tmp_path: Path) -> None:
    with serve(tmp_path, BANDIT, exit_timeout_secs=0) as live:
        with pytest.raises(grpc.RpcError) as caught:
            call(live, "Predict", message_class("SeldonMessage")(strData="sleep"), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        request = message_class("SeldonModelMetadataRequest")(name="one")
        assert list(call(live, "ModelMetadata", request, "SeldonModelMetadata").versions) == [""]
