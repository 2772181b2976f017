"""Custom metrics: creation, validation, counting. Source: seldon-core 1.17.1.

A component creates them, and the server counts them. SeldonMetrics counts without a server, in users' own tests.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

FEEDBACK_KEY = "seldon_api_model_feedback"
FEEDBACK_REWARD_KEY = "seldon_api_model_feedback_reward"
COUNTER, GAUGE, TIMER = "COUNTER", "GAUGE", "TIMER"
FEEDBACK_METRIC_METHOD_TAG = "feedback"
PREDICT_METRIC_METHOD_TAG = "predict"
INPUT_TRANSFORM_METRIC_METHOD_TAG = "inputtransform"
OUTPUT_TRANSFORM_METRIC_METHOD_TAG = "outputtransform"
ROUTER_METRIC_METHOD_TAG = "router"
AGGREGATE_METRIC_METHOD_TAG = "aggregate"
HEALTH_METRIC_METHOD_TAG = "health"


def split_image_tag(tag: str) -> tuple[str, str]:
    """Return an image's name, and its version: the text after the last colon."""
    name, _, version = tag.rpartition(":")
    return name, version


def create_counter(key: str, value: float) -> dict[str, Any]:
    """Make a metric that is summed. Raises: TypeError for a value that is not a number."""
    return _metric(key, COUNTER, value)


def create_gauge(key: str, value: float) -> dict[str, Any]:
    """Make a metric that is set. Raises: TypeError for a value that is not a number."""
    return _metric(key, GAUGE, value)


def create_timer(key: str, value: float) -> dict[str, Any]:
    """Make a metric of a duration. Units: milliseconds. Raises: TypeError for a value that is not a number."""
    return _metric(key, TIMER, value)


def _metric(key: str, kind: str, value: float) -> dict[str, Any]:
    value + 1  # raises if it is no number
    return {"key": key, "type": kind, "value": value}


def validate_metrics(metrics: Any) -> bool:
    """Return whether these are metrics, each with a key, a type and a number."""
    from penstock.server.seldon.inside.metrics import are_valid

    return are_valid(metrics)


class SeldonMetrics:
    """Metrics of one process, aggregated for a page that Prometheus reads.

    `data` has the value and tags of each metric, by worker, and by the metric's type, key and tags. A timer's value is
    the count in each of BINS, and the sum in seconds.
    """

    def __init__(
        self, worker_id_func: Callable[[], Any] = os.getpid, extra_default_labels: dict[str, str] | None = None
    ) -> None:
        self.worker_id_func = worker_id_func
        self.data: dict[Any, dict[tuple[str, str, str], dict[str, Any]]] = {}
        self._extra = extra_default_labels or {}
        self.clear()

    def update_reward(self, reward: float) -> None:
        """Count feedback with a reward."""
        if reward:
            made = [create_counter(FEEDBACK_KEY, 1), create_counter(FEEDBACK_REWARD_KEY, reward)]
            self.update(made, FEEDBACK_METRIC_METHOD_TAG)

    def update(self, custom_metrics: list[dict[str, Any]], method: str) -> None:
        """Count one call's metrics. Like the original, write `method` into the tags of those that have tags."""
        from penstock.server.seldon.exposition import labels_of

        worker = self.worker_id_func()
        counted = self.data.setdefault(worker, {})
        labels = {**labels_of(os.environ), **self._extra, "worker_id": str(worker)}
        for metric in custom_metrics:
            tags = metric.get("tags", {})
            tags["method"] = method
            kind, key, value = metric.get("type", COUNTER), metric["key"], metric["value"]
            place = kind, key, "_".join("-".join(pair) for pair in sorted(tags.items()))
            counted[place] = {"value": _added(kind, counted.get(place), value), "tags": tags}
            series = self._page.series(kind, key, {**tags, **labels})
            (series.set if kind == GAUGE else series.add)(value)

    def generate_metrics(self) -> tuple[str, str]:
        """Return the page and its content type."""
        return "\n".join((*self._page.render(), "")), "text/plain; version=0.0.4; charset=utf-8"

    def clear(self) -> None:
        """Drop all counts."""
        from penstock.server.seldon.exposition import Exposition

        self.data.clear()
        self._page: Any = Exposition()


def _added(kind: str, before: dict[str, Any] | None, value: Any) -> Any:
    """Return a metric's new value."""
    if kind == GAUGE:
        return value
    if kind == COUNTER:
        return (before["value"] if before else 0) + value
    from penstock.server.seldon.exposition import EDGES

    counts, total = before["value"] if before else ([0.0] * (len(EDGES) + 1), 0)
    seconds = value / 1000
    counts = list(counts)
    if seconds >= 0:
        counts[bisect_right(EDGES, seconds)] += 1
    return counts, total + seconds


def __getattr__(name: str) -> Any:
    if name not in {"BINS", "DEFAULT_LABELS"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.server.seldon.exposition import EDGES, labels_of

    if name == "BINS":
        return [0, *EDGES, float("inf")]
    return {label: value for label, value in labels_of(os.environ).items() if label != "worker_id"}
