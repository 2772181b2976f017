"""Ledger: the end of each request of a load, by its id. Written by callers.py, read by command.py."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

RIGHT, WRONG, REFUSED, FAILED, BROKEN, LOST = "right", "wrong", "refused", "failed", "broken", "lost"
"""The correct answer; a wrong one; 503 (UNAVAILABLE); another error; a connection that ended; no end in time."""
SLOW_S = 0.25
"""A request that takes longer has waited for something to recover."""
ENDS = (RIGHT, WRONG, REFUSED, FAILED, BROKEN, LOST)


@dataclass(frozen=True, slots=True)
class End:
    """How one request ended. Units: seconds, monotonic."""

    kind: str
    begun_s: float
    ended_s: float
    end: str
    text: str


class Ledger:
    """Every request by its id. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, float]] = {}
        self._ends: list[End] = []
        self._right: Counter[str] = Counter()
        self._right_at: dict[str, list[float]] = {}
        self._bad: dict[str, list[tuple[float, float]]] = {}
        self.twice = 0

    def begin(self, name: str, kind: str, now_s: float) -> None:
        """Record a request that is about to be sent."""
        with self._lock:
            self._open[name] = (kind, now_s)

    def end(self, name: str, end: str, now_s: float, text: str = "") -> None:
        """Record how it ended. Right answers are only counted, with their times."""
        with self._lock:
            begun = self._open.pop(name, None)
            if begun is None:
                self.twice += 1
                return
            kind, begun_s = begun
            if end == RIGHT:
                self._right[kind] += 1
                self._right_at.setdefault(kind, []).append(now_s)
            else:
                self._ends.append(End(kind, begun_s, now_s, end, text))
            if end != RIGHT or now_s - begun_s > SLOW_S:
                self._bad.setdefault(kind, []).append((begun_s, now_s))

    @property
    def without_end(self) -> int:
        """How many have begun and not ended."""
        return len(self._open)

    def not_right(self) -> list[End]:
        """Return all that did not end well."""
        with self._lock:
            return list(self._ends)

    def counts(self) -> dict[str, Counter[str]]:
        """Count the ends of each kind of request."""
        with self._lock:
            counted = {kind: Counter({RIGHT: count}) for kind, count in self._right.items()}
            for each in self._ends:
                counted.setdefault(each.kind, Counter())[each.end] += 1
        return counted

    def mark(self) -> None:
        """Drop the times of answers, but not their counts."""
        with self._lock:
            self._right_at.clear()
            self._bad.clear()

    def served_again_s(self, kind: str, after_s: float) -> float | None:
        """Return how long after a time requests of a kind were served normally again; None: not yet.

        This is the first answer after the uninterrupted chain of failed or slow requests that starts at that time. Call
        it before `mark`.
        """
        with self._lock:
            begin_s = after_s
            for begun_s, ended_s in sorted(self._bad.get(kind, ())):
                if begun_s <= begin_s + SLOW_S:
                    begin_s = max(begin_s, ended_s)
            later_s = [at_s for at_s in self._right_at.get(kind, ()) if at_s >= begin_s]
        return min(later_s) - after_s if later_s else None
