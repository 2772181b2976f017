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
WORKER = "0"
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
_KNOWN_MOST, _KNOWN_BYTES = 4096, 4096
"""The limits of the cache of parsed metrics: the number of texts, and the bytes of one."""
_WARNED_MOST = 256
MOST_SERIES = 10_000
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
        "worker_id": WORKER,
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
        self._labels = _written(labels)
        self.value: float = 0.0

    def add(self, value: float) -> None:
        """Add to a counter."""
        self.value += value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self.value = value

    def lines(self) -> Iterator[str]:
        """Format the series."""
        yield f"{self._sample}{{{self._labels}}} {_number(self.value)}"


class TimerSeries:
    """The series of a timer: a histogram. Units: takes milliseconds, exposes seconds."""

    __slots__ = ("_after", "_before", "_counts", "_sample", "_sum")

    def __init__(self, sample: str, labels: Mapping[str, str]) -> None:
        self._sample = sample
        # labels are sorted by name, and there are always some before `le` and some after it
        self._before = _written({name: value for name, value in labels.items() if name < "le"})
        self._after = _written({name: value for name, value in labels.items() if name > "le"})
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
        below = 0
        for edge, count in zip(_EDGE_TEXTS, self._counts, strict=True):
            below += count
            yield f'{self._sample}_bucket{{{self._before},le="{edge}",{self._after}}} {_number(below)}'
        labels = f"{{{self._before},{self._after}}}"
        yield f"{self._sample}_count{labels} {_number(below)}"
        yield f"{self._sample}_sum{labels} {_number(self._sum)}"


class Exposition:
    """The custom metrics of all components of a server, on one page.

    Invariant: the page is valid whatever components report: a metric whose name, labels or value Prometheus would
    reject is left out, and logged once. Series of one name are adjacent. Threads: the event loop's.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._families: dict[str, tuple[str, dict[tuple[tuple[str, str], ...], ValueSeries | TimerSeries]]] = {}
        self._taken: dict[str, str] = {family.name: "" for family in FAMILIES}
        self._warned: set[str] = set()
        self._count = 0
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
            for each in series.values():
                yield from each.lines()

    def series(self, kind: Any, key: Any, labels: Mapping[str, Any]) -> ValueSeries | TimerSeries:
        """Return a series, new if it is not there. Raises: ValueError, TypeError, which describe the problem."""
        if kind not in _KINDS:
            raise ValueError(f"the type {kind!r} is none of {', '.join(_KINDS)}")
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise ValueError("its key is no name that Prometheus takes")
        for label, value in labels.items():
            if not _LABEL.fullmatch(label) or label.startswith("__") or (label == "le" and kind == TIMER):
                raise ValueError(f"its tag {label!r} is no label that Prometheus takes")
            if not isinstance(value, str):
                raise TypeError(f"its tag {label!r} is no text")
            value.encode()  # a lone surrogate raises
        shown, samples = _names(kind, key)
        word = f"{shown} {_KINDS[kind]}"
        if any(self._taken.get(sample, word) != word for sample in samples):
            raise ValueError("another metric has its name")
        place = tuple(sorted(labels.items()))
        known = self._families[shown][1].get(place) if shown in self._families else None
        if known is not None:
            return known
        if self._count >= MOST_SERIES:
            raise ValueError(f"there are {MOST_SERIES} series already")
        self._count += 1
        _, found = self._families.setdefault(shown, (_KINDS[kind], {}))
        self._taken.update(dict.fromkeys(samples, word))
        made = found[place] = TimerSeries(shown, labels) if kind == TIMER else ValueSeries(shown, labels)
        return made

    def warn(self, key: Any, why: object) -> None:
        """Log once that a metric is left out."""
        text = f"metric {str(key)[:200]!r} is left out: {why}"
        if text not in self._warned and len(self._warned) < _WARNED_MOST:
            self._warned.add(text)
            logger.warning("%s", text)


class Ledger:
    """Sums what the calls of one component report. Made by Exposition. Threads: the event loop's.

    The effect of each text is cached: a call takes 1 us for three metrics seen before, 6 us for new values.
    """

    def __init__(self, page: Exposition, labels: Mapping[str, str]) -> None:
        self._page = page
        self._labels = labels
        self._known: dict[tuple[int, bytes], list[tuple[Step, float]]] = {}
        self._steps: dict[tuple[Any, ...], Step] = {}

    def add(self, endpoint: Endpoint, metrics: bytes) -> None:
        """Add what one call reported: JSON, [[key, type, value, tags or null]]."""
        steps = self._known.get((endpoint, metrics))
        if steps is None:
            steps = self._read(endpoint, metrics)
        for step, value in steps:
            step(value)

    def _read(self, endpoint: Endpoint, metrics: bytes) -> list[tuple[Step, float]]:
        steps: list[tuple[Step, float]] = []
        for key, kind, value, tags in _said(metrics):
            try:
                number = _float(value)
                place = (endpoint, kind, key, tuple(tags.items()) if tags else None)
                step = self._steps.get(place)
                if step is None:
                    step = self._steps[place] = self._step(endpoint, kind, key, tags)
                steps.append((step, number))
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                self._page.warn(key, error)
        if len(metrics) <= _KNOWN_BYTES:
            if len(self._known) >= _KNOWN_MOST:
                self._known.clear()
            self._known[endpoint, metrics] = steps
        return steps

    def _step(self, endpoint: Endpoint, kind: Any, key: Any, tags: dict[str, Any] | None) -> Step:
        series = self._page.series(kind, key, {**(tags or {}), "method": endpoint.label, **self._labels})
        return series.set if kind == GAUGE and isinstance(series, ValueSeries) else series.add


def _said(metrics: bytes) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Parse what a call reported. Python's json writes NaN and integers of any size, which orjson does not read."""
    try:
        read = orjson.loads(metrics)
    except ValueError:
        try:
            read = json.loads(metrics)
        except ValueError:
            read = None
    if not isinstance(read, list):
        logger.warning("what a component's worker says of its metrics cannot be read")
        return
    for each in read:
        if isinstance(each, list) and len(each) == 4:
            yield each[0], each[1], each[2], each[3]


def _float(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("its value is no number")
    return float(value)


def _names(kind: str, key: str) -> tuple[str, tuple[str, ...]]:
    """Return a metric's exposed name, and the names of its samples."""
    if kind == COUNTER:
        name = key if key.endswith("_total") else f"{key}_total"
        return name, (name,)
    if kind == GAUGE:
        return key, (key,)
    return key, (key, f"{key}_bucket", f"{key}_count", f"{key}_sum")


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{label_value(value)}"' for name, value in sorted(labels.items()))


def _number(value: float) -> str:
    """Format a number for Prometheus."""
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
