"""The bench: measures settings on the live server, with the load generator and all sampling."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.perf.profiling.control import Control, ControlError
from penstock.perf.profiling.measuring import INTERRUPTED, UNSTABLE, Generator, Watching, measure
from penstock.perf.profiling.model import Described
from penstock.perf.profiling.options import Range, Rule
from penstock.perf.profiling.sampling import Watch
from penstock.perf.profiling.session import Marks, load_of
from penstock.perf.reports import histograms
from penstock.perf.reports.document import Level

from .arguments import Tuning
from .capacity import Probe, greatest
from .duels import Measured
from .knobs import AS_IT_IS, Setting
from .searching import OverError
from .serving import RefusedSettingError, Served, ServingError

WARM_MS = 400
"""How long a load runs after a setting was loaded before measuring starts."""
FAILING = 0.01
"""The fraction of failed requests from which a setting is rejected."""
LEAST_REQUESTS = 300
LONGEST_MS = 10_000
"""A measurement lasts until this many requests are expected, up to this time."""
_WINDOWS = 3
_FOLLOWS = 0.95
_MOST_CLOSED = 64
_FLAT = 1.05
_ANY = 1e9
TIME_UP = "the time is up"


@dataclass(frozen=True, slots=True)
class World:
    """What a bench works with. `stopped`: whether the user wants it to end; `end_s`: of the monotonic clock."""

    tuning: Tuning
    served: Served
    control: Control
    model: Described
    fleet: Generator
    watch: Watch
    stopped: Callable[[], bool]
    end_s: float


class LiveBench:
    """Measures settings. `levels`: all measurements of each, in order.

    Raises: OverError when the time is up or on Ctrl-C, even within a measurement; ServingError, ControlError, OSError,
    FleetError if the server or the generator fails.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._tuning = world.tuning
        self._most_rate = 0.0
        self.concurrency = 1
        """The number of concurrent requests in a closed loop."""
        self.levels: dict[Setting, list[Level]] = {}

    def left_s(self) -> float:
        return self._world.end_s - time.monotonic()

    def prepare(self) -> str:
        """Find how many concurrent requests suffice for the original configuration. Returns: a description.

        It is twice the number that reaches 95% of the maximum throughput, so that a setting that can serve more gets
        more.
        """
        tuning, rate = self._tuning, self._tuning.options.rate
        if not tuning.closed and rate is not None:
            return ""
        most = int((tuning.options.concurrency or Range()).end) if tuning.ranged else _MOST_CLOSED
        first = int((tuning.options.concurrency or Range()).start) if tuning.ranged else 1
        if first >= most:
            self.concurrency = first
            return ""
        seen: dict[int, float] = {}
        at, flat = first, 0
        while at <= most and flat < 3:
            level = self._level(AS_IT_IS, float(at), self._tuning.window_ms / 2, closed=True)
            flat = 0 if level.client.requests_per_s > _FLAT * max(seen.values(), default=0.0) else flat + 1
            seen[at] = level.client.requests_per_s
            at = min(2 * at, most) if at < most else most + 1
        self._most_rate = max(seen.values())
        enough = min(each for each, per_s in seen.items() if per_s >= _FOLLOWS * self._most_rate)
        self.concurrency = min(2 * enough, most)
        return f"{self._most_rate:,.0f} requests/s with {enough} under way"

    def glance(self, setting: Setting, beside: Measured) -> Measured:
        found = self._tried(setting, beside.load, anew=False)
        if isinstance(found, Measured):
            return found
        level = self._level(setting, beside.load, self._tuning.window_ms / 2)
        latency_us = self._latency_us(level)
        by_latency = self._tuning.target_ms is not None or not self._tuning.closed
        score = (1e6 / latency_us if latency_us > 0 else 0.0) if by_latency else level.client.requests_per_s
        return self._measured(level, score, beside.load)

    def measure(self, setting: Setting, near: Measured | None) -> Measured:
        start = self._start(near)
        found = self._tried(setting, start, anew=True)
        if isinstance(found, Measured):
            return found
        if self._tuning.target_ms is not None:
            return self._borne(setting, start, self._tuning.target_ms * 1e3)
        level = self._level(setting, start, self._tuning.window_ms)
        score = level.client.requests_per_s
        if not self._tuning.closed:
            score = 1e6 / self._latency_us(level) if level.client.requests else 0.0
        return self._measured(level, score, start)

    def _start(self, near: Measured | None) -> float:
        tuning = self._tuning
        if tuning.target_ms is not None and near is not None and near.load:
            return near.load
        if tuning.closed:
            return float(self.concurrency)
        return tuning.options.rate.start if tuning.options.rate is not None else max(self._most_rate / 2, 0.1)

    def _tried(self, setting: Setting, load: float, *, anew: bool) -> Measured | None:
        """Serve a setting and warm it up. Returns: the failed result if that is not possible."""
        self._go_on()
        try:
            if anew or self._world.served.setting != setting:
                self._world.served.load(setting)
                self._run(load, Rule(interval_ms=WARM_MS, trials=1), Watching(), closed=self._tuning.closed)
        except RefusedSettingError as refused:
            if setting == AS_IT_IS:
                raise ServingError(f"the configuration as it was is no longer taken: {refused}") from refused
            return Measured(0.0, load, why=str(refused))
        return None

    def _borne(self, setting: Setting, start: float, target_us: float) -> Measured:
        """Find the highest load within the target."""
        borne: list[tuple[float, Level]] = []
        seen: list[Level] = []

        def probe(load: float) -> Probe:
            level = self._level(setting, load, self._tuning.window_ms / 2)
            seen.append(level)
            good = self._good(level, load, target_us)
            if good:
                borne.append((load, level))
            return Probe(load, good, self._latency_us(level))

        load = greatest(probe, start, self._loads(start), target_us, whole=self._tuning.closed)
        if not borne:
            missed = f"p{self._tuning.percentile} is over the target at {seen[-1].offered.value:,.4g} already"
            return self._measured(seen[-1], 0.0, seen[-1].offered.value, missed)
        level = max(borne, key=lambda each: each[0])[1]
        return self._measured(level, level.client.requests_per_s if self._tuning.closed else load, load)

    def _loads(self, start: float) -> tuple[float, float]:
        tuning = self._tuning
        asked = tuning.options.concurrency if tuning.closed else tuning.options.rate
        if tuning.ranged and asked is not None and asked.end > asked.start:
            return asked.start, asked.end
        return (1.0, float(_MOST_CLOSED)) if tuning.closed else (start / 100, start * 100)

    def _good(self, level: Level, load: float, target_us: float) -> bool:
        client = level.client
        failed = sum(client.errors.values())
        if not client.requests:
            return False
        within = histograms.share_within(client.histogram, target_us) * client.requests / (client.requests + failed)
        if within < self._tuning.percentile / 100:
            return False
        due = load * client.seconds
        return self._tuning.closed or client.requests >= due * (_FOLLOWS - 3 / math.sqrt(max(due, 1.0)))

    def _measured(self, level: Level, score: float, load: float, why: str = "") -> Measured:
        client, failed = level.client, sum(level.client.errors.values())
        memory = self._memory_bytes(level)
        budget = self._tuning.memory_bytes
        if failed > FAILING * (client.requests + failed):
            why = f"{failed} of {client.requests + failed} requests failed: {max(client.errors, key=client.errors.get)}"  # type: ignore[arg-type]
        elif not client.requests:
            why = "no request was answered"
        elif budget is not None and memory is None:
            raise ServingError(f"--memory-budget: the server's memory is not known: {'; '.join(level.notes)}")
        elif budget is not None and memory is not None and memory > budget:
            why = f"over the memory budget: {memory / 2**20:,.0f} MiB"
        latency_us = client.latency_us
        return Measured(
            score=0.0 if why else score,
            load=load,
            per_s=client.requests_per_s,
            p50_us=latency_us.get("p50", math.nan),
            p99_us=latency_us.get("p99", math.nan),
            memory_bytes=memory,
            why=why,
        )

    def _memory_bytes(self, level: Level) -> float | None:
        """Return the server's resident memory, or, for a remote server, the memory that it reports for the model."""
        if level.server_rss_bytes is not None:
            return level.server_rss_bytes
        try:
            told = self._world.control.statistics(self._world.model.name)
        except ControlError:
            return None
        used: list[dict[str, Any]] = [each for model in told for each in model.get("memory_usage") or []]
        return float(sum(int(each.get("byte_size") or 0) for each in used)) if used else None

    def _latency_us(self, level: Level) -> float:
        """Return the percentile that is optimized."""
        return level.client.latency_us.get(f"p{self._tuning.percentile}", math.inf)

    def _level(self, setting: Setting, load: float, lasts_ms: float, *, closed: bool | None = None) -> Level:
        """Measure one load."""
        closed = self._tuning.closed if closed is None else closed
        if not closed:
            lasts_ms = min(max(lasts_ms, 1e3 * LEAST_REQUESTS / load), max(LONGEST_MS, lasts_ms))
        marks = Marks(self._world.watch, self._halted)
        rule = Rule(
            interval_ms=max(int(lasts_ms / _WINDOWS), 1),
            trials=_WINDOWS,
            percentage=_ANY,
            percentile=self._tuning.percentile,
        )
        level = self._run(load, rule, marks, closed=closed)
        marks.tell(level)
        self.levels.setdefault(setting, []).append(level)
        return level

    def _run(self, load: float, rule: Rule, watching: Watching, *, closed: bool) -> Level:
        self._go_on()
        options = self._tuning.options
        how = {"concurrency": Range(), "rate": None} if closed else {"concurrency": None, "rate": Range()}
        wanted = load_of(replace(options, **how), load, sequences=self._world.model.sequences)  # type: ignore[arg-type]
        level = measure(self._world.fleet, wanted, rule, options.input.batch, watching)
        self._go_on()
        if level.ended == INTERRUPTED:
            raise OverError(TIME_UP)
        if level.ended not in {"", UNSTABLE} and not self._world.control.ready():
            raise ServingError(level.ended)
        return level

    def _halted(self) -> bool:
        return self._world.stopped() or self.left_s() <= 0

    def _go_on(self) -> None:
        if self._halted():
            raise OverError("interrupted" if self._world.stopped() else TIME_UP)
