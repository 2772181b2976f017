"""PredictionMetrics: what Cortex reported to CloudWatch about predictions, on the metrics page: status, latency, value.

Counted by `service.py`, once for each POST to a prediction's path; rendered on the metrics page.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from penstock.server.telemetry.exposition import decimal, histogram_lines, label_value, number
from penstock.server.telemetry.families import FAMILIES

from .api import Api

MOST_CLASSES = 1000
"""The limit for one API. Any further names, which a wrong tracker may take from requests, are counted together."""
OTHERS = "(others)"
LATENCY_BOUNDS_NS = tuple(
    milliseconds * 1_000_000 for milliseconds in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
)
_EDGES = tuple(decimal(bound, 6) for bound in LATENCY_BOUNDS_NS)
_WARN_NS = 1_000_000_000
_HEADS = {family.name: f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}" for family in FAMILIES}
_SERIES = ("1XX", "2XX", "3XX", "4XX", "5XX")

logger = logging.getLogger("penstock.cortex")


class TrackedApi:
    """The counts of one API. Threads: the event loop's. Units: `latency_ns` is a sum."""

    def __init__(self, api: Api) -> None:
        names = (("AppName", api.deployment), ("APIName", api.name), ("APIID", identity(api)))
        self.labels = ",".join(f'{name}="{label_value(value)}"' for name, value in names)
        self.kind = api.tracker.model_type if api.tracker else ""
        self.statuses = [0] * len(_SERIES)
        self.latencies = [0] * (len(_EDGES) + 1)
        self.latency_ns = 0
        self.classes: dict[str, int] = {}
        self.values = 0
        self.sum = 0.0
        self.least = float("inf")
        self.most = float("-inf")
        self._warned_ns = -_WARN_NS

    def count(self, status: int, latency_ns: int) -> None:
        """Count one answer."""
        self.statuses[status // 100 - 1] += 1
        self.latencies[bisect_left(LATENCY_BOUNDS_NS, latency_ns)] += 1
        self.latency_ns += latency_ns

    def track(self, line: bytes) -> None:
        """Count what the Conversions report for a prediction (conversions.py): a line of JSON."""
        said = _read(line)
        if "class" in said:
            name = str(said["class"])
            if name not in self.classes and len(self.classes) >= MOST_CLASSES:
                name = OTHERS
            self.classes[name] = self.classes.get(name, 0) + 1
        elif "value" in said:
            value = float(said["value"])
            self.values += 1
            self.sum += value
            # in this order of arguments, NaN changes neither
            self.least = min(self.least, value)
            self.most = max(self.most, value)
        elif "warning" in said:
            self._warn(str(said["warning"]))

    def _warn(self, text: str) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._warned_ns >= _WARN_NS:
            self._warned_ns = now_ns
            logger.warning("unable to record prediction metric: %s", text)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the page, each with its family."""
        for series, count in zip(_SERIES, self.statuses, strict=True):
            if count:
                yield "cortex_status_code_total", f'cortex_status_code_total{{{self.labels},Code="{series}"}} {count}'
        name = "cortex_latency_ms"
        for line in histogram_lines(name, self.labels, _EDGES, self.latencies, decimal(self.latency_ns, 6)):
            yield name, line
        for each, count in self.classes.items():
            name = "cortex_prediction_total"
            yield name, f'{name}{{{self.labels},Class="{label_value(each)}"}} {count}'
        if self.kind == "regression":
            yield from self._values()

    def _values(self) -> Iterator[tuple[str, str]]:
        name = "cortex_prediction_value"
        yield name, f"{name}_sum{{{self.labels}}} {number(self.sum)}"
        yield name, f"{name}_count{{{self.labels}}} {self.values}"
        if self.least <= self.most:
            yield f"{name}_min", f"{name}_min{{{self.labels}}} {number(self.least)}"
            yield f"{name}_max", f"{name}_max{{{self.labels}}} {number(self.most)}"


class PredictionMetrics:
    """All APIs of one server."""

    def __init__(self) -> None:
        self._apis: dict[str, TrackedApi] = {}

    def of(self, api: Api) -> TrackedApi:
        """Return the counts of an API; one that has changed starts over under its new id."""
        found = self._apis.get(identity(api))
        if found is None:
            found = self._apis[identity(api)] = TrackedApi(api)
        return found

    def render(self) -> Iterator[str]:
        """Yield the lines of the page."""
        families: dict[str, list[str]] = {}
        for api in self._apis.values():
            for family, line in api.lines():
                families.setdefault(family, []).append(line)
        for family, lines in families.items():
            yield _HEADS[family]
            yield from lines


def identity(api: Api) -> str:
    """Return the id of an API, as the dimension in Cortex: it changes with the configuration."""
    said: Mapping[str, Any] = asdict(api) | {"project": api.project.name, "line": 0, "lines": {}}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(line: bytes) -> dict[str, Any]:
    try:
        said: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, infinities, lone surrogates
        said = json.loads(line)
    return said
