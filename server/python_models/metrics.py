"""Custom metrics: those of models that are user code, on the metrics page. Written by upcalls.py."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.server.telemetry.exposition import histogram_lines, label_value, number
from penstock.server.telemetry.families import FAMILIES

from .messages import LABEL_NAME, METRIC_NAME

logger = logging.getLogger("penstock.python_models")
MAX_METRICS = 10_000
"""The limit per family: a model that makes labels from its requests may make any number."""
_KINDS = frozenset(("counter", "gauge", "histogram"))
_NOT_FINITE = frozenset(("nan", "inf", "-inf"))
_BUILT_IN = frozenset(family.name for family in FAMILIES)
Labels = tuple[tuple[str, str], ...]


class _Metric:
    """One metric. `counts` has one entry per bucket, and one for values above them all."""

    __slots__ = ("buckets", "counts", "value")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.value = 0.0
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(buckets) + 1)


class _Family:
    """The metrics of one name. `owners` are the workers that created it; it is deleted with the last of them."""

    def __init__(self, kind: str, help_text: str) -> None:
        self.kind = kind
        self.help_text = help_text
        self.owners: set[object] = set()
        self.metrics: dict[Labels, _Metric] = {}


class CustomMetrics:
    """All custom metrics of a server. The values from several workers are added. Threads: the event loop's."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def apply(self, owner: object, message: Mapping[str, Any]) -> None:
        """Apply a worker's METRIC message. One that conflicts with the other metrics is logged and ignored.

        Raises: ValueError, TypeError or LookupError for one that would break the page; only a faulty worker sends such.
        """
        _validate(message)
        name, operation = message["family"], message["do"]
        if name in _BUILT_IN:
            logger.warning("metric family '%s' is the server's own: a model's family of that name is ignored", name)
            return
        family = self._families.get(name)
        if operation == "drop family":
            self._drop_owner(name, owner)
            return
        if family is None:
            family = self._families[name] = _Family(message["kind"], message["help"])
        if family.kind != message["kind"]:
            logger.warning(
                "metric family '%s' is a %s: a %s of that name is ignored", name, family.kind, message["kind"]
            )
            return
        family.owners.add(owner)
        metric = self._find_or_add(family, message)
        if metric is not None:
            _apply(metric, operation, float(message["value"]))

    def remove_owner(self, owner: object) -> None:
        """Drop a worker that has ended."""
        for name in list(self._families):
            self._drop_owner(name, owner)

    def render(self) -> Iterator[str]:
        """Yield the lines of the page."""
        for name, family in sorted(self._families.items()):
            if not family.metrics:
                continue
            escaped = family.help_text.replace("\\", "\\\\").replace("\n", "\\n")
            yield f"# HELP {name} {escaped}"
            yield f"# TYPE {name} {family.kind}"
            for labels, metric in family.metrics.items():
                yield from _render_metric(name, family.kind, labels, metric)

    def _drop_owner(self, name: str, owner: object) -> None:
        family = self._families.get(name)
        if family is not None:
            family.owners.discard(owner)
            if not family.owners:
                del self._families[name]

    @staticmethod
    def _find_or_add(family: _Family, message: Mapping[str, Any]) -> _Metric | None:
        labels = tuple(sorted(message["labels"].items()))
        metric = family.metrics.get(labels)
        if metric is None and len(family.metrics) < MAX_METRICS:
            metric = family.metrics[labels] = _Metric(message["buckets"])
        return metric


def _validate(message: Mapping[str, Any]) -> None:
    labels = message["labels"]
    names = METRIC_NAME.match(message["family"]) and all(map(LABEL_NAME.match, labels))
    texts = isinstance(message["help"], str) and all(isinstance(each, str) for each in labels.values())
    value = message["value"]
    numbers = all(isinstance(each, int | float) for each in message["buckets"])
    numbers = numbers and (isinstance(value, int | float) or value in _NOT_FINITE)
    if not names or not texts or not numbers or message["kind"] not in _KINDS:
        raise ValueError(f"invalid metric {message['family']!r}")


def _apply(metric: _Metric, operation: str, value: float) -> None:
    if operation == "increment":
        metric.value += value
    elif operation == "set":
        metric.value = value
    elif operation == "observe":
        metric.value += value
        metric.counts[-1 if math.isnan(value) else bisect_left(metric.buckets, value)] += 1


def _render_metric(name: str, kind: str, labels: Labels, metric: _Metric) -> Iterator[str]:
    label_text = ",".join(f'{key}="{label_value(value)}"' for key, value in labels)
    if kind != "histogram":
        yield f"{name}{{{label_text}}} {number(metric.value)}" if label_text else f"{name} {number(metric.value)}"
        return
    edges = [*map(number, metric.buckets)]
    yield from histogram_lines(name, label_text, edges, metric.counts, number(metric.value))
