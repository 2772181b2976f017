"""Queueing: one server, one waiting line, first come first served, Poisson arrivals. Pure.

`Mm1` and `Md1` are theory: the sojourn times (waiting and service) for exponential and for constant service times.
`departures` computes what such a server does with given arrivals and service times, to the nanosecond. Units: any one
unit of time within a call; times with `_ns` are integer nanoseconds.
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
_TAIL = 32  # terms of a Poisson distribution of mean 1; the rest is negligible


class Theory(Protocol):
    """The distribution of sojourn times."""

    @property
    def mean(self) -> float:
        """Return the mean sojourn time."""
        ...

    def within(self, stay: float) -> float:
        """Return the fraction of requests that stay no longer than `stay`."""
        ...

    def quantile(self, fraction: float) -> float:
        """Return the longest stay of a `fraction` of the requests (below 1)."""
        ...


@dataclass(frozen=True, slots=True)
class Mm1:
    """Exponential service with mean `service`, at a `load` below 1 (arrivals per mean service).

    Source: the sojourn time is exponential, with the service rate less the arrival rate. Erlang (1917); Kleinrock,
    Queueing Systems, volume 1 (1975).
    """

    service: float
    load: float

    @property
    def mean(self) -> float:
        return self.service / (1 - self.load)

    def within(self, stay: float) -> float:
        return -math.expm1(-max(stay, 0.0) / self.mean)

    def quantile(self, fraction: float) -> float:
        return -math.log1p(-fraction) * self.mean


@dataclass(frozen=True, slots=True)
class Md1:
    """Constant service time `service`, at a `load` below 1.

    Source: the distribution of the wait is Erlang's (1909) and Crommelin's (1932): a sum of alternating signs, in which
    all digits cancel at high loads. This is Franx's form of it, whose terms are all positive (A simple solution for the
    M/D/c waiting time distribution, Operations Research Letters 29, 2001): a request waits at most `k - u` services,
    0 < u <= 1, if and only if the requests that were waiting `u` services before it arrived and those that arrived
    since are fewer than `k`. The mean is Pollaczek's and Khinchine's.
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
        whole_services = math.floor(waits) + 1
        arrival_probabilities = _poisson(self.load * (whole_services - waits), whole_services)
        waiting = np.cumsum(self.present(whole_services + 1))[
            1:
        ]  # at most 0, 1, ...: the first of those who are there is served
        return float(arrival_probabilities @ waiting[::-1])

    def quantile(self, fraction: float) -> float:
        if fraction <= self.within(self.service):  # those that find the server idle
            return self.service
        low = high = self.service
        while self.within(high) < fraction:
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle) < fraction else (low, middle)
        return high

    def present(self, count: int) -> Floats:
        """Return the fractions of time in which 0, 1, ... `count` - 1 requests are present.

        Derived from the balance between `j` and `j + 1` at departures: all terms are positive, so nothing cancels.
        Source: Ramaswami, A stable recursion for the steady state vector in Markov chains of M/G/1 type (1988).
        """
        arrival_probabilities = _poisson(self.load, count + _TAIL)
        more_than = np.append(
            np.cumsum(arrival_probabilities[:0:-1])[::-1], 0.0
        )  # more[j]: more than j come in a service, summed from the end
        fractions = np.zeros(count)
        fractions[0] = 1 - self.load
        for j in range(count - 1):
            up = fractions[0] * more_than[j] + fractions[1 : j + 1] @ more_than[j:0:-1]
            fractions[j + 1] = up / arrival_probabilities[0]
        return fractions


def _poisson(mean: float, count: int) -> Floats:
    """Return the probabilities of 0, 1, ... `count` - 1 events."""
    terms = np.empty(count)
    terms[0] = math.exp(-mean)
    for number in range(1, count):
        terms[number] = terms[number - 1] * mean / number
    return terms


def theory(law: str, service: float, load: float) -> Theory:
    """Return the theory of one of LAWS."""
    return Md1(service, load) if law == DETERMINISTIC else Mm1(service, load)


def services_ns(law: str, mean_ns: int, count: int, seed: int = 0) -> Ints:
    """Draw the service times of the first `count` requests, in order. A larger `count` begins with the same times."""
    if law == DETERMINISTIC:
        return np.full(count, mean_ns, np.int64)
    services: Ints = np.rint(np.random.default_rng(seed).standard_exponential(count) * mean_ns).astype(np.int64)
    return services


def departures(arrivals: Ints, services: Ints) -> Ints:
    """Return when each request leaves: the later of its arrival and the previous departure, plus its service.

    Shapes: all [n], in order of arrival. Source: Lindley's recursion (1952), as one running maximum.
    """
    worked = np.cumsum(services)
    began: Ints = np.maximum.accumulate(arrivals - worked + services)
    return began + worked


class Line:
    """`departures` for one request at a time, for the virtual queue's server (stub_server.py).

    Invariant: what it returns equals the `departures` of what it was given.
    """

    def __init__(self) -> None:
        self._free = 0

    def departure(self, arrival: int, service: int) -> int:
        """Return when a request that arrives now leaves. `arrival` must not decrease between calls."""
        self._free = max(arrival, self._free) + service
        return self._free
