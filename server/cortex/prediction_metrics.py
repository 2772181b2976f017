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

MAX_CLASSES = 1000
"""The limit for one API. Any further names, which a wrong tracker may take from requests, are counted together."""
OTHERS = "(others)"
LATENCY_BOUNDS_NS = tuple(
    milliseconds * 1_000_000 for milliseconds in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
)
_LATENCY_BOUNDS_MS = tuple(decimal(bound, 6) for bound in LATENCY_BOUNDS_NS)
_WARNING_INTERVAL_NS = 1_000_000_000
_FAMILY_HEADERS = {
    family.name: f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}" for family in FAMILIES
}
_STATUS_CLASSES = ("1XX", "2XX", "3XX", "4XX", "5XX")

logger = logging.getLogger("penstock.cortex")


class ApiMetrics:
    """The counts of one API. Threads: the event loop's. Units: `latency_sum_ns` is a sum."""

    def __init__(self, api: Api) -> None:
        names = (("AppName", api.deployment), ("APIName", api.name), ("APIID", api_id(api)))
        self.labels = ",".join(f'{name}="{label_value(value)}"' for name, value in names)
        self.kind = api.tracker.model_type if api.tracker else ""
        self.status_counts = [0] * len(_STATUS_CLASSES)
        self.latency_counts = [0] * (len(_LATENCY_BOUNDS_MS) + 1)
        self.latency_sum_ns = 0
        self.class_counts: dict[str, int] = {}
        self.values = 0
        self.value_sum = 0.0
        self.min_value = float("inf")
        self.max_value = float("-inf")
        self._warned_ns = -_WARNING_INTERVAL_NS

    def record(self, status: int, latency_ns: int) -> None:
        """Count one answer."""
        self.status_counts[status // 100 - 1] += 1
        self.latency_counts[bisect_left(LATENCY_BOUNDS_NS, latency_ns)] += 1
        self.latency_sum_ns += latency_ns

    def record_prediction(self, line: bytes) -> None:
        """Count what the Conversions report for a prediction (conversions.py): a line of JSON."""
        prediction = _parse_line(line)
        if "class" in prediction:
            name = str(prediction["class"])
            if name not in self.class_counts and len(self.class_counts) >= MAX_CLASSES:
                name = OTHERS
            self.class_counts[name] = self.class_counts.get(name, 0) + 1
        elif "value" in prediction:
            value = float(prediction["value"])
            self.values += 1
            self.value_sum += value
            # in this order of arguments, NaN changes neither
            self.min_value = min(self.min_value, value)
            self.max_value = max(self.max_value, value)
        elif "warning" in prediction:
            self._log_warning(str(prediction["warning"]))

    def _log_warning(self, text: str) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._warned_ns >= _WARNING_INTERVAL_NS:
            self._warned_ns = now_ns
            logger.warning("unable to record prediction metric: %s", text)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the page, each with its family."""
        for series, count in zip(_STATUS_CLASSES, self.status_counts, strict=True):
            if count:
                yield "cortex_status_code_total", f'cortex_status_code_total{{{self.labels},Code="{series}"}} {count}'
        name = "cortex_latency_ms"
        for line in histogram_lines(
            name, self.labels, _LATENCY_BOUNDS_MS, self.latency_counts, decimal(self.latency_sum_ns, 6)
        ):
            yield name, line
        for each, count in self.class_counts.items():
            name = "cortex_prediction_total"
            yield name, f'{name}{{{self.labels},Class="{label_value(each)}"}} {count}'
        if self.kind == "regression":
            yield from self._value_lines()

    def _value_lines(self) -> Iterator[tuple[str, str]]:
        name = "cortex_prediction_value"
        yield name, f"{name}_sum{{{self.labels}}} {number(self.value_sum)}"
        yield name, f"{name}_count{{{self.labels}}} {self.values}"
        if self.min_value <= self.max_value:
            yield f"{name}_min", f"{name}_min{{{self.labels}}} {number(self.min_value)}"
            yield f"{name}_max", f"{name}_max{{{self.labels}}} {number(self.max_value)}"


class PredictionMetrics:
    """All APIs of one server."""

    def __init__(self) -> None:
        self._apis: dict[str, ApiMetrics] = {}

    def for_api(self, api: Api) -> ApiMetrics:
        """Return the metrics of an API; one that has changed starts over under its new id."""
        metrics = self._apis.get(api_id(api))
        if metrics is None:
            metrics = self._apis[api_id(api)] = ApiMetrics(api)
        return metrics

    def render(self) -> Iterator[str]:
        """Yield the lines of the page."""
        families: dict[str, list[str]] = {}
        for api in self._apis.values():
            for family, line in api.lines():
                families.setdefault(family, []).append(line)
        for family, lines in families.items():
            yield _FAMILY_HEADERS[family]
            yield from lines


def api_id(api: Api) -> str:
    """Return the id of an API, as the dimension in Cortex: it changes with the configuration."""
    fields: Mapping[str, Any] = asdict(api) | {"project": api.project.name, "line": 0, "lines": {}}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        prediction: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:  # NaN, infinities, lone surrogates
        prediction = json.loads(line)
    return prediction
