"""seldon_core.user_model, flask_utils, metrics and env_utils of the shim, used when seldon-core is not installed."""

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

# Each method with its arguments. The errors name the method, except for `health` and `health_raw`.
UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "tags": (), "class_names": (), "feature_names": (), "metrics": (), "metadata": (), "init_metadata": (),
    "predict": ([], []), "transform_input": ([], []), "transform_output": ([], []), "route": ([], []),
    "aggregate": ([], []), "send_feedback": ([], [], 1.0, [], 0), "health_status": (), "health_status_raw": (),
    "predict_raw": ({},), "transform_input_raw": ({},), "transform_output_raw": ({},), "route_raw": ({},),
    "aggregate_raw": ({},), "send_feedback_raw": ({},),
}  # fmt: skip


@pytest.mark.parametrize("name", UNIMPLEMENTED)
def test_every_undefined_method_of_seldon_component_raises_not_implemented(name: str) -> None:
    with pytest.raises(SeldonNotImplementedError) as caught:
        getattr(SeldonComponent(), name)(*UNIMPLEMENTED[name])

    name_in_message = {"health_status": "health", "health_status_raw": "health_raw"}.get(name, name)
    assert (caught.value.message, caught.value.status_code) == (f"{name_in_message} is not implemented", 400)


def test_seldon_component_accepts_any_parameters_and_its_load_does_nothing() -> None:
    SeldonComponent(a=1, b="x").load()


def test_seldon_microservice_exception_has_its_answer_in_to_dict_and_an_empty_text() -> None:
    error = SeldonMicroserviceException("no", status_code=403, payload={"a": 1}, reason="R")

    assert (error.message, error.status_code, error.payload, error.reason) == ("no", 403, {"a": 1}, "R")
    assert error.to_dict() == {"status": {"status": 1, "info": "no", "code": -1, "reason": "R"}}
    assert str(error) == ""
    assert SeldonMicroserviceException("x").to_dict()["status"]["reason"] == "MICROSERVICE_BAD_DATA"
    assert SeldonMicroserviceException("x").status_code == 400


def test_a_seldon_response_has_empty_tags_and_metrics_by_default() -> None:
    response = SeldonResponse([1], tags={"a": 1}, metrics=[{"key": "k"}])
    bare = SeldonResponse("x")

    assert (response.data, response.tags, response.metrics) == ([1], {"a": 1}, [{"key": "k"}])
    assert (bare.data, bare.tags, bare.metrics) == ("x", {}, [])
    assert SeldonResponse.create(response) is response
    assert SeldonResponse.create(b"x").data == b"x"


def test_create_functions_make_metrics_of_their_type() -> None:
    assert [create_counter("c", 1), create_gauge("g", 2.5), create_timer("t", 20)] == [
        {"key": "c", "type": "COUNTER", "value": 1},
        {"key": "g", "type": "GAUGE", "value": 2.5},
        {"key": "t", "type": "TIMER", "value": 20},
    ]


@pytest.mark.parametrize("make", [create_counter, create_gauge, create_timer])
def test_a_metric_value_that_is_not_a_number_is_a_type_error(make: Any) -> None:
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
def test_validate_metrics_accepts_only_a_list_of_complete_metrics(metrics: Any, good: bool) -> None:
    if metrics == ["key value type"]:
        with pytest.raises(TypeError):  # as the original
            validate_metrics(metrics)
    else:
        assert validate_metrics(metrics) is good


@pytest.mark.parametrize(
    ("image", "parts"),
    [("org/img:0.3", ("org/img", "0.3")), ("reg.io:5000/img:1", ("reg.io:5000/img", "1")), ("img", ("", "img"))],
)
def test_an_image_is_split_into_a_name_and_a_version(image: str, parts: tuple[str, str]) -> None:
    assert split_image_tag(image) == parts


def test_env_utils_reads_model_image_and_predictor_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREDICTIVE_UNIT_ID", "PREDICTIVE_UNIT_IMAGE", "PREDICTOR_LABELS", "PREDICTOR_ID"):
        monkeypatch.delenv(name, raising=False)
    unset = env_utils.get_model_name(), env_utils.get_image_name(), env_utils.get_predictor_version()
    monkeypatch.setenv("PREDICTIVE_UNIT_ID", "m")
    monkeypatch.setenv("PREDICTOR_LABELS", '{"version": "v2"}')

    assert unset == ("NOT_IMPLEMENTED", "NOT_IMPLEMENTED:NOT_IMPLEMENTED", "NOT_IMPLEMENTED")
    assert (env_utils.get_model_name(), env_utils.get_predictor_version()) == ("m", "v2")
    assert (env_utils.get_predictor_name("p"), env_utils.get_deployment_name("d")) == ("p", "d")


class _Counted:
    """Stands in for SeldonMetrics."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, str]] = []

    def update(self, metrics: Any, method: str) -> None:
        self.updates.append((metrics, method))


def test_predict_receives_meta_only_if_its_signature_accepts_meta() -> None:
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


def test_a_type_error_raised_by_route_does_not_call_route_again() -> None:
    runs = []

    class Raises:
        def route(self, features: Any, names: Any, **more: Any) -> Any:
            runs.append(more)
            raise TypeError("inner")

    with pytest.raises(TypeError, match="inner"):
        user_model.client_route(Raises(), 1, [], meta={})
    assert runs == [{"meta": {}}]


def test_missing_transformers_return_their_input() -> None:
    assert user_model.client_transform_input(object(), "x", []).data == "x"
    assert user_model.client_transform_output(SeldonComponent(), b"x", []).data == b"x"
    assert user_model.client_send_feedback(object(), [], [], 1.0, [], None).data is None


def test_missing_route_and_aggregate_methods_raise_not_implemented() -> None:
    with pytest.raises(SeldonNotImplementedError) as route:
        user_model.client_route(object(), 1, [])
    with pytest.raises(SeldonNotImplementedError) as aggregate:
        user_model.client_aggregate(object(), [], [])

    assert (route.value.message, aggregate.value.message) == ("Route not defined", "Aggregate not defined")


def test_class_names_come_from_a_method_an_attribute_or_column_numbers() -> None:
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


def test_health_and_tags_have_defaults_when_no_method_is_defined() -> None:
    assert user_model.client_health_status(object()) == "healthy"
    assert user_model.client_health_status(SeldonComponent()) == "not implemented - assuming healthy"
    assert user_model.client_custom_tags(object()) == user_model.client_custom_tags(SeldonComponent()) == {}


def test_metrics_of_a_call_are_counted_and_follow_the_components_own() -> None:
    class Measured:
        def metrics(self) -> list[dict[str, Any]]:
            return [create_counter("own", 1)]

    counted = _Counted()
    returned = user_model.client_custom_metrics(Measured(), counted, "predict", [create_gauge("call", 2)])

    assert [metric["key"] for metric in returned] == ["own", "call"]
    assert [[metric["key"] for metric in metrics] for metrics, _ in counted.updates] == [["call"], ["own"]]


def test_invalid_metrics_raise_a_microservice_exception() -> None:
    class Bad:
        def metrics(self) -> Any:
            return None

    with pytest.raises(SeldonMicroserviceException) as caught:
        user_model.client_custom_metrics(Bad(), _Counted(), "predict")

    assert (caught.value.reason, caught.value.status_code) == ("MICROSERVICE_BAD_METRIC", 500)
    assert caught.value.message == "Bad metric created during request: null"


def test_method_parameters_have_seldon_cores_names() -> None:
    assert list(inspect.signature(SeldonComponent.predict).parameters) == ["self", "X", "names", "meta"]
    assert list(inspect.signature(SeldonComponent.route).parameters) == ["self", "features", "feature_names"]


def test_include_metrics_in_client_response_is_read_from_the_environment() -> None:
    expected = os.environ.get("INCLUDE_METRICS_IN_CLIENT_RESPONSE", "true").lower() == "true"

    assert user_model.INCLUDE_METRICS_IN_CLIENT_RESPONSE is expected
