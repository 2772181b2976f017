"""Truth, part 1: an open loop against a virtual queue (bare.py), whose stays theory knows. Called by command.py.

A minute at 90% load is too short for its own p99: another draw of the same arrivals gives a fifth more or less, of
however exact a measurement. So the draws are chosen: SEEDS are those, of the first TRIES, whose exact replay comes
closest to theory in p50 and p99, and stays there when requests come up to LATE_NS late: at 50% load half of M/D/1's
requests wait for nobody, so that its median stands at a step, off which one late wake-up may take it. That makes theory
and draw agree to about a percent; it does nothing for the measurement, which must find both. All three are printed.

The service is long beside what two wake-ups of a process cost, 0.1 to 0.2 ms, which are in every measured stay. All
queues are measured at once: together they ask for some hundred requests a second, each from processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.perf.generator.fleet import Fleet, fleet
from penstock.perf.generator.orders import Load, Part, Window
from penstock.perf.generator.schedule import due_ns
from penstock.perf.queueing import DETERMINISTIC, EXPONENTIAL, Floats, Ints, departures, services_ns, theory
from penstock.perf.verdicts import verdict

from .server import bare, payloads, target

MEAN_US = 20_000
SECONDS = 60.0
QUANTILES = {"p50": 0.5, "p99": 0.99}
WITHIN = 0.05
TRIES, QUICK_TRIES = 8_000, 200
LATE_NS = 1_000_000
NAMES = {DETERMINISTIC: "M/D/1", EXPONENTIAL: "M/M/1"}
SEEDS = {
    (DETERMINISTIC, 0.5): 2545, (DETERMINISTIC, 0.7): 32, (DETERMINISTIC, 0.9): 7848,
    (EXPONENTIAL, 0.5): 1095, (EXPONENTIAL, 0.7): 5285, (EXPONENTIAL, 0.9): 4189,
}  # fmt: skip
_LINGER_S = 10.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One queue and the requests that come to it."""

    law: str
    load: float
    seed: int
    seconds: float = SECONDS

    @property
    def offered(self) -> Load:
        return Load(rate_per_s=self.load / MEAN_US * 1e6, poisson=True, seed=self.seed, requests=self.count)

    @property
    def count(self) -> int:
        """How many requests there are."""
        return int(self.load / MEAN_US * 1e6 * self.seconds)

    @property
    def services(self) -> Ints:
        """Give their service times, in nanoseconds."""
        return services_ns(self.law, MEAN_US * 1000, self.count, self.seed)

    def expected_ms(self) -> Floats:
        """Give what theory says. Shapes: [quantiles]."""
        stays = theory(self.law, MEAN_US / 1e3, self.load)
        return np.array([stays.quantile(share) for share in QUANTILES.values()])

    def replayed_ms(self, arrivals: Ints) -> Floats:
        """Give what the queue makes of arrivals. Shapes: [quantiles]."""
        return quantiles_ms(departures(arrivals, self.services) - arrivals)

    def arrivals(self) -> Ints:
        """Give when its requests are due, as the generator will have it."""
        return np.fromiter(islice(due_ns(self.offered, Part()), self.count), np.int64, self.count)


def quantiles_ms(stays_ns: Ints) -> Floats:
    """Give the QUANTILES of some stays."""
    found: Floats = np.quantile(stays_ns, list(QUANTILES.values())) / 1e6
    return found


def off(draw: Draw) -> float:
    """Say how far a draw is from theory, as a share of it, at the worse quantile, on time or late."""
    arrivals = draw.arrivals()
    late = np.sort(arrivals + np.random.default_rng(draw.seed).integers(0, LATE_NS, draw.count))
    return max(float(np.abs(draw.replayed_ms(each) / draw.expected_ms() - 1).max()) for each in (arrivals, late))


def chosen(law: str, load: float, seconds: float = SECONDS, tries: int = TRIES) -> Draw:
    """Find the draw that is closest to theory: how SEEDS were found."""
    return min((Draw(law, load, seed, seconds) for seed in range(tries)), key=off)


def draws(seconds: float) -> list[Draw]:
    """Give those that are measured: both laws at each load."""
    if seconds == SECONDS:
        return [Draw(law, load, seed) for (law, load), seed in SEEDS.items()]
    return [chosen(law, load, seconds, QUICK_TRIES) for law, load in SEEDS]


def lines(draw: Draw, window: Window, protocol: str) -> list[str]:
    """Hold what was measured against theory."""
    name = f"{NAMES[draw.law]} at {draw.load:.0%} over {protocol}"
    if len(window.ends_ns) != draw.count or window.errors or window.lost:
        why = window.lost or dict(window.errors) or "too slow"
        return [verdict(f"{name}: {len(window.ends_ns)} of {draw.count} requests answered, {why}", False)]
    order = np.argsort(window.starts_ns, kind="stable")
    due, answered = window.starts_ns[order], window.ends_ns[order]
    figures = zip(QUANTILES, draw.expected_ms(), draw.replayed_ms(due), quantiles_ms(answered - due), strict=True)
    written = []
    for quantile, expected, replayed, got in figures:
        words = f"{name} {quantile}: theory {expected:7.2f} ms, this draw {replayed:7.2f}, measured {got:7.2f}"
        words += f" ({got / expected - 1:+.1%} of theory, {(got - replayed) * 1e3:+.0f} us of the draw)"
        written.append(verdict(words, abs(got / expected - 1) <= WITHIN))
    return written


def report(protocols: Sequence[str], seconds: float) -> Iterator[str]:
    """Measure, and write the lines as they come."""
    yield (
        f"An open loop (Poisson) against a virtual queue: mean service {MEAN_US / 1e3:g} ms, {seconds:g} s each, "
        "seeds chosen so that this draw's exact replay is close to theory"
    )
    cells = [(draw, protocol) for protocol in protocols for draw in draws(seconds)]
    with ExitStack() as stack:
        fleets = [stack.enter_context(_ready(*cell)) for cell in cells]
        for (draw, _), ours in zip(cells, fleets, strict=True):
            ours.go(draw.offered)
        end = time.monotonic() + seconds + _LINGER_S
        for (draw, protocol), ours in zip(cells, fleets, strict=True):
            ours.wait(end - time.monotonic(), draw.count)
            yield from lines(draw, ours.take(), protocol)


@contextmanager
def _ready(draw: Draw, protocol: str) -> Iterator[Fleet]:
    """Start a queue's server and its generator."""
    with (
        bare("--law", draw.law, "--mean-us", MEAN_US, "--seed", draw.seed) as server,
        fleet(target(server, protocol), payloads(protocol)) as ours,
    ):
        yield ours
