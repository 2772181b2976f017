"""The bench: measures settings on the live server, with the load generator and all sampling."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.perf.profiling.control import Control, ControlError
from penstock.perf.profiling.measuring import INTERRUPTED, UNSTABLE, Generator, LoadListener, measure
from penstock.perf.profiling.model import ModelDescription
from penstock.perf.profiling.options import Range, Rule
from penstock.perf.profiling.sampling import Watch
from penstock.perf.profiling.session import Marks, load_of
from penstock.perf.reports import histograms
from penstock.perf.reports.document import Level

from .arguments import TuneOptions
from .capacity import Probe, find_capacity
from .duels import Measurement
from .knobs import ORIGINAL, Setting
from .search import SearchEndedError
from .served_model import RejectedSettingError, ServedModel, ServingError

WARM_UP_MS = 400
"""How long a load runs after a setting was loaded before measuring starts."""
MAX_FAILURE_RATE = 0.01
"""The fraction of failed requests from which a setting is rejected."""
MIN_REQUESTS = 300
MAX_MEASUREMENT_MS = 10_000
"""A measurement lasts until this many requests are expected, up to this time."""
_WINDOWS = 3
_MIN_THROUGHPUT_RATIO = 0.95
_MAX_CONCURRENCY = 64
_MIN_GROWTH = 1.05
_ANY_PERCENTAGE = 1e9
TIME_UP = "the time is up"


@dataclass(frozen=True, slots=True)
class BenchContext:
    """What a bench works with. `is_interrupted`: whether the user wants it to end; `end_s`: of the monotonic clock."""

    options: TuneOptions
    served: ServedModel
    control: Control
    model: ModelDescription
    fleet: Generator
    watch: Watch
    is_interrupted: Callable[[], bool]
    end_s: float


class LiveBench:
    """Measures settings. `levels`: all measurements of each, in order.

    Raises: SearchEndedError when the time is up or on Ctrl-C, even within a measurement; ServingError, ControlError,
    OSError, FleetError if the server or the generator fails.
    """

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self._options = context.options
        self._max_rate_per_s = 0.0
        self.concurrency = 1
        """The number of concurrent requests in a closed loop."""
        self.levels: dict[Setting, list[Level]] = {}

    def remaining_s(self) -> float:
        return self._context.end_s - time.monotonic()

    def find_concurrency(self) -> str:
        """Find how many concurrent requests suffice for the original configuration. Returns: a description.

        It is twice the number that reaches 95% of the maximum throughput, so that a setting that can serve more gets
        more.
        """
        tuning, rate = self._options, self._options.options.rate
        if not tuning.closed_loop and rate is not None:
            return ""
        max_concurrency = int((tuning.options.concurrency or Range()).end) if tuning.has_range else _MAX_CONCURRENCY
        start = int((tuning.options.concurrency or Range()).start) if tuning.has_range else 1
        if start >= max_concurrency:
            self.concurrency = start
            return ""
        throughputs: dict[int, float] = {}
        concurrency, rounds_without_growth = start, 0
        while concurrency <= max_concurrency and rounds_without_growth < 3:
            level = self._measure_level(ORIGINAL, float(concurrency), self._options.window_ms / 2, closed_loop=True)
            rounds_without_growth = (
                0
                if level.client.requests_per_s > _MIN_GROWTH * max(throughputs.values(), default=0.0)
                else rounds_without_growth + 1
            )
            throughputs[concurrency] = level.client.requests_per_s
            concurrency = (
                min(2 * concurrency, max_concurrency) if concurrency < max_concurrency else max_concurrency + 1
            )
        self._max_rate_per_s = max(throughputs.values())
        sufficient = min(
            each for each, per_s in throughputs.items() if per_s >= _MIN_THROUGHPUT_RATIO * self._max_rate_per_s
        )
        self.concurrency = min(2 * sufficient, max_concurrency)
        return f"{self._max_rate_per_s:,.0f} requests/s with {sufficient} under way"

    def screen(self, setting: Setting, reference: Measurement) -> Measurement:
        failure = self._apply_setting(setting, reference.load, reload=False)
        if isinstance(failure, Measurement):
            return failure
        level = self._measure_level(setting, reference.load, self._options.window_ms / 2)
        latency_us = self._latency_us(level)
        by_latency = self._options.target_ms is not None or not self._options.closed_loop
        score = (1e6 / latency_us if latency_us > 0 else 0.0) if by_latency else level.client.requests_per_s
        return self._to_measurement(level, score, reference.load)

    def measure(self, setting: Setting, similar: Measurement | None) -> Measurement:
        start = self._start_load(similar)
        failure = self._apply_setting(setting, start, reload=True)
        if isinstance(failure, Measurement):
            return failure
        if self._options.target_ms is not None:
            return self._measure_capacity(setting, start, self._options.target_ms * 1e3)
        level = self._measure_level(setting, start, self._options.window_ms)
        score = level.client.requests_per_s
        if not self._options.closed_loop:
            score = 1e6 / self._latency_us(level) if level.client.requests else 0.0
        return self._to_measurement(level, score, start)

    def _start_load(self, similar: Measurement | None) -> float:
        tuning = self._options
        if tuning.target_ms is not None and similar is not None and similar.load:
            return similar.load
        if tuning.closed_loop:
            return float(self.concurrency)
        return tuning.options.rate.start if tuning.options.rate is not None else max(self._max_rate_per_s / 2, 0.1)

    def _apply_setting(self, setting: Setting, load: float, *, reload: bool) -> Measurement | None:
        """Serve a setting and warm it up. Returns: the failed result if that is not possible."""
        self._raise_if_stopped()
        try:
            if reload or self._context.served.setting != setting:
                self._context.served.load(setting)
                self._run_load(
                    load, Rule(interval_ms=WARM_UP_MS, trials=1), LoadListener(), closed_loop=self._options.closed_loop
                )
        except RejectedSettingError as refused:
            if setting == ORIGINAL:
                raise ServingError(f"the configuration as it was is no longer taken: {refused}") from refused
            return Measurement(0.0, load, why=str(refused))
        return None

    def _measure_capacity(self, setting: Setting, start: float, target_us: float) -> Measurement:
        """Find the highest load within the target."""
        handled: list[tuple[float, Level]] = []
        levels: list[Level] = []

        def probe(load: float) -> Probe:
            level = self._measure_level(setting, load, self._options.window_ms / 2)
            levels.append(level)
            meets_target = self._meets_target(level, load, target_us)
            if meets_target:
                handled.append((load, level))
            return Probe(load, meets_target, self._latency_us(level))

        load = find_capacity(probe, start, self._load_bounds(start), target_us, integer=self._options.closed_loop)
        if not handled:
            missed = f"p{self._options.percentile} is over the target at {levels[-1].offered.value:,.4g} already"
            return self._to_measurement(levels[-1], 0.0, levels[-1].offered.value, missed)
        level = max(handled, key=lambda each: each[0])[1]
        return self._to_measurement(level, level.client.requests_per_s if self._options.closed_loop else load, load)

    def _load_bounds(self, start: float) -> tuple[float, float]:
        tuning = self._options
        requested_range = tuning.options.concurrency if tuning.closed_loop else tuning.options.rate
        if tuning.has_range and requested_range is not None and requested_range.end > requested_range.start:
            return requested_range.start, requested_range.end
        return (1.0, float(_MAX_CONCURRENCY)) if tuning.closed_loop else (start / 100, start * 100)

    def _meets_target(self, level: Level, load: float, target_us: float) -> bool:
        client = level.client
        failed = sum(client.errors.values())
        if not client.requests:
            return False
        share_in_target = (
            histograms.share_within(client.histogram, target_us) * client.requests / (client.requests + failed)
        )
        if share_in_target < self._options.percentile / 100:
            return False
        due = load * client.seconds
        return self._options.closed_loop or client.requests >= due * (
            _MIN_THROUGHPUT_RATIO - 3 / math.sqrt(max(due, 1.0))
        )

    def _to_measurement(self, level: Level, score: float, load: float, reason: str = "") -> Measurement:
        client, failed = level.client, sum(level.client.errors.values())
        memory = self._memory_bytes(level)
        budget = self._options.memory_bytes
        if failed > MAX_FAILURE_RATE * (client.requests + failed):
            reason = (
                f"{failed} of {client.requests + failed} requests failed: {max(client.errors, key=client.errors.get)}"  # type: ignore[arg-type]
            )
        elif not client.requests:
            reason = "no request was answered"
        elif budget is not None and memory is None:
            raise ServingError(f"--memory-budget: the server's memory is not known: {'; '.join(level.notes)}")
        elif budget is not None and memory is not None and memory > budget:
            reason = f"over the memory budget: {memory / 2**20:,.0f} MiB"
        latency_us = client.latency_us
        return Measurement(
            score=0.0 if reason else score,
            load=load,
            per_s=client.requests_per_s,
            p50_us=latency_us.get("p50", math.nan),
            p99_us=latency_us.get("p99", math.nan),
            memory_bytes=memory,
            why=reason,
        )

    def _memory_bytes(self, level: Level) -> float | None:
        """Return the server's resident memory, or, for a remote server, the memory that it reports for the model."""
        if level.server_rss_bytes is not None:
            return level.server_rss_bytes
        try:
            statistics = self._context.control.statistics(self._context.model.name)
        except ControlError:
            return None
        entries: list[dict[str, Any]] = [each for model in statistics for each in model.get("memory_usage") or []]
        return float(sum(int(each.get("byte_size") or 0) for each in entries)) if entries else None

    def _latency_us(self, level: Level) -> float:
        """Return the percentile that is optimized."""
        return level.client.latency_us.get(f"p{self._options.percentile}", math.inf)

    def _measure_level(
        self, setting: Setting, load: float, duration_ms: float, *, closed_loop: bool | None = None
    ) -> Level:
        """Measure one load."""
        closed_loop = self._options.closed_loop if closed_loop is None else closed_loop
        if not closed_loop:
            duration_ms = min(max(duration_ms, 1e3 * MIN_REQUESTS / load), max(MAX_MEASUREMENT_MS, duration_ms))
        marks = Marks(self._context.watch, self._should_stop)
        rule = Rule(
            interval_ms=max(int(duration_ms / _WINDOWS), 1),
            trials=_WINDOWS,
            percentage=_ANY_PERCENTAGE,
            percentile=self._options.percentile,
        )
        level = self._run_load(load, rule, marks, closed_loop=closed_loop)
        marks.record_in(level)
        self.levels.setdefault(setting, []).append(level)
        return level

    def _run_load(self, load: float, rule: Rule, listener: LoadListener, *, closed_loop: bool) -> Level:
        self._raise_if_stopped()
        options = self._options.options
        load_options = {"concurrency": Range(), "rate": None} if closed_loop else {"concurrency": None, "rate": Range()}
        load_order = load_of(replace(options, **load_options), load, sequences=self._context.model.sequences)  # type: ignore[arg-type]
        level = measure(self._context.fleet, load_order, rule, options.input.batch, listener)
        self._raise_if_stopped()
        if level.ended == INTERRUPTED:
            raise SearchEndedError(TIME_UP)
        if level.ended not in {"", UNSTABLE} and not self._context.control.ready():
            raise ServingError(level.ended)
        return level

    def _should_stop(self) -> bool:
        return self._context.is_interrupted() or self.remaining_s() <= 0

    def _raise_if_stopped(self) -> None:
        if self._should_stop():
            raise SearchEndedError("interrupted" if self._context.is_interrupted() else TIME_UP)
