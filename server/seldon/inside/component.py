"""Component: the user's object, and how Seldon calls its methods, independent of transport.

Source: seldon-core 1.17.1, user_model.py and seldon_methods.py, by observed behavior. One difference: a method's
signature decides whether it is passed `meta`, where the original called again without it after any TypeError.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.server.seldon.environ import UNSET, UNSET_IMAGE
from penstock.server.seldon.messages import Endpoint

from .metrics import are_valid
from .seldon_core_classes import SeldonComponent, SeldonMicroserviceException, SeldonNotImplementedError, SeldonResponse
from .signatures import UNSURE, rejects_meta, takes_meta

logger = logging.getLogger("seldon_core")

MISSING: Any = object()
"""Stands for a method that a component lacks."""
NO_RESULT: Any = object()
"""The result of `call_raw` if the request is one for the methods that take numpy."""
ROUTE_TEXT = "Routing response must be int but got "

_NAMES = ("predict", "send_feedback", "transform_input", "transform_output", "route", "aggregate", "health_status")
"""The methods' names, by Endpoint."""
_RAW_NAMES = tuple(f"{name}_raw" for name in _NAMES)
_TRANSPORT_NAMES = tuple((f"{name}_rest", f"{name}_grpc") for name in _NAMES[:-1])
_LEGACY_NAMES = tuple(
    (_TRANSPORT_NAMES[0][:1] if not proto else _TRANSPORT_NAMES[0][1:], (), *_TRANSPORT_NAMES[2:], ())
    for proto in (False, True)
)  # fmt: skip
"""The legacy methods, by Endpoint. `predict` had one for REST and one for gRPC; of the others, the first that exists
was called for either transport. Those for feedback take protobuf."""
_FEEDBACK_KEYS = ("seldon_api_model_feedback", "seldon_api_model_feedback_reward")
_NO_METRICS: list[Any] = []
_PREDICT, _ROUTE, _HEALTH = Endpoint.PREDICT, Endpoint.ROUTE, Endpoint.HEALTH
DEFAULT_NAMES = [[f"t:{number}" for number in range(count)] for count in range(65)]
"""The names of columns without names: the lists themselves, by the number of columns."""
_CACHED_COUNT, _MAX_COLUMNS = len(DEFAULT_NAMES), 1_000_000


class Component:
    """One user object. `recorded` has the metrics of the current call: [key, type, value, tags or None] each.

    Threads: one call at a time.
    """

    def __init__(self, user: Any, *, strict: bool = True) -> None:
        self.user = user
        self.strict = strict
        self.unit = os.environ.get("PREDICTIVE_UNIT_ID", "0")
        self.recorded: list[list[Any]] = []
        self.request_path = _request_path()
        self._returns_metrics = os.environ.get("INCLUDE_METRICS_IN_CLIENT_RESPONSE", "true").lower() == "true"
        self._counts_rewards = os.environ.get("SELDON_EXECUTOR_ENABLED", "true").lower() != "false"
        self._signatures: list[tuple[Any, bool | None]] = [(MISSING, None)] * len(Endpoint)
        self._warned_class_names = False
        self._loop: Any = None

    # -- whole calls -------------------------------------------------------------------------------------------

    def call_raw(self, endpoint: Endpoint, request: Any, proto: bool) -> Any:
        """Call the method that takes the raw request, if there is one; feedback is always `proto`.

        Returns: its result, for the client unchanged; NO_RESULT if there is no such method. Its metrics are recorded.
        """
        user = self.user
        for name in _LEGACY_NAMES[proto][endpoint]:
            legacy = getattr(user, name, MISSING)
            if legacy is not MISSING:
                return self.resolve(legacy(request))
        method = getattr(user, _RAW_NAMES[endpoint], MISSING)
        if method is MISSING or getattr(method, "__func__", None) in _BASE_METHODS:
            return NO_RESULT
        try:
            if endpoint is _HEALTH:
                return self.resolve(method())
            result = self.resolve(method(request))
            self._record_raw_metrics(endpoint, result, proto)
        except SeldonNotImplementedError:
            return NO_RESULT
        return result

    def call_method(self, endpoint: Endpoint, features: Any, names: Any, meta: Any) -> tuple[Any, Any, Any]:
        """Call predict, transform_input, transform_output or route.

        Returns: the payload, and the tags and metrics of a SeldonResponse. Raises: the exceptions of user code, and
        SeldonMicroserviceException.
        """
        method = getattr(self.user, _NAMES[endpoint], MISSING)
        if endpoint is _ROUTE:
            if method is MISSING:
                raise SeldonNotImplementedError("Route not defined")
            branch, tags, metrics = self.split(self._call_with_meta(endpoint, method, features, names, meta))
            if not self.strict and isinstance(branch, np.integer):
                branch = int(branch)  # the type of np.argmax's result
            if not isinstance(branch, int):
                raise SeldonMicroserviceException(ROUTE_TEXT + str(branch))
            return np.array([[branch]]), tags, metrics
        if method is not MISSING:
            try:
                return self.split(self._call_with_meta(endpoint, method, features, names, meta))
            except SeldonNotImplementedError:
                pass
        return [] if endpoint is _PREDICT else features, {}, []

    def aggregate(self, features: list[Any], names: list[Any]) -> tuple[Any, Any, Any]:
        """Call aggregate. Returns and raises: as `call_method`."""
        method = getattr(self.user, "aggregate", MISSING)
        if method is MISSING:
            raise SeldonNotImplementedError("Aggregate not defined")
        return self.split(method(features, names))

    def feedback(self, features: Any, names: Any, reward: float, truth: Any, routing: Any) -> tuple[Any, Any, Any]:
        """Call send_feedback. Returns: as `call_method`, with the payload None if it is not defined."""
        method = getattr(self.user, "send_feedback", MISSING)
        if method is not MISSING:
            try:
                return self.split(method(features, names, reward, truth, routing=routing))
            except SeldonNotImplementedError:
                pass
        return None, {}, []

    def health(self) -> Any:
        """Call health_status. Returns: the payload, without support for SeldonResponse."""
        method = getattr(self.user, "health_status", MISSING)
        if method is MISSING:
            return "healthy"
        try:
            return self.resolve(method())
        except SeldonNotImplementedError:
            return "not implemented - assuming healthy"

    def split(self, result: Any) -> tuple[Any, Any, Any]:
        """Split a method's result into the payload, and the tags and metrics of a SeldonResponse."""
        if not self.strict:
            result = self.resolve(result)
        if isinstance(result, SeldonResponse):
            return result.data, result.tags, result.metrics
        return result, {}, []

    def resolve(self, result: Any) -> Any:
        """Await a method's result, if it is awaitable and `strict` is off."""
        if self.strict or not inspect.isawaitable(result):
            return result
        if self._loop is None:
            import asyncio  # most components do not need it

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_await(result))

    def close(self) -> None:
        """Close the event loop on which results were awaited."""
        if self._loop is not None:
            self._loop.close()

    # -- after each call ---------------------------------------------------------------------------------------

    def metrics(self, endpoint: Endpoint, runtime: Any = _NO_METRICS) -> list[Any]:
        """Validate and record the metrics of a SeldonResponse, and the component's own.

        Returns: those shown to the client. Raises: SeldonMicroserviceException, and the exceptions of user code.
        """
        if type(runtime) is not list or runtime:
            self._record_valid(endpoint, runtime)
        answer_metrics: Any = list(runtime)
        method = getattr(self.user, "metrics", MISSING)
        if method is not MISSING and getattr(method, "__func__", None) not in _BASE_METHODS:
            try:
                own_metrics = self.resolve(method())
                self._record_valid(endpoint, own_metrics)
                answer_metrics = own_metrics + answer_metrics
            except SeldonNotImplementedError:
                pass
        return answer_metrics if self._returns_metrics else []

    def class_names(self, array: Any) -> Any:
        """Return the component's names for an array's columns; [] if it has no columns."""
        shape = array.shape
        if len(shape) < 2:
            return []
        names = getattr(self.user, "class_names", MISSING)
        if names is not MISSING and getattr(names, "__func__", None) not in _BASE_METHODS:
            if not inspect.ismethod(names):
                if not self._warned_class_names:
                    self._warned_class_names = True
                    logger.warning("class_names attribute is deprecated. Please define a class_names method")
                return names
            try:
                return names()
            except SeldonNotImplementedError:
                pass
        if shape[1] > _MAX_COLUMNS and not array.size:
            # a request of 20 bytes may have such a shape, and names for it would exhaust memory
            raise SeldonMicroserviceException(f"No values have no {shape[1]} columns")
        return DEFAULT_NAMES[shape[1]] if shape[1] < _CACHED_COUNT else [f"t:{each}" for each in range(shape[1])]

    def meta(self, meta: Any, metrics: list[Any], tags: Any) -> dict[str, Any]:
        """Return the meta of an answer, except its puid: tags, metrics and requestPath, without empty ones.

        `meta` is the request's; `metrics` and `tags` are the call's.
        """
        own_tags: Any = None
        method = getattr(self.user, "tags", MISSING)
        if method is not MISSING and getattr(method, "__func__", None) not in _BASE_METHODS:
            with contextlib.suppress(SeldonNotImplementedError):
                own_tags = self.resolve(method())
        if not (meta or own_tags or tags or metrics or self.request_path):
            return {}
        all_tags, all_metrics, path = {}, [], {}
        if meta:
            all_tags, all_metrics, path = meta.get("tags", {}), meta.get("metrics", []), meta.get("requestPath", {})
        if own_tags:
            all_tags.update(own_tags)
        if tags:
            all_tags.update(tags)
        if metrics:
            all_metrics.extend(metrics)
        path = {**self.request_path, **path}
        found = {"tags": all_tags, "metrics": all_metrics, "requestPath": path}
        return {name: value for name, value in found.items() if value}

    # -- metrics -----------------------------------------------------------------------------------------------

    def record(self, endpoint: Endpoint, metrics: Iterable[Any]) -> None:
        """Record metrics for Prometheus. As in the original, their tags get `method`, and all are recorded or none."""
        rows = []
        for metric in metrics:
            kind = metric.get("type", "COUNTER")
            tags = metric.get("tags", {})
            tags["method"] = endpoint.label
            "_".join("-".join(pair) for pair in sorted(tags.items()))  # the original's key: only str is accepted
            key, value = metric["key"], metric["value"]
            hash(key)
            if kind == "COUNTER":
                0 + value
            elif kind == "TIMER":
                value / 1000
            elif kind != "GAUGE":
                logger.error("Unknown metrics type: %s", kind)
                continue
            rows.append([key, kind, value, tags if "tags" in metric else None])
        self.recorded += rows

    def record_reward(self, reward: float) -> None:
        """Record the reward of a feedback."""
        if reward and self._counts_rewards:
            for key, value in zip(_FEEDBACK_KEYS, (1, reward), strict=True):
                self.recorded.append([key, "COUNTER", value, None])

    def _record_valid(self, endpoint: Endpoint, metrics: Any) -> None:
        if not are_valid(metrics):
            raise SeldonMicroserviceException(
                f"Bad metric created during request: {json.dumps(metrics)}",
                status_code=500,
                reason="MICROSERVICE_BAD_METRIC",
            )
        self.record(endpoint, metrics)

    def _record_raw_metrics(self, endpoint: Endpoint, result: Any, proto: bool) -> None:
        if proto:
            from google.protobuf import json_format

            metrics = json.loads(json_format.MessageToJson(result.meta)).get("metrics", [])
            if metrics and not self._returns_metrics:
                del result.meta.metrics[:]
        elif isinstance(result, dict):
            metrics = result.get("meta", {}).get("metrics", [])
            if metrics and not self._returns_metrics:
                del result["meta"]["metrics"]
        else:
            return
        self.record(endpoint, metrics)

    # -- passing meta ------------------------------------------------------------------------------------------

    def takes_meta(self, endpoint: Endpoint) -> bool:
        """Return whether a method may be passed `meta`."""
        method = getattr(self.user, _NAMES[endpoint], MISSING)
        return method is not MISSING and takes_meta(method) is not False

    def _call_with_meta(self, endpoint: Endpoint, method: Any, features: Any, names: Any, meta: Any) -> Any:
        function = getattr(method, "__func__", method)
        cached = self._signatures[endpoint]
        if cached[0] is not function:
            cached = self._signatures[endpoint] = (function, takes_meta(method))
        if cached[1] is UNSURE:
            try:
                return method(features, names, meta=meta)
            except TypeError as error:
                if not rejects_meta(error):
                    raise
            self._signatures[endpoint] = (function, False)
        elif cached[1]:
            return method(features, names, meta=meta)
        return method(features, names)


def merge_meta(metas: Iterable[Any]) -> dict[str, Any]:
    """Merge the meta of the requests of `aggregate` for its answer; the last wins."""
    tags: dict[str, Any] = {}
    path: dict[str, Any] = {}
    for meta in metas:
        if meta:
            tags.update(meta.get("tags", {}))
            path.update(meta.get("requestPath", {}))
    return {"tags": tags, "requestPath": path}


def merge_metrics(metas: Iterable[Any], metrics: list[Any]) -> list[Any]:
    """Return the metrics for the answer of `aggregate`: those of its requests, and its own."""
    found: list[Any] = []
    for meta in metas:
        if meta:
            found.extend(meta.get("metrics", []))
    found.extend(metrics)
    return found


def is_inherited(name: str, user: Any) -> bool:
    """Return whether a component inherits a method from SeldonComponent or lacks it."""
    method = getattr(user, name, MISSING)
    return method is MISSING or getattr(method, "__func__", None) in _BASE_METHODS


def _request_path() -> dict[str, str]:
    name = os.environ.get("PREDICTIVE_UNIT_ID", UNSET)
    return {} if name == UNSET else {name: os.environ.get("PREDICTIVE_UNIT_IMAGE", UNSET_IMAGE)}


async def _await(result: Any) -> Any:
    return await result


_BASE_METHODS = frozenset(
    each for name in (*_NAMES, "metrics", "tags", "class_names", *_RAW_NAMES)
    if (each := getattr(SeldonComponent, name, None)) is not None
)  # fmt: skip
"""The methods that SeldonComponent only declares: they are known not to be implemented."""
