"""Queueing: one server, one waiting line, first come first served, Poisson arrivals. Pure: what truth/ holds against.

`Mm1` and `Md1` are theory: how long requests stay (waiting and service) where service times are exponential, or all the
same. `departures` is no theory: what such a server does with given arrivals and service times, to the nanosecond.
Units: any one unit of time within a call; times with `_ns` are integer nanoseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

DETERMINISTIC, EXPONENTIAL = "deterministic", "exponential"
LAWS = (DETERMINISTIC, EXPONENTIAL)
_CLOSE = 1e-12
_TAIL = 32  # terms of a Poisson distribution of mean 1 beyond which nothing is left


class Theory(Protocol):
    """How long requests stay."""

    @property
    def mean(self) -> float:
        """Give the mean stay."""
        ...

    def within(self, stay: float) -> float:
        """Give the share of requests that stay no longer."""
        ...

    def quantile(self, share: float) -> float:
        """Give how long a `share` of the requests (below 1) stay at most."""
        ...


@dataclass(frozen=True, slots=True)
class Mm1:
    """Exponential service of mean `service`, at a `load` below 1 (arrivals per mean service).

    Source: the stay is exponential, its rate that of the services less that of the arrivals. Erlang (1917); Kleinrock,
    Queueing Systems, volume 1 (1975).
    """

    service: float
    load: float

    @property
    def mean(self) -> float:
        return self.service / (1 - self.load)

    def within(self, stay: float) -> float:
        return -math.expm1(-max(stay, 0.0) / self.mean)

    def quantile(self, share: float) -> float:
        return -math.log1p(-share) * self.mean


@dataclass(frozen=True, slots=True)
class Md1:
    """Service that always takes `service`, at a `load` below 1.

    Source: the distribution of the wait is Erlang's (1909) and Crommelin's (1932): a sum of alternating signs, in which
    all digits cancel at high loads. This is Franx's form of it, whose terms are all positive (A simple solution for the
    M/D/c waiting time distribution, Operations Research Letters 29, 2001): a request waits `k - u` services at most,
    0 < u <= 1, if and only if those who were waiting `u` services before it came, and those who came since, are fewer
    than `k`. The mean is Pollaczek's and Khinchine's.
    """

    service: float
    load: float

    @property
    def mean(self) -> float:
        return self.service * (1 + self.load / (2 * (1 - self.load)))

    def within(self, stay: float) -> float:
        waits = stay / self.service - 1  # in services
        if waits < 0:
            return 0.0
        whole = math.floor(waits) + 1
        came = _poisson(self.load * (whole - waits), whole)
        waiting = np.cumsum(self.present(whole + 1))[
            1:
        ]  # at most 0, 1, ...: the first of those who are there is served
        return float(came @ waiting[::-1])

    def quantile(self, share: float) -> float:
        if share <= self.within(self.service):  # those who find nobody before them
            return self.service
        low = high = self.service
        while self.within(high) < share:
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle) < share else (low, middle)
        return high

    def present(self, count: int) -> Floats:
        """Give the shares of time in which 0, 1, ... `count` - 1 requests are there.

        What balances between `j` and `j + 1` at departures: all terms are positive, and nothing cancels.
        Source: Ramaswami, A stable recursion for the steady state vector in Markov chains of M/G/1 type (1988).
        """
        came = _poisson(self.load, count + _TAIL)
        more = np.append(
            np.cumsum(came[:0:-1])[::-1], 0.0
        )  # more[j]: more than j come in a service, summed from the end
        shares = np.zeros(count)
        shares[0] = 1 - self.load
        for j in range(count - 1):
            up = shares[0] * more[j] + shares[1 : j + 1] @ more[j:0:-1]
            shares[j + 1] = up / came[0]
        return shares


def _poisson(mean: float, count: int) -> Floats:
    """Give the probabilities of 0, 1, ... `count` - 1 events."""
    terms = np.empty(count)
    terms[0] = math.exp(-mean)
    for number in range(1, count):
        terms[number] = terms[number - 1] * mean / number
    return terms


def theory(law: str, service: float, load: float) -> Theory:
    """Give the theory of one of LAWS."""
    return Md1(service, load) if law == DETERMINISTIC else Mm1(service, load)


def services_ns(law: str, mean_ns: int, count: int, seed: int = 0) -> Ints:
    """Draw the service times of the first `count` requests, by their order: more of them begin with the same."""
    if law == DETERMINISTIC:
        return np.full(count, mean_ns, np.int64)
    drawn: Ints = np.rint(np.random.default_rng(seed).standard_exponential(count) * mean_ns).astype(np.int64)
    return drawn


def departures(arrivals: Ints, services: Ints) -> Ints:
    """Say when each request leaves: no sooner than it came or the one before it left, plus its service.

    Shapes: all [n], in the order they came. Source: Lindley's recursion (1952), as one running maximum.
    """
    worked = np.cumsum(services)
    began: Ints = np.maximum.accumulate(arrivals - worked + services)
    return began + worked


class Line:
    """The same one request at a time: what the virtual queue's server asks (bare.py).

    Invariant: what it has told is the `departures` of what it was told.
    """

    def __init__(self) -> None:
        self._free = 0

    def departure(self, arrival: int, service: int) -> int:
        """Say when a request that comes now leaves. `arrival` is never before the one of the last call."""
        self._free = max(arrival, self._free) + service
        return self._free
