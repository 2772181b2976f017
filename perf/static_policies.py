"""Policies: a grid of static settings, such as other servers require from users, beside Penstock's default.

A static policy learns nothing: its cap, delay and preferred sizes are configured and never change. The cells are the
loads for both. `compare_simulated` compares them in virtual time; `perf/batching.py` does so with a running server, for
the default and the few static policies that did best here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS, BatchPolicy

from .claims import FAILS
from .simulator.arrivals import ONE_ROW, Arrivals, Kind, bursty, poisson
from .simulator.run_times import RunTimes
from .simulator.simulation import Result, simulate

CAPS = (1, 2, 4, 8, 16, 32, 64)
DELAYS_US = (0, 200, 1000, 5000)
MIN_GOODPUT, MAX_P99 = 0.95, 1.1
"""The least ratio of the default's goodput, and the highest of its p99, to the best static policy's."""
DEFAULT_POLICY = BatchPolicy(max_batch_rows=DEFAULT_MAX_BATCH_ROWS)
TWO_SHAPES = (Kind(key=((256,),)), Kind(key=((384,),)))
FOUR_SIZES = (Kind(1, weight=8), Kind(2, weight=4), Kind(4, weight=2), Kind(8, weight=1))


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: its fraction of the device's capacity, its arrival process, and its kinds of requests."""

    name: str
    share: float
    make_arrivals: Callable[[float, float, Sequence[Kind], int], Arrivals]
    kinds: tuple[Kind, ...] = ONE_ROW

    def arrivals(self, knee_per_s: float, seconds: float, seed: int) -> Arrivals:
        """Draw the requests for a device of `knee_per_s` rows per second."""
        return self.make_arrivals(self._rate_per_s(knee_per_s), seconds, self.kinds, seed)

    def seconds(self, knee_per_s: float, requests: int) -> float:
        """Return the time in which `requests` requests arrive."""
        return requests / self._rate_per_s(knee_per_s)

    def _rate_per_s(self, knee_per_s: float) -> float:
        rows = np.average([kind.rows for kind in self.kinds], weights=[kind.weight for kind in self.kinds])
        return self.share * knee_per_s / float(rows)

    @property
    def max_rows(self) -> int:
        """The size of the largest request."""
        return max(kind.rows for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a policy in a cell. Units: rows served per second until the last answer; milliseconds."""

    goodput_per_s: float
    p50_ms: float
    p99_ms: float
    rows_per_batch: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell: the default, and every static policy by name."""

    cell: Cell
    default: Figures
    static: dict[str, Figures]

    @property
    def best_goodput(self) -> str:
        """Name the static policy that serves most; of those equal to a thousandth, the one with the lowest p99."""
        best_per_s = max(figures.goodput_per_s for figures in self.static.values())
        return self._fastest(0.999 * best_per_s)

    @property
    def best_p99(self) -> str:
        """Name the static policy with the lowest p99 among those whose goodput would pass for the default."""
        best_per_s = max(figures.goodput_per_s for figures in self.static.values())
        return self._fastest(MIN_GOODPUT * best_per_s)

    def _fastest(self, least_per_s: float) -> str:
        enough = [name for name, figures in self.static.items() if figures.goodput_per_s >= least_per_s]
        return min(enough, key=lambda name: self.static[name].p99_ms)

    @property
    def goodput_ratio(self) -> float:
        return self.default.goodput_per_s / self.static[self.best_goodput].goodput_per_s

    @property
    def p99_ratio(self) -> float:
        return self.default.p99_ms / self.static[self.best_p99].p99_ms

    @property
    def passes(self) -> bool:
        return self.goodput_ratio >= MIN_GOODPUT and self.p99_ratio <= MAX_P99


def cells() -> tuple[Cell, ...]:
    """List the loads."""
    return (
        Cell("Poisson 30%", 0.3, poisson),
        Cell("Poisson 60%", 0.6, poisson),
        Cell("Poisson 90%", 0.9, poisson),
        Cell("bursty 50%", 0.5, bursty),
        Cell("two shapes 60%", 0.6, poisson, TWO_SHAPES),
        Cell("four sizes 60%", 0.6, poisson, FOUR_SIZES),
    )


def static_grid(least_rows: int = 1) -> dict[str, BatchPolicy]:
    """Make every static policy whose cap admits a request of `least_rows`, by name.

    Preferred sizes are none, half the cap and the cap, or the cap alone; without a delay, the last equals none.
    """
    policies = {}
    for cap in (cap for cap in CAPS if cap >= least_rows):
        for delay_us in DELAYS_US if cap > 1 else (0,):
            sizes = {"": (), ", prefers half": (cap // 2, cap), ", prefers all": (cap,)}
            for suffix, preferred in sizes.items():
                if not preferred or (cap > 1 and (delay_us or len(preferred) > 1)):
                    policies[f"cap {cap}, {delay_us / 1000:g} ms{suffix}"] = BatchPolicy(
                        max_batch_rows=cap, cap_rows=cap, max_queue_delay_us=delay_us, preferred_rows=preferred
                    )
    return policies


def figures(result: Result) -> Figures:
    """Summarize a simulation."""
    p50_ms, p99_ms = result.quantile_ms(0.5, 0.99)
    return Figures(result.goodput_per_s(), p50_ms, p99_ms, result.rows_per_batch)


def compare_simulated(
    run_times: RunTimes,
    requests: int = 15_000,
    run: Callable[[Arrivals, BatchPolicy, RunTimes], Result] = simulate,
) -> list[Comparison]:
    """Run every cell with the default and the whole grid, on a device with these run times.

    Each has `requests` requests, the same for all policies. `run`: the simulation; by default the device alone, without
    a front end.
    """
    comparisons = []
    for cell in cells():
        _, knee_per_s = run_times.knee(cell.kinds[0].key, DEFAULT_MAX_BATCH_ROWS)
        load = cell.arrivals(knee_per_s, cell.seconds(knee_per_s, requests), 0)
        figures_by_policy = {
            name: figures(run(load, policy, run_times))
            for name, policy in {"": DEFAULT_POLICY, **static_grid(cell.max_rows)}.items()
        }
        comparisons.append(Comparison(cell, figures_by_policy.pop(""), figures_by_policy))
    return comparisons


def table(comparisons: Sequence[Comparison]) -> str:
    """Format the cells: the default beside the best static policies, and whether its targets are met."""
    head = f"{'cell':<15} {'rows/s':>8} {'p50 ms':>7} {'p99 ms':>7} {'rows/batch':>10} {'of best rows/s':>14}"
    lines = [f"{head} {'of best p99':>11}  the best static one"]
    for each in comparisons:
        ours, best = each.default, each.best_p99
        line = f"{each.cell.name:<15} {ours.goodput_per_s:>8,.0f} {ours.p50_ms:>7.2f} {ours.p99_ms:>7.2f}"
        line += f" {ours.rows_per_batch:>10.1f} {each.goodput_ratio:>14.3f} {each.p99_ratio:>11.2f}"
        line += f"  {best} ({each.static[best].p99_ms:.2f} ms)"
        if each.best_goodput != best:
            line += f"; most rows/s: {each.best_goodput}"
        lines.append(line + ("" if each.passes else f"  {FAILS}"))
    return "\n".join(lines)
