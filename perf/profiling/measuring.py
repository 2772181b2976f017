"""Measuring: one load on a fleet, window after window until it is stable. Works with any server.

What ended before the first window is not counted, and only the last three windows are: the start of a level
(connections being made, a server warming up) is dropped if there are more windows than that.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

import numpy as np

from penstock.perf.generator.orders import Load, Window
from penstock.perf.generator.pacing import UNANSWERED
from penstock.perf.reports import histograms
from penstock.perf.reports.document import Client, Level, Offered

from . import stability
from .options import Rule
from .stability import WINDOWS_TO_AGREE, WindowFigures

UNSTABLE = "unstable"
INTERRUPTED = "interrupted"
OVER = "over the latency threshold"
EMPTY = "No valid requests recorded within time interval. Please use a larger time window."
"""Reasons why a level did not end normally. Any other reason is the server's own text."""
SLICE_S = 0.1
"""The longest time until an interruption is noticed."""
STALL_TIMEOUT_S = 60.0
"""A window of counted requests ends if none has ended for this long: the server hangs."""
_QUANTILES = {"p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}


class Generator(Protocol):
    """The methods of a fleet that are needed."""

    def start_load(self, load: Load) -> None:
        """Begin a load."""

    def take(self) -> Window:
        """Return what ended since the last call."""
        ...

    def count(self) -> int:
        """Return how many have ended since."""
        ...

    def wait(self, seconds: float, requests: int = 0) -> bool:
        """Wait. Returns: whether it ended early, because the load cannot continue or `requests` requests have ended."""
        ...

    def halt(self) -> None:
        """Stop sending."""


class LoadListener:
    """Callbacks of the caller while a load runs."""

    def on_start(self) -> None:
        """Handle the start of the load."""

    def on_window_boundary(self) -> None:
        """Handle the end of a window and the start of the next: once before the first, and once after each."""

    def on_progress(self, share: float) -> None:
        """Handle progress: the part of a window that is over, 0 to 1."""

    def on_window(self, window: Window, client: Client) -> None:
        """Handle a finished window."""

    def is_interrupted(self) -> bool:
        """Return whether to end early."""
        return False


def measure(fleet: Generator, load: Load, rule: Rule, rows: int = 1, listener: LoadListener | None = None) -> Level:
    """Maintain a load until three windows agree, or the maximum number of windows is reached.

    Server failures are reported in the level's `ended`. Raises: OSError if the server cannot be reached at the start.
    """
    return _Measurement(fleet, load, rule, rows, listener or LoadListener()).run()


class _Measurement:
    def __init__(self, fleet: Generator, load: Load, rule: Rule, rows: int, listener: LoadListener) -> None:
        self._fleet = fleet
        self._load = load
        self._rule = rule
        self._rows = rows
        self._listener = listener
        self._windows: list[Window] = []
        self._clients: list[Client] = []
        self._passed: list[WindowFigures] = []

    def run(self) -> Level:
        self._begin()
        while not (ended := self._window()) and not self._done():
            pass
        self._fleet.halt()
        return self._level(self._failure_after(self._fleet.take()) or ended)

    def _begin(self) -> None:
        if self._rule.warmup_requests:
            self._fleet.take()
            self._fleet.start_load(replace(self._load, requests=self._rule.warmup_requests))
            self._wait(self._rule.warmup_requests)
            self._fleet.halt()
        self._listener.on_start()
        if self._load.requests:  # none of them may be missed
            self._fleet.take()
            self._listener.on_window_boundary()
            self._fleet.start_load(self._load)
        else:
            self._fleet.start_load(self._load)
            self._fleet.take()
            self._listener.on_window_boundary()

    def _window(self) -> str:
        """Measure one window. Returns: why there can be no other, or ""."""
        interrupted = not self._wait(self._load.requests or (self._rule.requests if self._rule.by_count else 0))
        window = self._fleet.take()
        self._listener.on_window_boundary()
        if self._load.requests:
            window = _clamped(window)
        figures = client(window, self._rows, self._rule.percentile)
        self._windows.append(window)
        self._clients.append(figures)
        self._passed.append(stability.window_figures(window.latencies_ns, window.seconds, self._rule.percentile))
        self._listener.on_window(window, figures)
        if window.failure:
            return f"the server was lost in window {self._last_alive() + 1}: {window.failure}"
        if interrupted:
            return INTERRUPTED
        if window.errors and not figures.requests:
            return f"every request failed: {window.errors.most_common(1)[0][0]}"
        return ""

    def _failure_after(self, after: Window) -> str:
        """Return why the server was lost or stopped answering after the last window, while answers were due; or ""."""
        if any(each.failure for each in self._windows):
            return ""
        if after.failure:
            return f"the server was lost in window {self._last_alive() + 1}: {after.failure}"
        if after.errors[UNANSWERED] and not len(after.ends_ns):
            return f"the server stopped answering in window {self._last_alive() + 1}: {UNANSWERED}"
        return ""

    def _wait(self, min_requests: int) -> bool:
        """Wait for a window's end: its time, or `min_requests` requests. Returns: False if the user ended it."""
        lasts_s, since, last_count = (
            STALL_TIMEOUT_S if min_requests else self._rule.interval_ms / 1e3,
            time.monotonic(),
            0,
        )
        while True:
            if self._listener.is_interrupted():
                return False
            if min_requests and (ended_count := self._fleet.count()) != last_count:
                since, last_count = time.monotonic(), ended_count
            remaining_s = since + lasts_s - time.monotonic()
            self._listener.on_progress(
                min(last_count / min_requests if min_requests else 1 - remaining_s / lasts_s, 1.0)
            )
            if remaining_s <= 0 or self._fleet.wait(min(remaining_s, SLICE_S), min_requests):
                return True

    def _done(self) -> bool:
        return bool(
            self._load.requests
            or len(self._windows) >= self._rule.trials
            or stability.stable(self._passed, self._rule.percentage)
            or stability.exceeds_threshold(self._passed, self._rule.threshold_ms)
        )

    def _last_alive(self) -> int:
        """Return the last window in which any request ended: the server's last, if it was lost."""
        alive = [number for number, each in enumerate(self._windows) if len(each.ends_ns) or each.errors]
        return alive[-1] if alive else 0

    def _level(self, ended: str) -> Level:
        """Summarize. If the server failed, nothing is averaged: the figures are those from the failing window on."""
        if not ended and not self._passed[-1].per_s:
            ended = EMPTY
        settled_count = min(WINDOWS_TO_AGREE, len(self._windows)) if ended in {"", INTERRUPTED} else 0
        last = self._windows[-settled_count:] if settled_count else self._windows[self._last_alive() :]
        joined = last[0]
        for window in last[1:]:
            joined = joined.merge(window)
        is_stable = not ended and bool(self._load.requests or stability.stable(self._passed, self._rule.percentage))
        return Level(
            offered(self._load),
            is_stable,
            client(joined, self._rows, self._rule.percentile),
            settled_count,
            self._clients,
            ended=ended or self._reason(is_stable, joined),
        )

    def _reason(self, is_stable: bool, joined: Window) -> str:
        limit_ns = self._rule.threshold_ms * stability.NS_PER_MS
        if limit_ns and stability.decisive_latency_ns(joined.latencies_ns, self._rule.percentile) >= limit_ns:
            return OVER
        return "" if is_stable else UNSTABLE


def offered(load: Load) -> Offered:
    """Describe the load."""
    if load.concurrency:
        return Offered("concurrency", load.concurrency)
    if load.intervals_us:
        return Offered("intervals", 1e6 * len(load.intervals_us) / sum(load.intervals_us), "recorded")
    return Offered("rate", load.rate_per_s, "poisson" if load.poisson else "constant")


def client(window: Window, rows: int = 1, percentile: int = 0) -> Client:
    """Compute a window's figures. `percentile` is reported in addition to the usual ones."""
    count, seconds = len(window.ends_ns), max(window.seconds, 1e-9)
    return Client(
        requests=count,
        rows=count * rows,
        seconds=seconds,
        requests_per_s=count / seconds,
        rows_per_s=count * rows / seconds,
        latency_us=_latency_us(window, percentile) if count else {},
        histogram=histograms.text(window.latencies_ns) if count else "",
        errors=dict(window.errors),
        late_us=_late_us(window) if len(window.late_ns) else None,
        cpu_us_per_request=window.cpu_s / max(count, 1) * 1e6,
        cores=window.cpu_s / seconds,
        responses_per_s=window.responses / seconds if len(window.earlier_ns) else None,
    )


def _latency_us(window: Window, percentile: int) -> dict[str, float]:
    ns = window.latencies_ns
    quantiles = _QUANTILES | ({f"p{percentile}": float(percentile)} if percentile else {})
    values_ns = stability.percentiles_ns(ns, list(quantiles.values()))
    return {
        "mean": float(ns.mean()) / 1e3,
        "std": float(ns.std(ddof=1)) / 1e3 if len(ns) > 1 else 0.0,
        "min": float(ns.min()) / 1e3,
        "max": float(ns.max()) / 1e3,
        **{name: value / 1e3 for name, value in zip(quantiles, values_ns, strict=True)},
    }


def _late_us(window: Window) -> dict[str, float]:
    ns = window.late_ns
    p50, p99 = stability.percentiles_ns(ns, [50, 99])
    return {"mean": float(ns.mean()) / 1e3, "p50": p50 / 1e3, "p99": p99 / 1e3, "max": float(ns.max()) / 1e3}


def _clamped(window: Window) -> Window:
    """Limit the window to the time from the first request's start to the last one's end."""
    if not len(window.ends_ns):
        return window
    window.begin_ns, window.end_ns = int(np.min(window.starts_ns)), int(np.max(window.ends_ns))
    return window
