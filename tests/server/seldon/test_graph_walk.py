"""Walks: which nodes are called, in which order and with what; failures, time limits and disconnected clients."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.seldon.graph.message_codecs import GraphError, JsonCodec, Message
from penstock.server.seldon.graph.nodes import GraphNode, MetaMode
from penstock.server.seldon.graph.walk import NodeFailed

from .graphs import AnsweredError, Answers, Never, message_from, node, value_of, walk_of

MESSAGE = {"data": {"ndarray": [[1]]}}


def adding(number: int) -> Answers:
    """A node that adds a number to the only number of a message."""
    return lambda endpoint, message: {"data": {"ndarray": [[message["data"]["ndarray"][0][0] + number]]}, "meta": {}}


def choosing(route: Any) -> Answers:
    """A router that always chooses the same route, and accepts all feedback."""
    return lambda endpoint, message: {"data": {"ndarray": [[route]]}, "meta": {}}


def summing(endpoint: Any, messages: Any) -> Any:
    """A combiner."""
    return {"data": {"ndarray": [[sum(each["data"]["ndarray"][0][0] for each in messages)]]}, "meta": {}}


def failing(endpoint: Any, message: Any) -> Any:
    """A node that fails."""
    raise AnsweredError(418, "a teapot")


def calls_of(engine: Any) -> list[str]:
    return [f"{name} {endpoint.lower()}" for name, endpoint, _ in engine.calls]


def predict(
    graph: GraphNode, models: dict[str, Answers], meta_mode: MetaMode = MetaMode.NONE, message: Any = MESSAGE
) -> tuple[Any, Any]:
    walk, engine = walk_of(graph, models, meta_mode)
    return value_of(asyncio.run(walk.predict(message_from(message), "id"))), engine


def number(answer: Any) -> Any:
    return answer["data"]["ndarray"][0][0]


def test_a_single_model_is_called_to_predict() -> None:
    answer, engine = predict(node("m"), {"m": adding(1)})
    assert number(answer) == 2
    assert calls_of(engine) == ["m predict"]


def test_transformers_and_models_run_downwards_and_output_transformers_on_the_way_back() -> None:
    graph = node("out", "OUTPUT_TRANSFORMER", node("in", "TRANSFORMER", node("first", "MODEL", node("second"))))
    models = {"out": adding(1000), "in": adding(1), "first": adding(10), "second": adding(100)}
    answer, engine = predict(graph, models)
    assert number(answer) == 1112
    assert calls_of(engine) == ["in transform_input", "first predict", "second predict", "out transform_output"]


def test_a_node_with_declared_methods_is_called_for_each_method() -> None:
    methods = frozenset({"TRANSFORM_INPUT", "ROUTE", "AGGREGATE", "TRANSFORM_OUTPUT"})
    graph = node("all", "UNKNOWN_TYPE", node("a"), node("b"), methods=methods)

    def every(endpoint: Any, message: Any) -> Any:
        route = {"data": {"ndarray": [[1]]}}
        return route if endpoint.name == "ROUTE" else message[0] if isinstance(message, list) else message

    _, engine = predict(graph, {"all": every, "a": adding(1), "b": adding(2)})
    assert calls_of(engine) == [
        "all transform_input",
        "all route",
        "b predict",
        "all aggregate",
        "all transform_output",
    ]


def test_a_model_whose_only_method_is_transform_input_is_not_called_to_predict() -> None:
    _, engine = predict(node("m", methods=frozenset({"TRANSFORM_INPUT"})), {"m": adding(1)})
    assert calls_of(engine) == ["m transform_input"]


def test_a_router_chooses_the_child_that_is_called() -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    answer, engine = predict(graph, {"r": choosing(1), "a": adding(1), "b": adding(2)})
    assert number(answer) == 3
    assert calls_of(engine) == ["r route", "b predict"]


@pytest.mark.parametrize("way", ["tensor", "bare list"])
def test_a_route_may_be_a_tensor_or_a_bare_list(way: str) -> None:
    answers: dict[str, Any] = {"tensor": {"data": {"tensor": {"shape": [1, 1], "values": [1.0]}}}, "bare list": [1]}
    graph = node("r", "ROUTER", node("a"), node("b"))
    answer, _ = predict(graph, {"r": lambda *_: answers[way], "a": adding(1), "b": adding(2)})
    assert number(answer) == 3


def test_a_combiner_receives_the_answers_of_all_children_in_order() -> None:
    graph = node("c", "COMBINER", node("a"), node("b"))
    answer, engine = predict(graph, {"c": summing, "a": adding(1), "b": adding(2)})
    assert number(answer) == 5
    assert calls_of(engine) == ["a predict", "b predict", "c aggregate"]
    assert [number(each) for each in engine.calls[-1][2]] == [2, 3]


def test_route_minus_one_without_a_combiner_returns_the_first_childs_answer() -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    answer, engine = predict(graph, {"r": choosing(-1), "a": adding(1), "b": adding(2)})
    assert number(answer) == 2
    assert calls_of(engine) == ["r route", "a predict", "b predict"]


def test_route_minus_two_returns_the_message_without_calling_a_child() -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    answer, engine = predict(graph, {"r": choosing(-2)})
    assert answer == MESSAGE
    assert calls_of(engine) == ["r route"]


@pytest.mark.parametrize("route", [2, -3])
def test_a_route_to_a_child_that_does_not_exist_is_a_graph_error(route: int) -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    with pytest.raises(GraphError, match=f"node 'r' chose child {route}, but has 2 children"):
        predict(graph, {"r": choosing(route)})


def test_a_routers_answer_without_a_route_is_a_graph_error() -> None:
    with pytest.raises(GraphError, match=r"the router.s answer has no route"):
        predict(node("r", "ROUTER", node("a")), {"r": lambda *_: {"data": {"ndarray": []}}})


def test_numbers_pass_through_a_graph_without_losing_precision_or_type() -> None:
    arrays: list[bytes] = []

    def keep(endpoint: Any, message: Any) -> Any:
        arrays.append(message["data"]["ndarray"])
        return message

    graph = node("t", "TRANSFORMER", node("m"))
    exact = {"data": {"ndarray": [[1, 1.0, 9007199254740993, 18446744073709551617, 0.1]]}}
    answer, _ = predict(graph, {"t": keep, "m": keep}, MetaMode.ALL, exact)
    assert [repr(each) for each in answer["data"]["ndarray"][0]] == [
        "1", "1.0", "9007199254740993", "18446744073709551617", "0.1",
    ]  # fmt: skip


def test_the_meta_of_an_answer_is_unchanged_in_mode_none() -> None:
    answer, _ = predict(node("m"), {"m": adding(1)})
    assert answer["meta"] == {}


def test_an_answer_contains_its_routing_in_mode_routing() -> None:
    graph = node("r", "ROUTER", node("a"), node("c", "COMBINER", node("x"), node("y")))
    models = {"r": choosing(1), "c": summing, "x": adding(1), "y": adding(1)}
    answer, _ = predict(graph, models, MetaMode.ROUTING)
    assert answer["meta"] == {"routing": {"x": -1, "y": -1, "c": -1, "r": 1}}


def test_an_answer_contains_puid_request_path_and_routing_in_mode_all() -> None:
    graph = node("r", "ROUTER", node("a", image="reg/a:1"), node("b"))
    answer, _ = predict(graph, {"r": choosing(0), "a": adding(1)}, MetaMode.ALL)
    assert answer["meta"] == {
        "puid": "id",
        "requestPath": {"a": "reg/a:1", "r": "NOT_IMPLEMENTED:NOT_IMPLEMENTED"},
        "routing": {"a": -1, "r": 0},
    }


def test_a_puid_and_request_path_set_by_a_node_are_kept() -> None:
    meta = {"puid": "own", "requestPath": {"m": "img:2"}, "tags": {"a": 1}}
    answer, _ = predict(node("m"), {"m": lambda *_: {"strData": "x", "meta": meta}}, MetaMode.ALL)
    assert answer["meta"] == {**meta, "routing": {"m": -1}}


def test_the_answer_of_a_failing_node_is_returned() -> None:
    graph = node("t", "TRANSFORMER", node("m"))
    with pytest.raises(NodeFailed) as caught:
        predict(graph, {"t": adding(1), "m": failing})
    assert caught.value.status == 418
    assert value_of(caught.value.message)["status"]["info"] == "a teapot"


def test_a_failing_routers_text_and_status_are_in_the_error() -> None:
    with pytest.raises(GraphError, match="node 'r' did not choose a child: a teapot") as caught:
        predict(node("r", "ROUTER", node("a")), {"r": failing})
    assert caught.value.status == 418


def test_a_router_that_answers_with_status_203_has_failed() -> None:
    def partly(endpoint: Any, message: Any) -> Any:
        raise AnsweredError(203, "by hearsay")

    with pytest.raises(GraphError, match="did not choose a child: by hearsay") as caught:
        predict(node("r", "ROUTER", node("a")), {"r": partly})
    assert caught.value.status == 500


def test_the_first_failing_childs_answer_is_returned_after_all_children_were_called() -> None:
    graph = node("c", "COMBINER", node("a"), node("b"), node("d"))
    walk, engine = walk_of(graph, {"a": adding(1), "b": failing, "d": failing, "c": summing})
    with pytest.raises(NodeFailed) as caught:
        asyncio.run(walk.predict(message_from(MESSAGE), "id"))
    assert caught.value.node == "b"
    assert calls_of(engine) == ["a predict", "b predict", "d predict"]


def test_a_node_that_is_not_loaded_is_not_ready() -> None:
    with pytest.raises(InferError, match="node 'm' is not ready") as caught:
        predict(node("m"), {})
    assert caught.value.code is Code.NOT_READY


def test_a_node_that_dies_fails_the_request() -> None:
    def die(endpoint: Any, message: Any) -> Any:
        raise InferError(Code.NOT_READY, "it has ended")

    with pytest.raises(InferError, match="it has ended"):
        predict(node("t", "TRANSFORMER", node("m")), {"t": adding(1), "m": die})


def test_a_call_to_a_node_that_exceeds_its_limit_is_cancelled() -> None:
    walk, engine = walk_of(node("m"), {"m": lambda *_: Never}, limit_s=0.001)
    with pytest.raises(GraphError, match=r"node 'm' did not answer within 0\.001 s"):
        asyncio.run(walk.predict(message_from(MESSAGE), "id"))
    assert engine.cancelled == ["m"]


def test_a_client_that_disconnects_cancels_the_calls_in_every_branch() -> None:
    graph = node("c", "COMBINER", node("a"), node("b"))
    walk, engine = walk_of(graph, {"a": lambda *_: Never, "b": lambda *_: Never})

    async def go() -> None:
        task = asyncio.create_task(walk.predict(message_from(MESSAGE), "id"))
        while len(engine.calls) < 2:  # noqa: ASYNC110 - turns of the loop, no time
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert engine.cancelled == ["a", "b"]


# -- feedback --------------------------------------------------------------------------------------------------


def feedback_of(**routing: int) -> Any:
    return {"request": MESSAGE, "response": {"meta": {"routing": routing}}, "reward": 1.0}


def feedback(graph: GraphNode, models: dict[str, Answers], message: Any) -> tuple[Any, Any]:
    walk, engine = walk_of(graph, models)
    return value_of(asyncio.run(walk.feedback(message_from(message)))), engine


def content(endpoint: Any, message: Any) -> Any:
    """A node that accepts its feedback."""
    return {"meta": {}, "endpoint": endpoint.name}


def test_feedback_goes_to_the_chosen_child_and_then_to_the_router() -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    answer, engine = feedback(graph, {"r": content, "b": content}, feedback_of(r=1))
    assert calls_of(engine) == ["b feedback", "r feedback"]
    assert engine.calls[0][2] == feedback_of(r=1)
    assert answer == {"meta": {}, "endpoint": "FEEDBACK"}


def test_feedback_without_routing_goes_to_all_children() -> None:
    graph = node("r", "ROUTER", node("a"), node("b"))
    _, engine = feedback(graph, {"r": content, "a": content, "b": content}, {"reward": 1.0})
    assert calls_of(engine) == ["a feedback", "b feedback", "r feedback"]


def test_transformers_and_combiners_receive_feedback_only_if_they_declare_send_feedback() -> None:
    graph = node("c", "COMBINER", node("t", "TRANSFORMER", node("m"), methods=frozenset({"SEND_FEEDBACK"})))
    _, engine = feedback(graph, {"m": content, "t": content}, feedback_of())
    assert calls_of(engine) == ["m feedback", "t feedback"]


def test_feedback_is_returned_unchanged_when_the_first_node_takes_no_feedback() -> None:
    answer, _ = feedback(node("t", "TRANSFORMER", node("m")), {"m": content}, feedback_of())
    assert answer == feedback_of()


def test_feedback_for_a_child_that_does_not_exist_is_a_graph_error() -> None:
    with pytest.raises(GraphError, match="feedback is for child 7 of node 'r', which has 1 child"):
        feedback(node("r", "ROUTER", node("a")), {"a": content, "r": content}, feedback_of(r=7))


def test_feedback_with_route_minus_two_goes_to_the_router_only() -> None:
    _, engine = feedback(node("r", "ROUTER", node("a")), {"a": content, "r": content}, feedback_of(r=-2))
    assert calls_of(engine) == ["r feedback"]


# -- built in --------------------------------------------------------------------------------------------------


def test_an_ab_test_sends_the_configured_ratio_of_requests_to_its_first_child() -> None:
    ratio = ({"name": "ratioA", "value": "0.25", "type": "FLOAT"},)
    graph = node("ab", "", node("a"), node("b"), implementation="RANDOM_ABTEST", parameters=ratio)
    walk, engine = walk_of(graph, {"a": adding(1), "b": adding(2)})

    async def ask() -> None:
        for _ in range(400):
            await walk.predict(message_from(MESSAGE), "id")

    asyncio.run(ask())
    first = calls_of(engine).count("a predict")
    assert 80 <= first <= 120
    assert first + calls_of(engine).count("b predict") == 400


def test_feedback_of_an_ab_test_goes_to_the_branch_that_answered() -> None:
    graph = node("ab", "", node("a"), node("b"), implementation="RANDOM_ABTEST")
    answer, _ = predict(graph, {"a": adding(1), "b": adding(2)}, MetaMode.ROUTING)
    branch = answer["meta"]["routing"]["ab"]
    _, engine = feedback(graph, {"a": content, "b": content}, {"response": answer, "reward": 1.0})
    assert calls_of(engine) == ["ab"[branch] + " feedback"]


def test_the_simple_router_chooses_the_first_child() -> None:
    graph = node("r", "", node("a"), node("b"), implementation="SIMPLE_ROUTER")
    answer, _ = predict(graph, {"a": adding(1)})
    assert number(answer) == 2


def test_an_average_keeps_the_format_of_the_first_answer_and_the_tags_of_all() -> None:
    graph = node("c", "COMBINER", node("a"), node("b"), implementation="AVERAGE_COMBINER")
    first = {"data": {"names": ["x", "y"], "tensor": {"shape": [1, 2], "values": [1, 2]}}, "meta": {"tags": {"a": 1}}}
    second = {"data": {"ndarray": [[3, 5]]}, "meta": {"tags": {"b": 2}, "puid": "p"}}
    answer, _ = predict(graph, {"a": lambda *_: first, "b": lambda *_: second})
    assert answer == {
        "data": {"names": ["x", "y"], "tensor": {"shape": [1, 2], "values": [2.0, 3.5]}},
        "meta": {"tags": {"a": 1, "b": 2}},
    }


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"data": {"ndarray": [[1], [2]]}}, "of the same shape"),
        ({"data": {"ndarray": [1]}}, "two dimensions"),
        ({"data": {"ndarray": [["a"]]}}, "arrays of numbers"),
        ({"strData": "a"}, "arrays of numbers"),
    ],
    ids=["shape", "dimensions", "texts", "no array"],
)
def test_averaging_anything_but_matrices_of_one_shape_is_a_graph_error(other: Any, why: str) -> None:
    graph = node("c", "COMBINER", node("a"), node("b"), implementation="AVERAGE_COMBINER")
    with pytest.raises(GraphError, match=why):
        predict(graph, {"a": adding(1), "b": lambda *_: other})


def test_the_simple_model_answers_with_three_numbers_or_returns_a_text_unchanged() -> None:
    graph = node("s", "MODEL", implementation="SIMPLE_MODEL")
    answer, _ = predict(graph, {})
    names = ["class0", "class1", "class2"]
    assert answer["data"] == {"names": names, "tensor": {"shape": [1, 3], "values": [0.1, 0.9, 0.5]}}
    assert [each["key"] for each in answer["meta"]["metrics"]] == [
        "mymetric_counter",
        "mymetric_gauge",
        "mymetric_timer",
    ]
    text, _ = predict(graph, {}, message={"strData": "a", "meta": {"puid": "p"}})
    assert (text["strData"], text["meta"]["puid"]) == ("a", "p")


def test_a_large_message_for_the_simple_model_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    read = JsonCodec.read

    def record_thread(codec: JsonCodec, message: Message) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return read(codec, message)

    monkeypatch.setattr(JsonCodec, "read", record_thread)
    predict(node("s", "MODEL", implementation="SIMPLE_MODEL"), {}, message={"strData": "a" * LARGE_BYTES})

    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
