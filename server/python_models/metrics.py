"""Custom metrics: those of models that are user code, on the metrics page. Written by upcalls.py."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.server.telemetry.exposition import label_value, number
from penstock.server.telemetry.families import FAMILIES

from .messages import LABEL_NAME, METRIC_NAME

logger = logging.getLogger("penstock.python_models")
MOST_METRICS = 10_000
"""The limit per family: a model that makes labels from its requests may make any number."""
_KINDS = frozenset(("counter", "gauge", "histogram"))
_NOT_FINITE = frozenset(("nan", "inf", "-inf"))
_OURS = frozenset(family.name for family in FAMILIES)
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

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text
        self.owners: set[object] = set()
        self.metrics: dict[Labels, _Metric] = {}


class CustomMetrics:
    """All custom metrics of a server. The values from several workers are added. Threads: the event loop's."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def take(self, owner: object, said: Mapping[str, Any]) -> None:
        """Apply a worker's METRIC message. One that conflicts with the other metrics is logged and ignored.

        Raises: ValueError, TypeError or LookupError for one that would break the page; only a faulty worker sends such.
        """
        _check(said)
        name, do = said["family"], said["do"]
        if name in _OURS:
            logger.warning("metric family '%s' is the server's own: a model's is left out", name)
            return
        family = self._families.get(name)
        if do == "drop family":
            self._drop(name, owner)
            return
        if family is None:
            family = self._families[name] = _Family(said["kind"], said["help"])
        if family.kind != said["kind"]:
            logger.warning("metric family '%s' is a %s: a %s is left out", name, family.kind, said["kind"])
            return
        family.owners.add(owner)
        metric = self._metric(family, said)
        if metric is not None:
            _apply(metric, do, float(said["value"]))

    def forget(self, owner: object) -> None:
        """Drop a worker that has ended."""
        for name in list(self._families):
            self._drop(name, owner)

    def render(self) -> Iterator[str]:
        """Yield the lines of the page."""
        for name, family in sorted(self._families.items()):
            if not family.metrics:
                continue
            text = family.text.replace("\\", "\\\\").replace("\n", "\\n")
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} {family.kind}"
            for labels, metric in family.metrics.items():
                yield from _lines(name, family.kind, labels, metric)

    def _drop(self, name: str, owner: object) -> None:
        family = self._families.get(name)
        if family is not None:
            family.owners.discard(owner)
            if not family.owners:
                del self._families[name]

    @staticmethod
    def _metric(family: _Family, said: Mapping[str, Any]) -> _Metric | None:
        labels = tuple(sorted(said["labels"].items()))
        metric = family.metrics.get(labels)
        if metric is None and len(family.metrics) < MOST_METRICS:
            metric = family.metrics[labels] = _Metric(said["buckets"])
        return metric


def _check(said: Mapping[str, Any]) -> None:
    labels = said["labels"]
    names = METRIC_NAME.match(said["family"]) and all(map(LABEL_NAME.match, labels))
    texts = isinstance(said["help"], str) and all(isinstance(each, str) for each in labels.values())
    value = said["value"]
    numbers = all(isinstance(each, int | float) for each in said["buckets"])
    numbers = numbers and (isinstance(value, int | float) or value in _NOT_FINITE)
    if not names or not texts or not numbers or said["kind"] not in _KINDS:
        raise ValueError(f"no metric is {said['family']!r}")


def _apply(metric: _Metric, do: str, value: float) -> None:
    if do == "increment":
        metric.value += value
    elif do == "set":
        metric.value = value
    elif do == "observe":
        metric.value += value
        metric.counts[-1 if math.isnan(value) else bisect_left(metric.buckets, value)] += 1


def _lines(name: str, kind: str, labels: Labels, metric: _Metric) -> Iterator[str]:
    written = ",".join(f'{key}="{label_value(value)}"' for key, value in labels)
    if kind != "histogram":
        yield f"{name}{{{written}}} {number(metric.value)}" if written else f"{name} {number(metric.value)}"
        return
    below, comma = 0, "," if written else ""
    for bound, count in zip((*map(number, metric.buckets), "+Inf"), metric.counts, strict=True):
        below += count
        yield f'{name}_bucket{{{written}{comma}le="{bound}"}} {below}'
    braces = f"{{{written}}}" if written else ""
    yield f"{name}_sum{braces} {number(metric.value)}"
    yield f"{name}_count{braces} {below}"
