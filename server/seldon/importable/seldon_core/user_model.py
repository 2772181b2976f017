"""The class that components may inherit, what their methods may return, and how these are called.

A component need not inherit anything. Methods are called once, with the arguments that their signature takes; the
original called again with fewer after any TypeError. Source: seldon-core 1.17.1.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Dict, List, Tuple, Union  # noqa: F401, UP035 - for `import *`, which also provided these

import numpy as np  # noqa: F401 - likewise

from .flask_utils import SeldonMicroserviceException
from .metrics import SeldonMetrics, validate_metrics  # noqa: F401 - likewise

logger = logging.getLogger(__name__)

INCLUDE_METRICS_IN_CLIENT_RESPONSE = os.environ.get("INCLUDE_METRICS_IN_CLIENT_RESPONSE", "true").lower() == "true"


class SeldonNotImplementedError(SeldonMicroserviceException):
    """Raised by a method to be treated as missing."""

    status_code = 400

    def __init__(self, message: Any) -> None:
        SeldonMicroserviceException.__init__(self, message)


class SeldonResponse:
    """A result, with tags and metrics of this call."""

    def __init__(
        self, data: Any, tags: dict[str, Any] | None = None, metrics: list[dict[str, Any]] | None = None
    ) -> None:
        self.data = data
        self.tags = tags if tags is not None else {}
        self.metrics = metrics if metrics is not None else []

    @classmethod
    def create(cls, data: Any) -> SeldonResponse:
        """Return a response as it is, or make one of a result."""
        return data if isinstance(data, cls) else cls(data=data)


class SeldonComponent:
    """A component that implements only `load`. Subclasses override the others."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def load(self) -> None:
        """Do nothing."""

    def tags(self) -> Any:
        raise SeldonNotImplementedError("tags is not implemented")

    def class_names(self) -> Any:
        raise SeldonNotImplementedError("class_names is not implemented")

    def feature_names(self) -> Any:
        raise SeldonNotImplementedError("feature_names is not implemented")

    def metrics(self) -> Any:
        raise SeldonNotImplementedError("metrics is not implemented")

    def predict(self, X: Any, names: Any, meta: Any = None) -> Any:  # noqa: N803 - as seldon-core calls it
        raise SeldonNotImplementedError("predict is not implemented")

    def predict_raw(self, msg: Any) -> Any:
        raise SeldonNotImplementedError("predict_raw is not implemented")

    def send_feedback(self, features: Any, feature_names: Any, reward: float, truth: Any, routing: int | None) -> Any:
        raise SeldonNotImplementedError("send_feedback is not implemented")

    def send_feedback_raw(self, feedback: Any) -> Any:
        raise SeldonNotImplementedError("send_feedback_raw is not implemented")

    def transform_input(self, X: Any, names: Any, meta: Any = None) -> Any:  # noqa: N803
        raise SeldonNotImplementedError("transform_input is not implemented")

    def transform_input_raw(self, msg: Any) -> Any:
        raise SeldonNotImplementedError("transform_input_raw is not implemented")

    def transform_output(self, X: Any, names: Any, meta: Any = None) -> Any:  # noqa: N803
        raise SeldonNotImplementedError("transform_output is not implemented")

    def transform_output_raw(self, msg: Any) -> Any:
        raise SeldonNotImplementedError("transform_output_raw is not implemented")

    def route(self, features: Any, feature_names: Any) -> Any:
        raise SeldonNotImplementedError("route is not implemented")

    def route_raw(self, msg: Any) -> Any:
        raise SeldonNotImplementedError("route_raw is not implemented")

    def aggregate(self, features_list: Any, feature_names_list: Any) -> Any:
        raise SeldonNotImplementedError("aggregate is not implemented")

    def aggregate_raw(self, msgs: Any) -> Any:
        raise SeldonNotImplementedError("aggregate_raw is not implemented")

    def health_status(self) -> Any:
        raise SeldonNotImplementedError("health is not implemented")

    def health_status_raw(self) -> Any:
        raise SeldonNotImplementedError("health_raw is not implemented")

    def metadata(self) -> Any:
        raise SeldonNotImplementedError("metadata is not implemented")

    def init_metadata(self) -> Any:
        raise SeldonNotImplementedError("init_metadata is not implemented")


def client_custom_tags(user_model: Any) -> Any:
    """Call `tags`; {} if it is missing."""
    return _asked(user_model, "tags", {})


def client_class_names(user_model: Any, predictions: Any) -> Any:
    """Return the names of a result's columns: `class_names`, method or attribute, or t:0, t:1, ..."""
    if len(predictions.shape) <= 1:
        return []
    if hasattr(user_model, "class_names"):
        if not inspect.ismethod(user_model.class_names):
            logger.warning("class_names attribute is deprecated. Please define a class_names method")
            return user_model.class_names
        names = _asked(user_model, "class_names", None)
        if names is not None:
            return names
    return [f"t:{number}" for number in range(predictions.shape[1])]


def client_feature_names(user_model: Any, original: Any) -> Any:
    """Call `feature_names`; the given names if it is missing."""
    return _asked(user_model, "feature_names", original)


def client_predict(user_model: Any, features: Any, feature_names: Iterable[str], **kwargs: Any) -> SeldonResponse:
    """Call `predict`; [] if it is missing."""
    return SeldonResponse.create(_called(user_model, "predict", (features, feature_names), kwargs, []))


def client_transform_input(
    user_model: Any, features: Any, feature_names: Iterable[str], **kwargs: Any
) -> SeldonResponse:
    """Call `transform_input`; the features if it is missing."""
    return SeldonResponse.create(_called(user_model, "transform_input", (features, feature_names), kwargs, features))


def client_transform_output(
    user_model: Any, features: Any, feature_names: Iterable[str], **kwargs: Any
) -> SeldonResponse:
    """Call `transform_output`; the features if it is missing."""
    return SeldonResponse.create(_called(user_model, "transform_output", (features, feature_names), kwargs, features))


def client_send_feedback(
    user_model: Any, features: Any, feature_names: Iterable[str], reward: float, truth: Any, routing: int | None
) -> SeldonResponse:
    """Call `send_feedback`; None if it is missing."""
    if hasattr(user_model, "send_feedback"):
        try:
            return SeldonResponse.create(
                user_model.send_feedback(features, feature_names, reward, truth, routing=routing)
            )
        except SeldonNotImplementedError:
            pass
    return SeldonResponse.create(None)


def client_route(user_model: Any, features: Any, feature_names: Iterable[str], **kwargs: Any) -> SeldonResponse:
    """Call `route`. Raises: SeldonNotImplementedError."""
    if not hasattr(user_model, "route"):
        raise SeldonNotImplementedError("Route not defined")
    return SeldonResponse.create(_fitting(user_model.route, (features, feature_names), kwargs))


def client_aggregate(user_model: Any, features_list: Any, feature_names_list: Any) -> SeldonResponse:
    """Call `aggregate`. Raises: SeldonNotImplementedError."""
    if not hasattr(user_model, "aggregate"):
        raise SeldonNotImplementedError("Aggregate not defined")
    return SeldonResponse.create(user_model.aggregate(features_list, feature_names_list))


def client_health_status(user_model: Any) -> Any:
    """Call `health_status`; a text that means healthy if it is missing."""
    return _asked(user_model, "health_status", "not implemented - assuming healthy", "healthy")


def client_custom_metrics(
    user_model: Any, seldon_metrics: Any, method: str, runtime_metrics: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Count the metrics of one call, and return those for its answer. Raises: SeldonMicroserviceException."""
    of_call = _checked([] if runtime_metrics is None else runtime_metrics)
    seldon_metrics.update(of_call, method)
    own = _checked(_asked(user_model, "metrics", []))
    seldon_metrics.update(own, method)
    return own + of_call if INCLUDE_METRICS_IN_CLIENT_RESPONSE else []


def _checked(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not validate_metrics(metrics):
        text = f"Bad metric created during request: {json.dumps(metrics)}"
        raise SeldonMicroserviceException(text, status_code=500, reason="MICROSERVICE_BAD_METRIC")
    return metrics


def _asked(user_model: Any, name: str, unimplemented: Any, undefined: Any = None) -> Any:
    """Call a method without arguments, if it exists."""
    if not hasattr(user_model, name):
        return unimplemented if undefined is None else undefined
    try:
        return getattr(user_model, name)()
    except SeldonNotImplementedError:
        return unimplemented


def _called(user_model: Any, name: str, words: tuple[Any, ...], more: dict[str, Any], instead: Any) -> Any:
    if not hasattr(user_model, name):
        return instead
    try:
        return _fitting(getattr(user_model, name), words, more)
    except SeldonNotImplementedError:
        return instead


def _fitting(method: Callable[..., Any], words: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """Call it with the keyword arguments too, if its signature takes them."""
    try:
        inspect.signature(method).bind(*words, **more)
    except (TypeError, ValueError):
        return method(*words)
    return method(*words, **more)
