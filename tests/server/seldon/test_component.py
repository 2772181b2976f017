"""A component's methods are called as in seldon-core 1.17.1; metrics and tags are added to each answer."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seldon_core.flask_utils import SeldonMicroserviceException
from seldon_core.user_model import SeldonComponent, SeldonNotImplementedError, SeldonResponse

from penstock.server.seldon.inside.component import Component
from penstock.server.seldon.messages import Endpoint

from .component_calls import ask, ask_service, failed, inside

ROW = {"data": {"ndarray": [[1, 2]]}}
ECHOED = '{"data":{"names":["t:0","t:1"],"ndarray":[[1,2]]},"meta":{}}\n'


class Ident:
    def predict(self, X: Any, features_names: Any = None) -> Any:
        return X


class WithMetrics(Ident):
    def metrics(self) -> Any:
        return [
            {"type": "COUNTER", "key": "mycounter", "value": 1},
            {"type": "GAUGE", "key": "mygauge", "value": 100},
            {"type": "TIMER", "key": "mytimer", "value": 20.2, "tags": {"mytag": "v"}},
        ]


class Runtime:
    def predict(self, features: Any, names: Any = (), meta: Any = None) -> Any:
        metrics = [{"type": "COUNTER", "key": "instance_counter", "value": len(features)}]
        return SeldonResponse(features, {"runtime": "tag", "shared": "right one"}, metrics)

    def metrics(self) -> Any:
        return [{"type": "COUNTER", "key": "requests_counter", "value": 1}]

    def tags(self) -> Any:
        return {"static": "tag", "shared": "not right one"}


def test_metrics_are_in_the_answer_and_recorded_with_the_method_added_to_tags() -> None:
    answer = ask(WithMetrics(), ROW)
    assert answer.decoded["meta"]["metrics"] == [
        {"key": "mycounter", "type": "COUNTER", "value": 1},
        {"key": "mygauge", "type": "GAUGE", "value": 100},
        {"key": "mytimer", "tags": {"method": "predict", "mytag": "v"}, "type": "TIMER", "value": 20.2},
    ]
    assert answer.metrics == [
        ["mycounter", "COUNTER", 1, None], ["mygauge", "GAUGE", 100, None],
        ["mytimer", "TIMER", 20.2, {"method": "predict", "mytag": "v"}],
    ]  # fmt: skip


def test_metrics_hidden_from_clients_are_still_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INCLUDE_METRICS_IN_CLIENT_RESPONSE", "false")
    passed = {"key": "k", "type": "GAUGE", "value": 1}
    answer = ask(WithMetrics(), {**ROW, "meta": {"metrics": [passed]}})
    assert answer.decoded["meta"] == {"metrics": [passed]}
    assert [each[0] for each in answer.metrics] == ["mycounter", "mygauge", "mytimer"]


def test_tags_of_a_seldon_response_override_the_components_and_its_metrics_come_last() -> None:
    answer = ask(Runtime(), ROW)
    assert answer.decoded["meta"]["tags"] == {"runtime": "tag", "shared": "right one", "static": "tag"}
    assert [each["key"] for each in answer.decoded["meta"]["metrics"]] == ["requests_counter", "instance_counter"]
    assert [each[0] for each in answer.metrics] == ["instance_counter", "requests_counter"]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (None, "null"), (({"type": "GAUGE", "key": "a", "value": 1},), '[{"type": "GAUGE", "key": "a", "value": 1}]'),
        ([{"key": "a", "value": 1}], '[{"key": "a", "value": 1}]'),
        ([{"type": "X", "key": "a", "value": 1}], '[{"type": "X", "key": "a", "value": 1}]'),
        ([{"type": "GAUGE", "key": "a", "value": "1"}], '[{"type": "GAUGE", "key": "a", "value": "1"}]'),
    ],
    ids=["none", "a tuple", "no type", "another type", "text"],
)  # fmt: skip
def test_invalid_metrics_fail_the_call(metrics: Any, text: str) -> None:
    class Bad(Ident):
        def metrics(self) -> Any:
            return metrics

    expected = failed(f"Bad metric created during request: {text}", "MICROSERVICE_BAD_METRIC")
    assert ask(Bad(), ROW)[:3] == (500, expected, [])


def test_a_numpy_metric_is_recorded_although_its_answer_cannot_be_serialized() -> None:
    class OfNumpy(Ident):
        def metrics(self) -> Any:
            return [{"type": "GAUGE", "key": "a", "value": np.float32(1.5)}]

    answer = ask(OfNumpy(), ROW)
    assert answer[:3] == (500, failed("Object of type float32 is not JSON serializable"), [["a", "GAUGE", 1.5, None]])


def test_the_metrics_of_a_call_are_not_repeated_in_the_next_call() -> None:
    class Once(Ident):
        def metrics(self) -> Any:
            self.metrics = list  # type: ignore[method-assign]
            return [{"type": "GAUGE", "key": "a", "value": 1}]

    service = inside(Once())
    assert ask_service(service, ROW).metrics == [["a", "GAUGE", 1, None]]
    assert ask_service(service, ROW) == (200, ECHOED, [], "")


def test_a_tags_method_with_a_required_argument_fails_the_call() -> None:
    class Tagged(Ident):
        def tags(self, X: Any) -> Any:
            return {}

    assert ask(Tagged(), ROW).body == failed("tags() missing 1 required positional argument: 'X'")


@pytest.mark.parametrize("user", [SeldonComponent(), object()], ids=["all inherited", "nothing there"])
def test_missing_methods_are_answered_as_in_seldon_core(user: Any) -> None:
    service = inside(user)
    assert ask_service(service, ROW).body == '{"data":{"names":[],"ndarray":[]},"meta":{}}\n'
    assert ask_service(service, ROW, Endpoint.TRANSFORM_INPUT).body == ECHOED
    assert ask_service(service, ROW, Endpoint.TRANSFORM_OUTPUT).body == ECHOED
    assert ask_service(service, ROW, Endpoint.ROUTE).status == 400
    assert ask_service(service, [ROW], Endpoint.AGGREGATE).status == 400


def test_a_raw_method_is_called_first_and_falls_back_when_not_implemented() -> None:
    class Raw(Ident):
        def predict_raw(self, message: Any) -> Any:
            if message.get("strData") == "no":
                raise SeldonNotImplementedError("not this one")
            return {"got": message, "meta": {"metrics": [{"key": "a", "value": 1}]}}

    service = inside(Raw())
    assert ask_service(service, {"strData": "no"}).body == '{"meta":{},"strData":"no"}\n'
    answer = ask_service(service, {"strData": "yes"})
    assert answer.body == '{"got":{"strData":"yes"},"meta":{"metrics":[{"key":"a","value":1}]}}\n'
    assert answer.metrics == [["a", "COUNTER", 1, None]]


def test_legacy_methods_are_called_before_raw_methods() -> None:
    class Legacy:
        def predict_rest(self, message: Any) -> Any:
            return ["rest", message]

        def predict_raw(self, message: Any) -> Any:
            raise AssertionError

        def transform_input_grpc(self, message: Any) -> Any:
            return ["grpc", message]

    service = inside(Legacy())
    assert ask_service(service, {"strData": "a"}).body == '["rest",{"strData":"a"}]\n'
    assert ask_service(service, {"strData": "a"}, Endpoint.TRANSFORM_INPUT).body == '["grpc",{"strData":"a"}]\n'


def test_a_route_that_is_not_an_int_is_rejected() -> None:
    class Router:
        def route(self, X: Any, names: Any) -> Any:
            return {"i": 1, "t": True, "n": np.int64(2), "s": "a"}[X]

    service = inside(Router())
    one = '{"data":{"names":["t:0"],"tensor":{"shape":[1,1],"values":[1]}},"meta":{}}\n'
    assert ask_service(service, {"strData": "i"}, Endpoint.ROUTE).body == one
    truth = '{"data":{"names":["t:0"],"ndarray":[[true]]},"meta":{}}\n'
    assert ask_service(service, {"strData": "t"}, Endpoint.ROUTE).body == truth
    for word, text in (("n", "2"), ("s", "a")):
        refused = failed(f"Routing response must be int but got {text}", "MICROSERVICE_BAD_DATA")
        assert ask_service(service, {"strData": word}, Endpoint.ROUTE)[:2] == (400, refused)


def test_a_route_may_be_a_numpy_integer_when_strict_is_off() -> None:
    class Router:
        def route(self, X: Any, names: Any) -> Any:
            return {"n": np.argmax([0, 1]), "f": np.float64(1)}[X]

    service = inside(Router(), strict=False)
    one = '{"data":{"names":["t:0"],"tensor":{"shape":[1,1],"values":[1]}},"meta":{}}\n'
    assert ask_service(service, {"strData": "n"}, Endpoint.ROUTE).body == one
    assert ask_service(service, {"strData": "f"}, Endpoint.ROUTE).status == 400


def test_aggregate_merges_the_meta_of_its_messages() -> None:
    class Mean:
        def aggregate(self, Xs: Any, features_names: Any) -> Any:
            return (np.reshape(Xs[0], (1, -1)) + np.reshape(Xs[1], (1, -1))) / 2.0

    first_meta = {"puid": "p1", "tags": {"a": 1}, "metrics": [{"type": "COUNTER", "key": "k", "value": 1}]}
    messages = [{"meta": first_meta, **ROW}, {"meta": {"tags": {"a": 2, "b": 3}}, "data": {"ndarray": [[3, 5]]}}]
    expected = (
        '{"data":{"names":["t:0","t:1"],"ndarray":[[2.0,3.5]]},"meta":{"metrics":[{"key":"k","type":"COUNTER",'
        '"value":1}],"puid":"p1","tags":{"a":2,"b":3}}}\n'
    )
    assert ask(Mean(), {"seldonMessages": messages}, Endpoint.AGGREGATE).body == expected


def test_send_feedback_receives_floats_and_the_reward_is_counted() -> None:
    class Fed:
        received: Any = None

        def send_feedback(self, features: Any, names: Any, reward: Any, truth: Any, routing: Any = None) -> Any:
            self.received = (features.tolist(), str(features.dtype), list(names), reward, truth.tolist(), routing)

    user = Fed()
    request = {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}}
    response = {"meta": {"routing": {"0": 3}}, "data": {"ndarray": [[0.9]]}}
    feedback = {"request": request, "response": response, "reward": 0.1, "truth": {"data": {"ndarray": [[1]]}}}
    answer = ask(user, feedback, Endpoint.FEEDBACK)
    assert answer.body == '{"data":{"ndarray":[]},"meta":{}}\n'
    assert user.received == ([[1.0, 2.0]], "float64", ["a", "b"], 0.10000000149011612, [[1.0]], 3)
    assert answer.metrics == [
        ["seldon_api_model_feedback", "COUNTER", 1, None],
        ["seldon_api_model_feedback_reward", "COUNTER", 0.10000000149011612, None],
    ]


def test_the_request_path_records_the_unit_and_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREDICTIVE_UNIT_ID", "classifier")
    monkeypatch.setenv("PREDICTIVE_UNIT_IMAGE", "reg.io:5000/org/img:0.3")
    answer = ask(Ident(), {"strData": "a", "meta": {"requestPath": {"before": "it:1"}}})
    path = '"requestPath":{"before":"it:1","classifier":"reg.io:5000/org/img:0.3"}'
    assert answer.body == f'{{"meta":{{{path}}},"strData":"a"}}\n'
    answer = ask(Ident(), {"strData": "a", "meta": {"requestPath": {"classifier": "it:1"}}})
    assert answer.decoded["meta"]["requestPath"] == {"classifier": "it:1"}


def test_a_routers_answer_keeps_only_the_puid_of_the_requests_meta() -> None:
    class Routes:
        def route(self, X: Any, names: Any) -> Any:
            return 1

    answer = ask(Routes(), {"strData": "a", "meta": {"puid": "p", "tags": {"a": 1}}}, Endpoint.ROUTE)
    assert answer.decoded["meta"] == {"puid": "p"}


def test_a_million_columns_all_get_default_names() -> None:
    names = Component(object()).class_names(np.zeros((1, 1_000_001), np.uint8))
    assert (len(names), names[-1]) == (1_000_001, "t:1000000")


def test_a_tensor_with_many_columns_but_no_values_is_rejected() -> None:
    shape = {"shape": [0, 2**31 - 1], "values": []}
    answer = ask(Ident(), {"data": {"tensor": shape}})
    assert answer[:2] == (400, failed("No values have no 2147483647 columns", "MICROSERVICE_BAD_DATA"))


def test_a_seldon_microservice_exception_sets_the_status_and_reason() -> None:
    class Forbids:
        def predict(self, X: Any, names: Any) -> Any:
            raise SeldonMicroserviceException("no", status_code=403, reason="R")

    assert ask(Forbids(), ROW)[:2] == (403, failed("no", "R"))


class Async:
    async def predict(self, X: Any, names: Any) -> Any:
        return X

    async def tags(self) -> Any:
        return {"a": 1}

    async def health_status_raw(self) -> Any:
        return {"strData": "fine"}


@pytest.mark.filterwarnings("ignore:coroutine")
def test_coroutine_methods_fail_when_strict_is_on_and_are_awaited_when_strict_is_off() -> None:
    answer = ask(Async(), ROW)
    assert answer.status == 400
    assert "must be list or np array):<coroutine object" in answer.body
    assert ask(Async(), ROW, strict=False).body == ECHOED.replace('"meta":{}', '"meta":{"tags":{"a":1}}')
    assert ask(Async(), b"", Endpoint.HEALTH, strict=False).decoded == {"strData": "fine"}
