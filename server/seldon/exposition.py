"""Exposition: the original's Prometheus series, from what workers report for each call. Made by dialect.py.

Source: seldon-core 1.17.1, metrics.py, and pages observed from it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from penstock.server.telemetry.exposition import label_value
from penstock.server.telemetry.families import FAMILIES

from .environ import UNSET, UNSET_IMAGE
from .messages import Endpoint

logger = logging.getLogger("penstock.seldon")

COUNTER, GAUGE, TIMER = "COUNTER", "GAUGE", "TIMER"
_KINDS = {COUNTER: "counter", GAUGE: "gauge", TIMER: "histogram"}
WORKER_ID = "0"
"""The value of `worker_id`: a component's copies are summed, whereas each process of the original had its own series.
"""
EDGES = (  # seconds: fifty points from 0.001 to 30 with a constant ratio, as the original wrote them
    0.001, 0.0012341553253454693, 0.0015231393670785815, 0.0018797905611233593, 0.0023199535315445415,
    0.002863183005509725, 0.0035336125536884733, 0.004361026750842238, 0.005382184388525997, 0.006642451525090608,
    0.008197816923039709, 0.010117379411776668, 0.012486417679584786, 0.015410178873747385, 0.019018554321561593,
    0.02347185009632733, 0.028967908792092944, 0.03575089889988335, 0.04412216226317852, 0.05445360152285871,
    0.06720420230367624, 0.0829404241586763, 0.10236136616184238, 0.12632982515827532, 0.15591062646904755,
    0.19241792993472334, 0.2374736129208902, 0.2930793240153456, 0.3617054084821892, 0.44640065608455204,
    0.5509277469444613, 0.6799304127720881, 0.8391397397870157, 1.035628778567157, 1.2781267721496807,
    1.5774069623151439, 1.9467652027782552, 2.402610642206036, 2.965194718810281, 3.65951085290597, 4.516404807273444,
    5.573945044312399, 6.879113959621136, 8.489895126924782, 10.477849282518772, 12.931293490187748,
    15.959224724520412, 19.696162182151948, 24.30812344597087, 29.999999999999996,
)  # fmt: skip
_EDGE_TEXTS = (*(repr(edge) for edge in EDGES), "+Inf")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_MAX_CACHED, _MAX_CACHED_BYTES = 4096, 4096
"""The limits of the cache of parsed metrics: the number of texts, and the bytes of one."""
_MAX_WARNINGS = 256
MAX_SERIES = 10_000
"""The limit for all components together. Labels may come from clients, and a series lasts as long as the server."""

Step = Callable[[float], None]
"""Adds a value to the series of one metric."""


def labels_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels common to all series of a component, from its variables."""
    *name, version = environ.get("PREDICTIVE_UNIT_IMAGE", UNSET_IMAGE).split(":")
    image, deployment = ":".join(name), environ.get("SELDON_DEPLOYMENT_ID", UNSET)
    return {
        "deployment_name": deployment,
        "model_name": environ.get("PREDICTIVE_UNIT_ID", UNSET),
        "model_image": image,
        "model_version": version,
        "predictor_name": environ.get("PREDICTOR_ID", UNSET),
        "predictor_version": _predictor_version(environ.get("PREDICTOR_LABELS", "{}")),
        "seldon_deployment_name": deployment,
        "image_name": image,
        "image_version": version,
        "worker_id": WORKER_ID,
    }


def _predictor_version(text: str) -> str:
    try:
        return str(json.loads(text).get("version", UNSET))
    except (ValueError, AttributeError):
        return UNSET


class ValueSeries:
    """The series of a counter, or of a gauge, which holds its last value."""

    __slots__ = ("_labels", "_sample", "value")

    def __init__(self, sample: str, labels: Mapping[str, str]) -> None:
        self._sample = sample
        self._labels = _format_labels(labels)
        self.value: float = 0.0

    def add(self, value: float) -> None:
        """Add to a counter."""
        self.value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self.value = value

    def lines(self) -> Iterator[str]:
        """Format the series."""
        yield f"{self._sample}{{{self._labels}}} {_format_number(self.value)}"


class TimerSeries:
    """The series of a timer: a histogram. Units: takes milliseconds, exposes seconds."""

    __slots__ = ("_counts", "_labels_after_le", "_labels_before_le", "_sample", "_sum")

    def __init__(self, sample: str, labels: Mapping[str, str]) -> None:
        self._sample = sample
        # labels are sorted by name, and there are always some before `le` and some after it
        self._labels_before_le = _format_labels({name: value for name, value in labels.items() if name < "le"})
        self._labels_after_le = _format_labels({name: value for name, value in labels.items() if name > "le"})
        self._counts = [0] * len(_EDGE_TEXTS)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Record a time. As in the original, a negative one or a NaN is added only to the sum."""
        seconds = value / 1000
        self._sum += seconds
        if seconds >= 0:
            self._counts[bisect_right(EDGES, seconds)] += 1

    def lines(self) -> Iterator[str]:
        """Format the series."""
        cumulative = 0
        before, after = self._labels_before_le, self._labels_after_le
        for edge, count in zip(_EDGE_TEXTS, self._counts, strict=True):
            cumulative += count
            yield f'{self._sample}_bucket{{{before},le="{edge}",{after}}} {_format_number(cumulative)}'
        labels = f"{{{before},{after}}}"
        yield f"{self._sample}_count{labels} {_format_number(cumulative)}"
        yield f"{self._sample}_sum{labels} {_format_number(self._sum)}"


class Exposition:
    """The custom metrics of all components of a server, on one page.

    Invariant: the page is valid whatever components report: a metric whose name, labels or value Prometheus would
    reject is left out, and logged once. Series of one name are adjacent. Threads: the event loop's.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._families: dict[str, tuple[str, dict[tuple[tuple[str, str], ...], ValueSeries | TimerSeries]]] = {}
        self._sample_owners: dict[str, str] = {family.name: "" for family in FAMILIES}
        self._warned: set[str] = set()
        self._series_count = 0
        self._ledgers: dict[str, Ledger] = {}
        self.label("", environ)

    def label(self, model: str, environ: Mapping[str, str]) -> None:
        """Set the labels for the series of a model's component from its variables; "" sets those of all others."""
        self._ledgers[model] = Ledger(self, labels_of(environ))

    def add(self, endpoint: Endpoint, metrics: bytes, model: str = "") -> None:
        """Add what one call reported: JSON, [[key, type, value, tags or null]]."""
        (self._ledgers.get(model) or self._ledgers[""]).add(endpoint, metrics)

    def render(self) -> Iterable[str]:
        """Return the lines for the metrics page."""
        for name, (kind, series) in self._families.items():
            yield f"# HELP {name} \n# TYPE {name} {kind}"
            for one in series.values():
                yield from one.lines()

    def series(self, kind: Any, key: Any, labels: Mapping[str, Any]) -> ValueSeries | TimerSeries:
        """Return a series, new if it is not there. Raises: ValueError, TypeError, which describe the problem."""
        if kind not in _KINDS:
            raise ValueError(f"the type {kind!r} is not one of {', '.join(_KINDS)}")
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ValueError("its key is not a valid Prometheus name")
        for label, value in labels.items():
            if not _LABEL.fullmatch(label) or label.startswith("__") or (label == "le" and kind == TIMER):
                raise ValueError(f"its tag {label!r} is not a valid Prometheus label")
            if not isinstance(value, str):
                raise TypeError(f"its tag {label!r} is not a string")
            value.encode()  # a lone surrogate raises
        exposed_name, samples = _exposed_names(kind, key)
        owner = f"{exposed_name} {_KINDS[kind]}"
        if any(self._sample_owners.get(sample, owner) != owner for sample in samples):
            raise ValueError("another metric already has this name")
        label_key = tuple(sorted(labels.items()))
        existing = self._families[exposed_name][1].get(label_key) if exposed_name in self._families else None
        if existing is not None:
            return existing
        if self._series_count >= MAX_SERIES:
            raise ValueError(f"there are {MAX_SERIES} series already")
        self._series_count += 1
        _, family = self._families.setdefault(exposed_name, (_KINDS[kind], {}))
        self._sample_owners.update(dict.fromkeys(samples, owner))
        created = family[label_key] = (
            TimerSeries(exposed_name, labels) if kind == TIMER else ValueSeries(exposed_name, labels)
        )
        return created

    def warn(self, key: Any, reason: object) -> None:
        """Log once that a metric is left out."""
        text = f"metric {str(key)[:200]!r} is left out: {reason}"
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            logger.warning("%s", text)


class Ledger:
    """Sums what the calls of one component report. Made by Exposition. Threads: the event loop's.

    The effect of each text is cached: a call takes 1 us for three metrics seen before, 6 us for new values.
    """

    def __init__(self, page: Exposition, labels: Mapping[str, str]) -> None:
        self._page = page
        self._labels = labels
        self._cached_steps: dict[tuple[int, bytes], list[tuple[Step, float]]] = {}
        self._steps: dict[tuple[Any, ...], Step] = {}

    def add(self, endpoint: Endpoint, metrics: bytes) -> None:
        """Add what one call reported: JSON, [[key, type, value, tags or null]]."""
        steps = self._cached_steps.get((endpoint, metrics))
        if steps is None:
            steps = self._parse(endpoint, metrics)
        for step, value in steps:
            step(value)

    def _parse(self, endpoint: Endpoint, metrics: bytes) -> list[tuple[Step, float]]:
        steps: list[tuple[Step, float]] = []
        for key, kind, value, tags in _parse_report(metrics):
            try:
                number = _checked_float(value)
                step_key = (endpoint, kind, key, tuple(tags.items()) if tags else None)
                step = self._steps.get(step_key)
                if step is None:
                    step = self._steps[step_key] = self._step(endpoint, kind, key, tags)
                steps.append((step, number))
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                self._page.warn(key, error)
        if len(metrics) <= _MAX_CACHED_BYTES:
            if len(self._cached_steps) >= _MAX_CACHED:
                self._cached_steps.clear()
            self._cached_steps[endpoint, metrics] = steps
        return steps

    def _step(self, endpoint: Endpoint, kind: Any, key: Any, tags: dict[str, Any] | None) -> Step:
        series = self._page.series(kind, key, {**(tags or {}), "method": endpoint.label, **self._labels})
        return series.set if kind == GAUGE and isinstance(series, ValueSeries) else series.add


def _parse_report(metrics: bytes) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Parse what a call reported. Python's json writes NaN and integers of any size, which orjson does not read."""
    try:
        report = orjson.loads(metrics)
    except ValueError:
        try:
            report = json.loads(metrics)
        except ValueError:
            report = None
    if not isinstance(report, list):
        logger.warning("the metrics reported by a component's worker cannot be parsed")
        return
    for one in report:
        if isinstance(one, list) and len(one) == 4:
            yield one[0], one[1], one[2], one[3]


def _checked_float(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("its value is not a number")
    return float(value)


def _exposed_names(kind: str, key: str) -> tuple[str, tuple[str, ...]]:
    """Return a metric's exposed name, and the names of its samples."""
    if kind == COUNTER:
        name = key if key.endswith("_total") else f"{key}_total"
        return name, (name,)
    if kind == GAUGE:
        return key, (key,)
    return key, (key, f"{key}_bucket", f"{key}_count", f"{key}_sum")


def _format_labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{label_value(value)}"' for name, value in sorted(labels.items()))


def _format_number(value: float) -> str:
    """Format a number for Prometheus."""
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
