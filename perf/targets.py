"""With a latency target: which requests are in time, and what happens to the rest. `python -m penstock.perf.targets`.

A model is served with a target and, to measure its capacity, without one. Then it gets, in turns and as Poisson
processes, 80% of the capacity and twice the capacity. At 80%, nearly all requests must be answered in time; rejected
ones count as not in time. At twice the capacity, as many as ever must be answered in time, no accepted request may be
late, and rejections must come at once. Times are measured from when a request was due, those of rejections from when it
was sent.

`deep` does a few hundred rows per second, far less than the front end can accept; `mlp` does thousands: at twice that,
run and load need more than two cores, which shows what happens to a server without the CPU to reject. Each has one
thread: see perf/model_variants.py.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import models
from .claims import verdict
from .model_variants import MANY_CONNECTIONS, Run, Variant, knee_per_s, run, write
from .server_process import Process, penstock
from .simulator.arrivals import poisson
from .static_policies import DEFAULT_POLICY

CALM_LOAD, OVERLOAD = 0.8, 2.0
MIN_IN_TIME = 0.99
MIN_OF_PEAK = 0.9
MAX_REFUSAL_MS = 5.0
WARM_UP_S = 2.0
HEAD = f"{'':<12} {'offered/s':>9} {'in time/s':>9} {'of all':>7} {'late':>6} {'503/s':>7} {'p50 ms':>7} {'p99 ms':>7}"


@dataclass(frozen=True, slots=True)
class TargetCase:
    """A model, its target, and a first guess at its capacity."""

    model: str
    target_ms: float
    guess_per_s: float


TARGET_CASES = (TargetCase("deep", 50, 400), TargetCase("mlp", 50, 4000))


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """The results of one load with a target. Units: requests per second while requests came; milliseconds."""

    offered_per_s: float
    in_time_per_s: float
    late: int
    refused_per_s: float
    unexpected: int
    p50_ms: float
    p99_ms: float
    refused_p99_ms: float
    cpu_us: float
    load_cpu_us: float
    late_p99_ms: float
    others: float

    @property
    def share_in_time(self) -> float:
        return self.in_time_per_s / self.offered_per_s


def compare_with_target(run: Run, seconds: float, target_ms: float) -> TargetFigures:
    """Compare the results of a load with a target."""
    result = run.seen
    answered = result.answered()
    in_time = int((answered["took_ns"] <= target_ms * 1e6).sum())
    return TargetFigures(
        offered_per_s=len(result.records) / seconds,
        in_time_per_s=in_time / seconds,
        late=len(answered) - in_time,
        refused_per_s=len(result.answered(503)) / seconds,
        unexpected=result.unexpected(200, 503) + result.skipped,
        p50_ms=result.latency_ms(0.5),
        p99_ms=result.latency_ms(0.99),
        refused_p99_ms=result.server_latency_ms(0.99, 503),
        cpu_us=result.cpu_us,
        load_cpu_us=result.load_cpu_us,
        late_p99_ms=result.lateness_ms(0.99),
        others=run.others,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """One model: its knee, and medians over the rounds of each load."""

    aim: TargetCase
    knee_per_s: float
    calm: TargetFigures
    overloaded: TargetFigures

    @property
    def peak_per_s(self) -> float:
        """The most that was ever answered in time."""
        return max(self.knee_per_s, self.calm.in_time_per_s, self.overloaded.in_time_per_s)

    def lines(self) -> list[str]:
        """Format the table and the verdicts."""
        lines = [f"{self.aim.model}, target {self.aim.target_ms:g} ms, at most {self.knee_per_s:,.0f}/s", HEAD]
        for load_factor, each in ((CALM_LOAD, self.calm), (OVERLOAD, self.overloaded)):
            line = f"{load_factor:>7.0%} load {each.offered_per_s:>9,.0f} {each.in_time_per_s:>9,.0f}"
            line += f" {each.share_in_time:>7.2%} {each.late:>6.0f} {each.refused_per_s:>7,.0f}"
            lines.append(f"{line} {each.p50_ms:>7.2f} {each.p99_ms:>7.2f}")
        for load_factor, each in ((CALM_LOAD, self.calm), (OVERLOAD, self.overloaded)):
            server, load = (each.offered_per_s * us / 1e6 for us in (each.cpu_us, each.load_cpu_us))
            text = f"{load_factor:.0%}: server CPU {each.cpu_us:.0f} us a request; cores: server {server:.2f}"
            lines.append(
                f"{text}, load {load:.2f}, others {each.others:.2f}; load late by {each.late_p99_ms:.2f} ms (p99)"
            )
        return lines + [f"{self.aim.model}: {each}" for each in self._verdicts()]

    def _verdicts(self) -> list[str]:
        calm, overloaded, target_ms = self.calm, self.overloaded, self.aim.target_ms
        peak_ratio = overloaded.in_time_per_s / self.peak_per_s
        unexpected = calm.unexpected + overloaded.unexpected
        return [
            verdict(f"in time at {CALM_LOAD:.0%}: {calm.share_in_time:.2%}", calm.share_in_time >= MIN_IN_TIME),
            verdict(f"goodput at {OVERLOAD:.0%}: {peak_ratio:.1%} of the peak", peak_ratio >= MIN_OF_PEAK),
            verdict(
                f"accepted p99 at {OVERLOAD:.0%}: {overloaded.p99_ms:.1f} of {target_ms:g} ms",
                overloaded.p99_ms <= target_ms,
            ),
            verdict(
                f"refusals p99: {overloaded.refused_p99_ms:.2f} ms, under {MAX_REFUSAL_MS:g}"
                if overloaded.refused_per_s
                else "refusals: there were none",
                overloaded.refused_per_s > 0 and overloaded.refused_p99_ms < MAX_REFUSAL_MS,
            ),
            verdict(f"neither 200 nor 503: {unexpected:.0f}", unexpected == 0),
        ]


def median(hits: Sequence[TargetFigures]) -> TargetFigures:
    """Return the medians of rounds."""
    return TargetFigures(*(statistics.median(getattr(each, name) for each in hits) for name in TargetFigures.__slots__))


def measure_case(server: Process, target_case: TargetCase, rounds: int, seconds: float, end: float) -> Report:
    """Measure one model, round after round. Repeat what was not calm, until `end`."""
    plain, targeted = variants(target_case)
    kinds = poisson(1, 1).kinds
    knee = knee_per_s(server, plain, kinds, target_case.guess_per_s, end)
    # before it has been under load, a server has learned run times only from its warm-up
    run(server, targeted, poisson(CALM_LOAD * knee, WARM_UP_S), MANY_CONNECTIONS)
    hits: dict[float, list[TargetFigures]] = {CALM_LOAD: [], OVERLOAD: []}
    for number in range(rounds):
        for load_factor, each in hits.items():
            arrivals = poisson(load_factor * knee, seconds, seed=number)
            each.append(
                compare_with_target(
                    run(server, targeted, arrivals, MANY_CONNECTIONS, end), seconds, target_case.target_ms
                )
            )
        print(f"{target_case.model}: round {number + 1} of {rounds} done", flush=True)
    return Report(target_case, knee, median(hits[CALM_LOAD]), median(hits[OVERLOAD]))


def variants(target_case: TargetCase) -> tuple[Variant, Variant]:
    """Name the model without and with its target."""
    return Variant(target_case.model, target_case.model), Variant(target_case.model, f"{target_case.model}_in_time")


def main() -> None:
    """Measure every model with its target, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.targets", description=__doc__)
    names = [target_case.model for target_case in TARGET_CASES]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--target-ms", type=float, help="in place of each model's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5, help="of each load")
    parser.add_argument("--minutes", type=float, default=3, help="for how long what was not calm is measured again")
    args = parser.parse_args()
    target_cases = [
        replace(target_case, target_ms=args.target_ms or target_case.target_ms)
        for target_case in TARGET_CASES
        if target_case.model in args.models
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the servers and removes the folders
    models.make(models.DEFAULT_FOLDER, {"deep": models.deep, "mlp": models.mlp})
    with tempfile.TemporaryDirectory() as name:
        for target_case in target_cases:
            plain, targeted = variants(target_case)
            write(Path(name), plain, DEFAULT_POLICY)
            write(Path(name), targeted, replace(DEFAULT_POLICY, latency_target_us=round(target_case.target_ms * 1000)))
        with penstock(Path(name)) as server:
            end = time.monotonic() + 60 * args.minutes
            reports = [
                measure_case(server, target_case, args.rounds, args.seconds, end) for target_case in target_cases
            ]
    for report in reports:
        print("", *report.lines(), sep="\n")


if __name__ == "__main__":
    main()
