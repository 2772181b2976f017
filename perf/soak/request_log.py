"""Ledger: the end of each request of a load, by its id. Written by clients.py, read by command.py."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

RIGHT, WRONG, REFUSED, FAILED, BROKEN, TIMED_OUT = "right", "wrong", "refused", "failed", "broken", "lost"
"""The correct answer; a wrong one; 503 (UNAVAILABLE); another error; a connection that ended; no end in time."""
SLOW_S = 0.25
"""A request that takes longer has waited for something to recover."""
OUTCOMES = (RIGHT, WRONG, REFUSED, FAILED, BROKEN, TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Ending:
    """How one request ended. Units: seconds, monotonic."""

    kind: str
    started_s: float
    ended_s: float
    outcome: str
    text: str


class RequestLog:
    """Every request by its id. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[str, float]] = {}
        self._failures: list[Ending] = []
        self._right_counts: Counter[str] = Counter()
        self._right_at_s: dict[str, list[float]] = {}
        self._disturbances: dict[str, list[tuple[float, float]]] = {}
        self.ended_twice = 0

    def begin(self, name: str, kind: str, now_s: float) -> None:
        """Record a request that is about to be sent."""
        with self._lock:
            self._pending[name] = (kind, now_s)

    def end(self, name: str, end: str, now_s: float, text: str = "") -> None:
        """Record how it ended. Right answers are only counted, with their times."""
        with self._lock:
            pending = self._pending.pop(name, None)
            if pending is None:
                self.ended_twice += 1
                return
            kind, started_s = pending
            if end == RIGHT:
                self._right_counts[kind] += 1
                self._right_at_s.setdefault(kind, []).append(now_s)
            else:
                self._failures.append(Ending(kind, started_s, now_s, end, text))
            if end != RIGHT or now_s - started_s > SLOW_S:
                self._disturbances.setdefault(kind, []).append((started_s, now_s))

    @property
    def pending_count(self) -> int:
        """How many have begun and not ended."""
        return len(self._pending)

    def failures(self) -> list[Ending]:
        """Return all that did not end well."""
        with self._lock:
            return list(self._failures)

    def counts(self) -> dict[str, Counter[str]]:
        """Count the ends of each kind of request."""
        with self._lock:
            counts_by_kind = {kind: Counter({RIGHT: count}) for kind, count in self._right_counts.items()}
            for each in self._failures:
                counts_by_kind.setdefault(each.kind, Counter())[each.outcome] += 1
        return counts_by_kind

    def clear_times(self) -> None:
        """Drop the times of answers, but not their counts."""
        with self._lock:
            self._right_at_s.clear()
            self._disturbances.clear()

    def recovery_s(self, kind: str, after_s: float) -> float | None:
        """Return how long after a time requests of a kind were served normally again; None: not yet.

        This is the first answer after the uninterrupted chain of failed or slow requests that starts at that time. Call
        it before `clear_times`.
        """
        with self._lock:
            begin_s = after_s
            for started_s, ended_s in sorted(self._disturbances.get(kind, ())):
                if started_s <= begin_s + SLOW_S:
                    begin_s = max(begin_s, ended_s)
            later_s = [at_s for at_s in self._right_at_s.get(kind, ()) if at_s >= begin_s]
        return min(later_s) - after_s if later_s else None
