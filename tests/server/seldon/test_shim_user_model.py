"""seldon_core.user_model, flask_utils, metrics and env_utils, as components find them without the original."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
from seldon_core import env_utils, user_model
from seldon_core.flask_utils import SeldonMicroserviceException
from seldon_core.metrics import create_counter, create_gauge, create_timer, split_image_tag, validate_metrics
from seldon_core.user_model import SeldonComponent, SeldonNotImplementedError, SeldonResponse

# Each method, with what the original says of it. Only `health` and `health_raw` are not what they are called.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "tags": (), "class_names": (), "feature_names": (), "metrics": (), "metadata": (), "init_metadata": (),
    "predict": ([], []), "transform_input": ([], []), "transform_output": ([], []), "route": ([], []),
    "aggregate": ([], []), "send_feedback": ([], [], 1.0, [], 0), "health_status": (), "health_status_raw": (),
    "predict_raw": ({},), "transform_input_raw": ({},), "transform_output_raw": ({},), "route_raw": ({},),
    "aggregate_raw": ({},), "send_feedback_raw": ({},),
}  # fmt: skip


@pytest.mark.parametrize("name", UNIMPLEMENTED)
def test_a_component_that_defines_nothing_raises_for_everything(name: str) -> None:
    with pytest.raises(SeldonNotImplementedError) as caught:
        getattr(SeldonComponent(), name)(*UNIMPLEMENTED[name])

    said = {"health_status": "health", "health_status_raw": "health_raw"}.get(name, name)
    assert (caught.value.message, caught.value.status_code) == (f"{said} is not implemented", 400)


def test_a_component_takes_any_parameters_and_loads_nothing() -> None:
    SeldonComponent(a=1, b="x").load()


def test_the_exception_has_what_is_answered_and_no_text_of_its_own() -> None:
    error = SeldonMicroserviceException("no", status_code=403, payload={"a": 1}, reason="R")

    assert (error.message, error.status_code, error.payload, error.reason) == ("no", 403, {"a": 1}, "R")
    assert error.to_dict() == {"status": {"status": 1, "info": "no", "code": -1, "reason": "R"}}
    assert str(error) == ""
    assert SeldonMicroserviceException("x").to_dict()["status"]["reason"] == "MICROSERVICE_BAD_DATA"
    assert SeldonMicroserviceException("x").status_code == 400


def test_a_response_has_what_it_was_given_or_nothing() -> None:
    response = SeldonResponse([1], tags={"a": 1}, metrics=[{"key": "k"}])
    bare = SeldonResponse("x")

    assert (response.data, response.tags, response.metrics) == ([1], {"a": 1}, [{"key": "k"}])
    assert (bare.data, bare.tags, bare.metrics) == ("x", {}, [])
    assert SeldonResponse.create(response) is response
    assert SeldonResponse.create(b"x").data == b"x"


def test_metrics_are_made() -> None:
    assert [create_counter("c", 1), create_gauge("g", 2.5), create_timer("t", 20)] == [
        {"key": "c", "type": "COUNTER", "value": 1},
        {"key": "g", "type": "GAUGE", "value": 2.5},
        {"key": "t", "type": "TIMER", "value": 20},
    ]


@pytest.mark.parametrize("make", [create_counter, create_gauge, create_timer])
def test_a_metric_is_a_number(make: Any) -> None:
    with pytest.raises(TypeError):
        make("k", "1")


@pytest.mark.parametrize(
    ("metrics", "good"),
    [
        ([], True),
        ([{"type": "COUNTER", "key": "k", "value": 1}], True),
        ([{"type": "TIMER", "key": "k", "value": np.float32(1.5), "tags": {"a": "b"}}], True),
        ([{"type": "COUNTER", "key": "k", "value": 1}, {"type": "GAUGE", "key": "k"}], False),
        ([{"type": "SUMMARY", "key": "k", "value": 1}], False),
        ([{"type": [], "key": "k", "value": 1}], False),
        ([{"type": "GAUGE", "key": "k", "value": "1"}], False),
        (["key value type"], False),
        (({"type": "GAUGE", "key": "k", "value": 1},), False),
        (None, False),
    ],
)
def test_metrics_are_checked(metrics: Any, good: bool) -> None:
    if metrics == ["key value type"]:
        with pytest.raises(TypeError):  # as the original
            validate_metrics(metrics)
    else:
        assert validate_metrics(metrics) is good


@pytest.mark.parametrize(
    ("image", "parts"),
    [("org/img:0.3", ("org/img", "0.3")), ("reg.io:5000/img:1", ("reg.io:5000/img", "1")), ("img", ("", "img"))],
)
def test_an_image_is_a_name_and_a_version(image: str, parts: tuple[str, str]) -> None:
    assert split_image_tag(image) == parts


def test_the_environment_says_what_a_component_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREDICTIVE_UNIT_ID", "PREDICTIVE_UNIT_IMAGE", "PREDICTOR_LABELS", "PREDICTOR_ID"):
        monkeypatch.delenv(name, raising=False)
    unset = env_utils.get_model_name(), env_utils.get_image_name(), env_utils.get_predictor_version()
    monkeypatch.setenv("PREDICTIVE_UNIT_ID", "m")
    monkeypatch.setenv("PREDICTOR_LABELS", '{"version": "v2"}')

    assert unset == ("NOT_IMPLEMENTED", "NOT_IMPLEMENTED:NOT_IMPLEMENTED", "NOT_IMPLEMENTED")
    assert (env_utils.get_model_name(), env_utils.get_predictor_version()) == ("m", "v2")
    assert (env_utils.get_predictor_name("p"), env_utils.get_deployment_name("d")) == ("p", "d")


class _Counted:
    """Stands for SeldonMetrics."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, str]] = []

    def update(self, metrics: Any, method: str) -> None:
        self.updates.append((metrics, method))


def test_a_method_gets_meta_if_it_takes_it() -> None:
    class Takes:
        def predict(self, X: Any, names: Any, meta: Any = None) -> Any:  # noqa: N803
            return [meta]

    class Does:
        def predict(self, X: Any, features_names: Any = None) -> Any:  # noqa: N803
            return [X, features_names]

    assert user_model.client_predict(Takes(), 1, ["a"], meta={"m": 1}).data == [{"m": 1}]
    assert user_model.client_predict(Does(), 1, ["a"], meta={"m": 1}).data == [1, ["a"]]
    assert user_model.client_predict(object(), 1, ["a"]).data == []
    assert user_model.client_predict(SeldonComponent(), 1, ["a"]).data == []


def test_a_type_error_of_its_own_does_not_run_it_again() -> None:
    runs = []

    class Raises:
        def route(self, features: Any, names: Any, **more: Any) -> Any:
            runs.append(more)
            raise TypeError("inner")

    with pytest.raises(TypeError, match="inner"):
        user_model.client_route(Raises(), 1, [], meta={})
    assert runs == [{"meta": {}}]


def test_transformers_that_are_not_there_pass_on_what_came() -> None:
    assert user_model.client_transform_input(object(), "x", []).data == "x"
    assert user_model.client_transform_output(SeldonComponent(), b"x", []).data == b"x"
    assert user_model.client_send_feedback(object(), [], [], 1.0, [], None).data is None


def test_routers_and_combiners_have_to_be_there() -> None:
    with pytest.raises(SeldonNotImplementedError) as route:
        user_model.client_route(object(), 1, [])
    with pytest.raises(SeldonNotImplementedError) as aggregate:
        user_model.client_aggregate(object(), [], [])

    assert (route.value.message, aggregate.value.message) == ("Route not defined", "Aggregate not defined")


def test_columns_are_named_by_method_attribute_or_number() -> None:
    class Method:
        def class_names(self) -> list[str]:
            return ["a", "b"]

    class Attribute:
        class_names = ("c", "d")

    result = np.zeros((1, 2))
    assert user_model.client_class_names(Method(), result) == ["a", "b"]
    assert user_model.client_class_names(Attribute(), result) == ("c", "d")
    assert user_model.client_class_names(SeldonComponent(), result) == ["t:0", "t:1"]
    assert user_model.client_class_names(Method(), np.zeros(2)) == []
    assert user_model.client_feature_names(object(), ["x"]) == ["x"]


def test_health_and_tags_have_their_answers_where_nothing_is_defined() -> None:
    assert user_model.client_health_status(object()) == "healthy"
    assert user_model.client_health_status(SeldonComponent()) == "not implemented - assuming healthy"
    assert user_model.client_custom_tags(object()) == user_model.client_custom_tags(SeldonComponent()) == {}


def test_metrics_of_a_call_are_counted_and_given_after_those_of_the_component() -> None:
    class Measured:
        def metrics(self) -> list[dict[str, Any]]:
            return [create_counter("own", 1)]

    counted = _Counted()
    given = user_model.client_custom_metrics(Measured(), counted, "predict", [create_gauge("call", 2)])

    assert [metric["key"] for metric in given] == ["own", "call"]
    assert [[metric["key"] for metric in metrics] for metrics, _ in counted.updates] == [["call"], ["own"]]


def test_bad_metrics_are_an_error() -> None:
    class Bad:
        def metrics(self) -> Any:
            return None

    with pytest.raises(SeldonMicroserviceException) as caught:
        user_model.client_custom_metrics(Bad(), _Counted(), "predict")

    assert (caught.value.reason, caught.value.status_code) == ("MICROSERVICE_BAD_METRIC", 500)
    assert caught.value.message == "Bad metric created during request: null"


def test_the_component_s_parameters_have_the_original_s_names() -> None:
    assert list(inspect.signature(SeldonComponent.predict).parameters) == ["self", "X", "names", "meta"]
    assert list(inspect.signature(SeldonComponent.route).parameters) == ["self", "features", "feature_names"]


def test_whether_metrics_are_given_to_clients_is_read_from_the_environment() -> None:
    said = os.environ.get("INCLUDE_METRICS_IN_CLIENT_RESPONSE", "true").lower() == "true"

    assert user_model.INCLUDE_METRICS_IN_CLIENT_RESPONSE is said
