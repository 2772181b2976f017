"""Graphs: codecs for messages, routes of URLs, metrics, traffic between predictors, and changed files."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.answering import LARGE_BYTES
from penstock.server.seldon.graph import builtin, routes
from penstock.server.seldon.graph.graph import MAX_SHADOWS, Graph
from penstock.server.seldon.graph.message_codecs import GraphError, JsonCodec, Message, ProtoCodec, WalkRecord
from penstock.server.seldon.graph.metadata import graph_metadata
from penstock.server.seldon.graph.metrics import CLIENT, SERVER, GraphMetrics
from penstock.server.seldon.graph.nodes import Deployment, MetaMode, Predictor
from penstock.server.seldon.graph.repository import GraphRepository
from penstock.server.seldon.graph.routes import GraphRoute
from penstock.server.seldon.messages import ComponentDescription, Endpoint, PayloadKind
from penstock.server.seldon.protos import message_class
from penstock.server.settings import Settings

from .graphs import FunctionEngine, Never, message_from, node

PROTO = ProtoCodec()


def proto(kind: str = "SeldonMessage", **fields: Any) -> Message:
    return Message(message_class(kind)(**fields).SerializeToString())


def tensor(*values: float) -> Any:
    found = message_class("SeldonMessage")()
    found.data.tensor.shape.extend([1, len(values)])
    found.data.tensor.values.extend(values)
    return found


def test_a_body_that_is_not_json_is_passed_to_its_node_unchanged() -> None:
    assert JsonCodec().payload(Message(b"json=1", b"application/x-www-form-urlencoded")) == (
        PayloadKind.HTTP,
        b'{"method": "POST", "type": "application/x-www-form-urlencoded", "query": ""}\njson=1',
    )


def test_an_answer_that_is_not_a_json_object_is_returned_unchanged() -> None:
    for body in (b"null\n", b"[1]", b"<html>"):
        noted = JsonCodec().add_meta(Message(body), WalkRecord({"m": -1}, {}, "id"), MetaMode.ALL)
        assert noted.body == body


def test_protobuf_messages_are_combined_into_a_message_list() -> None:
    parts = [tensor(1.0), tensor(*range(100)), message_class("SeldonMessage")()]
    message_list = PROTO.combine([Message(part.SerializeToString()) for part in parts])
    found = message_class("SeldonMessageList").FromString(message_list.body)
    assert list(found.seldonMessages) == parts


@pytest.mark.parametrize(
    ("values", "route"), [({"ndarray": [[1]]}, 1), ({"ndarray": [2]}, 2), ({"tensor": {"values": [-1]}}, -1), ({}, -1)],
    ids=["rows", "row", "tensor", "nothing"],
)  # fmt: skip
def test_a_route_is_read_from_a_protobuf_answer(values: Any, route: int) -> None:
    assert PROTO.route(PROTO.write({"data": values})) == route


def test_a_protobuf_answer_without_a_route_or_message_is_a_graph_error() -> None:
    with pytest.raises(GraphError, match="no route"):
        PROTO.route(PROTO.write({"data": {"ndarray": []}}))
    with pytest.raises(GraphError, match="not a SeldonMessage"):
        PROTO.route(Message(b"\xff"))


@pytest.mark.parametrize(
    "body", [b"[Infinity]", b"[NaN]", b"[[]]", b'{"data": 1}', b'{"data": {"ndarray": [{}]}}', b"no"]
)
def test_a_json_answer_without_a_route_is_a_graph_error(body: bytes) -> None:
    with pytest.raises(GraphError, match=r"the router.s answer has no route: "):
        JsonCodec().route(Message(body))


def test_an_invalid_meta_is_not_merged() -> None:
    codec = JsonCodec()
    metas: tuple[object, ...] = ({"tags": [1]}, {"requestPath": "a"}, {"metrics": {}}, 3)
    for meta in metas:
        answer = builtin.predict(codec.read(message_from({"strData": "a", "meta": meta})))
        assert next(each["key"] for each in answer["meta"]["metrics"]) == "mymetric_counter"
        assert "tags" not in answer["meta"]


def test_the_routing_of_a_protobuf_feedback_is_read_from_its_meta() -> None:
    feedback = message_class("Feedback")(reward=1)
    feedback.response.meta.routing["r"] = 1
    assert PROTO.routing(Message(feedback.SerializeToString())) == {"r": 1}
    assert PROTO.routing(Message(b"\xff")) == {}


def test_a_protobuf_answer_contains_routing_puid_and_request_path_in_mode_all() -> None:
    noted = PROTO.add_meta(
        Message(tensor(1.0).SerializeToString()), WalkRecord({"m": -1}, {"m": "i:1"}, "id"), MetaMode.ALL
    )
    found = message_class("SeldonMessage").FromString(noted.body)
    assert dict(found.meta.routing) == {"m": -1}
    assert (found.meta.puid, dict(found.meta.requestPath)) == ("id", {"m": "i:1"})
    assert list(found.data.tensor.values) == [1.0]


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("/api/v1.0/predictions", GraphRoute("predictions", (b"POST", b"OPTIONS"))),
        ("/api/v0.1/feedback", GraphRoute("feedback", (b"POST", b"OPTIONS"))),
        ("/seldon/ns/dep/api/v1.0/predictions", GraphRoute("predictions", (b"POST", b"OPTIONS"))),
        ("/seldon/ns/other/api/v1.0/predictions", None),
        ("/seldon/no/dep/api/v1.0/predictions", None),
        ("/api/v1.0/metadata", GraphRoute("graph", (b"GET", b"OPTIONS"))),
        ("/api/v0.1/metadata", None),
        ("/api/v0.1/metadata/m", GraphRoute("metadata", (b"GET", b"OPTIONS"), "m")),
        ("/api/v1.0/status/m", GraphRoute("status", (b"GET", b"OPTIONS"), "m")),
        ("/api/v2.0/predictions", None),
        ("/ready", GraphRoute("ready")),
        ("/seldon/ns/dep/ready", GraphRoute("ready")),
        ("/predict", None),
        ("/", None),
    ],
)
def test_urls_map_to_graph_routes(path: str, address: GraphRoute | None) -> None:
    assert routes.find(path.encode(), "dep", "ns") == address


def test_a_deployment_without_a_namespace_matches_any_namespace() -> None:
    assert routes.find(b"/seldon/any/dep/live", "dep", "") == GraphRoute("live")


def test_requests_and_calls_are_counted_in_histogram_buckets() -> None:
    counted = GraphMetrics("dep")
    predictor = Predictor("p", node("m", image="reg/m:2"), version="v1")
    for spent_ms in (1, 5, 7, 20_000):
        counted.count_request(predictor, "predictions", "post", "200", spent_ms * 1_000_000)
    counted.count_call(predictor, predictor.graph, Endpoint.PREDICT, 2, 1_500_000_000)
    counted.count_call(predictor, predictor.graph, Endpoint.PREDICT, -1, 1)
    counted.count_call(predictor, predictor.graph, Endpoint.ROUTE, 200, 1_000_000)
    lines = list(counted.render())
    labels = (
        'code="200",deployment_name="dep",method="post",predictor_name="p",predictor_version="v1",service="predictions"'
    )
    assert f'{SERVER}_bucket{{{labels},le="0.005"}} 2' in lines
    assert f'{SERVER}_bucket{{{labels},le="0.01"}} 3' in lines
    assert f'{SERVER}_bucket{{{labels},le="10"}} 3' in lines
    assert f'{SERVER}_bucket{{{labels},le="+Inf"}} 4' in lines
    assert f"{SERVER}_sum{{{labels}}} 20.013" in lines
    labels = (
        'code="Unknown",deployment_name="dep",method="unary",model_image="reg/m",model_name="m",model_version="2",'
        'predictor_name="p",predictor_version="v1",service="/seldon.protos.Model/Predict"'
    )
    assert f"{CLIENT}_sum{{{labels}}} 1.5" in lines
    assert f"{CLIENT}_count{{{labels}}} 1" in lines
    labels = labels.replace("Unknown", "200").replace("unary", "post").replace("/seldon.protos.Model/Predict", "/route")
    assert f"{CLIENT}_count{{{labels}}} 1" in lines


def test_graph_metadata_takes_inputs_from_the_first_node_and_outputs_from_the_last() -> None:
    described = {
        name: ComponentDescription(
            {"name": name, "versions": ["1"], "inputs": [f"into {name}"], "outputs": [f"of {name}"]}
        )
        for name in ("t", "c", "a", "b")
    }
    combined = node("c", "COMBINER", node("a"), node("b"))
    found = graph_metadata(Predictor("p", node("t", "TRANSFORMER", combined)), described)
    assert (found["graphinputs"], found["graphoutputs"]) == (["into t"], ["of c"])
    assert found["models"]["a"] == {"name": "a", "versions": ["1"], "inputs": ["into a"], "outputs": ["of a"]}
    routed = node("ab", "", node("a"), node("b"), implementation="RANDOM_ABTEST")
    found = graph_metadata(Predictor("p", routed), described)
    assert (found["graphinputs"], found["graphoutputs"], sorted(found["models"])) == (["into a"], ["of a"], ["a", "b"])


# -- several predictors ----------------------------------------------------------------------------------------


def graph_of(*predictors: Predictor) -> tuple[Graph, FunctionEngine]:
    deployment = Deployment(Path("g.yaml"), "dep", "", predictors)
    engine = FunctionEngine({each.name: lambda endpoint, message: message for each in deployment.nodes})
    models = SimpleNamespace(descriptions={}, sharing={})
    repository = SimpleNamespace(deployment=deployment, served=deployment)
    return Graph(engine, repository, models, SimpleNamespace(), Random(1)), engine  # type: ignore[arg-type]


BLUE, GREEN = Predictor("blue", node("b"), 75), Predictor("green", node("g"), 25)
PREDICT, FEEDBACK = GraphRoute(routes.PREDICTIONS), GraphRoute(routes.FEEDBACK)


def choose_predictor(graph: Graph, address: GraphRoute, message: Message, codec: JsonCodec | None = None) -> str:
    return asyncio.run(graph.choose_predictor(address, message, codec or JsonCodec())).name


def test_requests_are_split_between_predictors_by_traffic() -> None:
    graph, _ = graph_of(BLUE, GREEN)
    names = [choose_predictor(graph, PREDICT, message_from({})) for _ in range(1000)]
    assert 700 <= names.count("blue") <= 800
    assert names.count("blue") + names.count("green") == 1000


def test_feedback_goes_to_the_predictor_named_in_its_routing() -> None:
    graph, _ = graph_of(BLUE, GREEN)
    feedback = message_from({"response": {"meta": {"routing": {"g": -1}}}})
    assert {choose_predictor(graph, FEEDBACK, feedback) for _ in range(20)} == {"green"}


@pytest.mark.parametrize(("letters", "apart"), [(10, False), (LARGE_BYTES, True)])
def test_a_large_feedback_is_read_on_a_thread(letters: int, apart: bool) -> None:
    threads = []

    class Noting(JsonCodec):
        def routing(self, feedback: Message) -> Mapping[str, Any]:
            threads.append(threading.get_ident())
            return super().routing(feedback)

    graph, _ = graph_of(BLUE, GREEN)
    feedback = message_from({"response": {"meta": {"routing": {"g": -1}}, "strData": "a" * letters}})

    assert choose_predictor(graph, FEEDBACK, feedback, Noting()) == "green"
    assert (threads != [threading.get_ident()]) == apart


def test_a_shadow_receives_a_copy_of_a_request_and_is_never_chosen_to_answer() -> None:
    graph, engine = graph_of(Predictor("main", node("m")), Predictor("dark", node("d"), 0, shadow=True))

    async def go() -> None:
        graph.shadow(message_from({"strData": "a"}), "id", JsonCodec())
        while not engine.calls:  # noqa: ASYNC110 - turns of the loop, no time
            await asyncio.sleep(0)

    asyncio.run(go())
    assert engine.calls == [("d", "PREDICT", {"strData": "a"})]
    assert choose_predictor(graph, PREDICT, message_from({})) == "main"


def test_the_number_of_concurrent_shadow_requests_is_limited() -> None:
    graph, engine = graph_of(Predictor("main", node("m")), Predictor("dark", node("d"), 0, shadow=True))
    engine.models_ = {"d": lambda endpoint, message: Never}

    async def go() -> None:
        for _ in range(MAX_SHADOWS + 3):
            graph.shadow(message_from({}), "id", JsonCodec())
        while len(engine.calls) < MAX_SHADOWS:  # noqa: ASYNC110 - turns of the loop, no time
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(go())
    assert len(engine.calls) == MAX_SHADOWS


def test_a_graph_is_ready_when_all_its_nodes_are() -> None:
    graph, engine = graph_of(BLUE, GREEN)
    assert graph.ready()
    del engine.models_["g"]  # type: ignore[attr-defined]
    assert not graph.ready()


# -- a file that changes ---------------------------------------------------------------------------------------


def test_a_graph_file_that_becomes_invalid_leaves_the_old_graph_in_place(tmp_path: Path) -> None:
    (tmp_path / "M.py").write_text("class M: pass\n")
    file = tmp_path / "g.yaml"
    file.write_text("graph: {name: M}\n")
    settings = Settings(model_repository=(str(file),), model_control_mode="poll")
    repository = GraphRepository(settings, file, None)  # type: ignore[arg-type]
    assert repository.names() == ["M"]
    right = repository.deployment
    file.write_text("graph: {name: M, type: NONE, extra: 1}\n")
    assert repository.names() == ["M"]
    assert repository.deployment is right
    file.write_text("graph: {name: other, component: M}\n")
    assert repository.names() == ["M", "other"], "M stays until requests go through the other"
    repository.served = repository.deployment
    entries, findings, prints = repository.scan()
    assert [(entry.name, entry.specs[0].options["component"]) for entry in entries] == [("other", "M")]
    assert (findings, list(prints)) == ([], ["other"])
    assert repository.read("other")[0] is not None
    assert repository.read("M") == (None, b"")


def test_a_node_has_the_variables_of_its_s2i_file_and_a_change_is_detected(tmp_path: Path) -> None:
    (tmp_path / "M" / ".s2i").mkdir(parents=True)
    (tmp_path / "M" / "M.py").write_text("class M: pass\n")
    built = tmp_path / "M" / ".s2i" / "environment"
    built.write_text("ROUTES=2\nLEVEL=1\nHOME=/app\n")
    file = tmp_path / "g.yaml"
    file.write_text("graph: {name: M, environment: {LEVEL: 7}}\n")
    settings = Settings(model_repository=(str(file),), model_control_mode="poll")
    repository = GraphRepository(settings, file, None, {"HOME": "/root"})  # type: ignore[arg-type]

    entry, before = repository.read("M")
    assert entry is not None
    environment = entry.specs[0].worker.environment
    assert (environment["ROUTES"], environment["LEVEL"], "HOME" in environment) == ("2", "7", False)
    built.write_text("ROUTES=3\n")
    entry, after = repository.read("M")
    assert entry is not None
    assert entry.specs[0].worker.environment["ROUTES"] == "3"
    assert after != before


def test_a_changed_graph_is_used_only_after_its_new_nodes_have_loaded() -> None:
    graph, engine = graph_of(Predictor("p", node("old")))
    old, new = graph.deployment, Deployment(Path("g.yaml"), "dep", "", (Predictor("p", node("new")),))
    graph._repository.deployment = new
    assert graph.deployment is old
    engine.models_ = {**engine.models_, "new": lambda endpoint, message: message}
    engine.generation = 2
    assert graph.deployment is new


def test_a_change_of_only_weights_takes_effect_at_once() -> None:
    graph, _ = graph_of(BLUE)
    for weight in (1, 2, 3):
        graph._repository.deployment = Deployment(Path("g.yaml"), "dep", "", (Predictor("p", node("b"), weight),))
        assert graph.deployment.predictors[0].weight == weight
