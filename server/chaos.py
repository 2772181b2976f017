"""Fault injection: which faults `--chaos` causes, and when. `faults.py` carries them out.

Pure logic: the time is passed in, and the random generators are seeded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

PROCESSES = ("worker", "front", "engine")
ACTIONS = ("kill", "stop")
PROCESS_FAULTS = tuple(f"{action}-{what}" for what in PROCESSES for action in ACTIONS)
"""Process faults, given as a rate per second."""
MULTI_PROCESS_FAULTS = tuple(fault for fault in PROCESS_FAULTS if not fault.endswith("worker"))
"""Process faults that exist only with --http-workers."""
REQUEST_FAULTS = ("fail", "slow")
"""Request faults, given as a share of all requests."""
MAX_PER_S = 1000.0
SLOW_MS = 100.0
_EXPECTED = (
    f"one of {', '.join(PROCESS_FAULTS)} (each =RATE, per second), fail=SHARE, slow=SHARE:MS (0 to 1 of all), "
    "seed=NUMBER"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rates:
    """How many faults to cause. Units: `per_s` is per second by fault; `fail` and `slow` are shares, 0 to 1."""

    per_s: Mapping[str, float] = field(default_factory=dict)
    fail: float = 0.0
    slow: float = 0.0
    slow_ms: float = SLOW_MS
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.per_s or self.fail or self.slow)

    def __str__(self) -> str:
        texts = [f"{fault}={rate:g} a second" for fault, rate in self.per_s.items()]
        texts += [f"fail={self.fail:g}"] if self.fail else []
        texts += [f"slow={self.slow:g} by {self.slow_ms:g} ms"] if self.slow else []
        return ", ".join((*texts, f"seed={self.seed}"))


def parse(rules: Iterable[str]) -> Rates:
    """Parse the values of --chaos. Raises: ValueError."""
    per_s: dict[str, float] = {}
    shares = dict.fromkeys(REQUEST_FAULTS, 0.0)
    slow_ms, seed = SLOW_MS, 0
    for rule in rules:
        name, equals, value = (part.strip() for part in rule.partition("="))
        try:
            if not equals:
                raise ValueError
            if name == "seed":
                seed = int(value)
            elif name in PROCESS_FAULTS:
                per_s[name] = _parse_number(value, MAX_PER_S)
            elif name == "slow" and ":" in value:
                share, _, ms = value.partition(":")
                shares[name], slow_ms = _parse_number(share, 1.0), _parse_number(ms, 3.6e6)
            else:
                shares[REQUEST_FAULTS[REQUEST_FAULTS.index(name)]] = _parse_number(value, 1.0)
        except (ValueError, KeyError):
            raise ValueError(f"must be {_EXPECTED}, not {rule!r}") from None
    return Rates({name: rate for name, rate in per_s.items() if rate}, shares["fail"], shares["slow"], slow_ms, seed)


def conflict(rules: Sequence[str], *, allowed: bool, fronts: bool) -> str:
    """Return an error if --chaos cannot be used with the other settings, "" if it can."""
    if rules and not allowed:
        return "--chaos makes requests and processes fail, for tests: it requires --allow-chaos"
    unreachable = [] if fronts else [rule for rule in rules if rule.strip().startswith(MULTI_PROCESS_FAULTS)]
    return (
        f"--chaos '{unreachable[0]}' requires --http-workers: there is no such process without it"
        if unreachable
        else ""
    )


def _parse_number(text: str, max_value: float) -> float:
    number = float(text)
    if not 0 <= number <= max_value:  # also rejects nan
        raise ValueError
    return number


class Chaos:
    """The faults of one process: `pop_due` returns those of other processes, `draw_request_fault` those of requests.

    `reachable` lists the kinds of processes it can reach. `salt` distinguishes it from others of its kind: with one
    seed, each has its own faults, the same in every run. Faults of a kind occur at random, at the configured rate on
    average.
    Units: `next_ns` is when the next fault is due, in monotonic nanoseconds like every `now_ns`; inf for never.
    """

    def __init__(self, rates: Rates, reachable: Sequence[str], now_ns: int, salt: str = "") -> None:
        self.rates = rates
        self.counts: dict[str, int] = {}
        faults = [fault for fault in PROCESS_FAULTS if fault in rates.per_s and fault.partition("-")[2] in reachable]
        self._chances = {fault: Random(f"{rates.seed} {salt} {fault}") for fault in faults}  # noqa: S311 - reproducible
        self._request_chance = Random(f"{rates.seed} {salt} requests")  # noqa: S311
        self._choice = Random(f"{rates.seed} {salt} choice")  # noqa: S311
        self._due = dict.fromkeys(faults, 0.0)
        self.restart(now_ns)

    def restart(self, now_ns: int) -> None:
        """Restart the schedule from this time."""
        self._due = {fault: now_ns + self._gap_ns(fault) for fault in self._due}

    def _gap_ns(self, fault: str) -> float:
        return self._chances[fault].expovariate(self.rates.per_s[fault]) * 1e9

    @property
    def next_ns(self) -> float:
        """When the next fault is due."""
        return min(self._due.values(), default=math.inf)

    def pop_due(self, now_ns: int) -> list[str]:
        """Return the faults that have become due, in order."""
        due_faults = []
        while self.next_ns <= now_ns:
            fault = min(self._due, key=self._due.__getitem__)
            self._due[fault] += self._gap_ns(fault)
            due_faults.append(fault)
        return due_faults

    def choose_victim(self, victims: Sequence[T]) -> T:
        """Choose one at random."""
        return self._choice.choice(victims)

    def draw_request_fault(self) -> tuple[bool, float]:
        """Decide whether a request fails, and if not by how much it is delayed. Units: seconds."""
        draw = self._request_chance.random()
        if draw < self.rates.fail:
            return True, 0.0
        is_slow = self._request_chance.random() < self.rates.slow
        return False, self.rates.slow_ms / 1000 * is_slow

    def count(self, fault: str) -> None:
        """Count a fault that was caused."""
        self.counts[fault] = self.counts.get(fault, 0) + 1
