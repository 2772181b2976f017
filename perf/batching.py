"""`make bench-batching`: the default batcher beside the best of a grid of static settings, simulated and real.

Six loads (the cells of perf/static_policies.py): Poisson at 30, 60 and 90% of the knee, bursty, two shapes, four sizes.
First, every static setting is simulated with the run times of this machine. Then one server serves the default, the few
static settings that did best, and a common first guess, as models of different names, and each is sent the same
arrivals in turns, round after round. The first rounds choose the best static setting and later rounds compare it with
the default: in the rounds that chose it, the best of several was also lucky, by a third on a shared machine. Medians
count. The default takes part twice: the difference between the two is the noise of the machine. The knee is the highest
rate that any of them answers, in this run.

The model has one thread, see perf/model_variants.py. Real latencies are measured from when a request was due, so they
include the load generator's own lateness, equally for all.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.batching.spec import BatchPolicy

from . import models
from .argument_types import non_negative_float, positive_float, positive_int
from .claims import verdict
from .model_variants import Run, Variant, knee_per_s, median, run, write
from .reality import MODEL, calibrate
from .server_process import Process, penstock
from .simulator.arrivals import Arrivals, Kind
from .simulator.front_end import simulate_server
from .simulator.run_times import RunTimes
from .simulator.simulation import Result
from .static_policies import DEFAULT_POLICY, TWO_SHAPES, Cell, Comparison, cells, compare_simulated, static_grid, table

KNEE_GUESS_PER_S = 4000.0
TWIN = "the default again"
FIRST_GUESS = "cap 64, 0 ms"
STATIC_COUNT = 3
"""The number of static settings measured for real in each cell, besides the first guess."""
WITHOUT_RANKING = ("cap 8, 0 ms", "cap 16, 0 ms", "cap 32, 0 ms", "cap 32, 1 ms")


def promising_settings(simulated: Comparison | None, count: int = STATIC_COUNT) -> list[str]:
    """Name the static settings to measure for real: the best of each cap, and of those the best few.

    Good settings of the same cap hardly differ, so the overall best few would all have the same cap.
    """
    if simulated is None:
        return [*WITHOUT_RANKING[:count], FIRST_GUESS]
    best_goodput_per_s = max(figures.goodput_per_s for figures in simulated.static.values())
    grid = static_grid(simulated.cell.max_rows)
    ranked = sorted(
        simulated.static,
        key=lambda name: (simulated.static[name].goodput_per_s < 0.95 * best_goodput_per_s, _p99(simulated, name)),
    )
    best: dict[int | None, str] = {}
    for name in ranked:
        best.setdefault(grid[name].cap_rows, name)
    chosen = list(best.values())[:count]
    return chosen if FIRST_GUESS in chosen else [*chosen, FIRST_GUESS]


def _p99(simulated: Comparison, name: str) -> float:
    return simulated.static[name].p99_ms


@dataclass(slots=True)
class CellRounds:
    """One cell in reality: its variants by name (the default is ""), which take part in rounds, and the results."""

    cell: Cell
    variants: Mapping[str, Variant]
    names: list[str]
    knee_per_s: float = 0.0
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def keep_best(self) -> None:
        """Keep the default, twice, and the best static settings, and drop the rounds that chose them."""
        chosen = self.comparison()
        self.names = list(dict.fromkeys(("", TWIN, chosen.best_p99, chosen.best_goodput)))
        self.runs = {}

    def comparison(self) -> Comparison:
        """Summarize the rounds."""
        figures = {name: median(runs) for name, runs in self.runs.items() if name != TWIN}
        return Comparison(self.cell, figures.pop(""), figures)

    def noise(self) -> float:
        """Return the ratio of the default's two p99s."""
        return median(self.runs[TWIN]).p99_ms / median(self.runs[""]).p99_ms

    def cpu_us(self, name: str) -> float:
        """Return the server's CPU time per request of one variant."""
        return statistics.median(each.seen.cpu_us for each in self.runs[name])


class Trial:
    """All cells in reality, and the repository that serves them."""

    def __init__(self, settings: Mapping[Cell, Sequence[str]]) -> None:
        self._policies: dict[Variant, BatchPolicy] = {}
        self.cells = []
        for cell, names in settings.items():
            grid = {"": DEFAULT_POLICY, TWIN: DEFAULT_POLICY} | {name: static_grid()[name] for name in names}
            model = "ragged" if cell.kinds is TWO_SHAPES else MODEL
            variants = {name: Variant(model, _model_name(model, name)) for name in grid}
            self._policies |= {variants[name]: policy for name, policy in grid.items()}
            self.cells.append(CellRounds(cell, variants, ["", *names]))

    def write(self, folder: Path) -> None:
        """Write every variant into a model repository."""
        for variant, policy in self._policies.items():
            write(folder, variant, policy)

    def find_knees(self, server: Process, guess_per_s: float, end: float) -> None:
        """Measure the knee of each kind of load: the most that the default, best static or first guess answers."""
        knees: dict[tuple[Kind, ...], float] = {}
        for each in self.cells:
            kinds = each.cell.kinds
            if kinds not in knees:
                _, _, best, *_ = names = list(each.variants)
                tried = {"", best, names[-1]}
                knees[kinds] = max(knee_per_s(server, each.variants[name], kinds, guess_per_s, end) for name in tried)
            each.knee_per_s = knees[kinds]

    def round(self, server: Process, number: int, seconds: float, end: float) -> None:
        """Send the variants of each cell the same arrivals, in an order that rotates from round to round."""
        for each in self.cells:
            arrivals = each.cell.arrivals(each.knee_per_s, seconds, number)
            start = number % len(each.names)
            for name in each.names[start:] + each.names[:start]:
                each.runs.setdefault(name, []).append(run(server, each.variants[name], arrivals, end=end))


def _model_name(model: str, name: str) -> str:
    return "_".join([model, *"".join(c if c.isalnum() else " " for c in name).split()])


def verdicts(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Report for each cell whether the default meets its targets."""
    for each in comparisons:
        text = f"goodput {each.goodput_ratio:.3f} of the best static, at least 0.95"
        text += f"; p99 {each.p99_ratio:.2f} times the best, at most 1.1"
        yield verdict(f"{each.cell.name}: {text}", each.passes)


def cost_lines(fields: Sequence[CellRounds]) -> Iterator[str]:
    """Report for each cell the cost of its requests, and how much the default differs from itself."""
    for each in fields:
        best = each.comparison().best_p99
        text = f"server CPU {each.cpu_us(''):.0f} us a request, {each.cpu_us(best):.0f} with {best}"
        load_us = statistics.median(run.seen.load_cpu_us for run in each.runs[""])
        late_ms = statistics.median(run.seen.lateness_ms(0.99) for run in each.runs[""])
        others = max(run.others for runs in each.runs.values() for run in runs)
        text += f"; the load {load_us:.0f}, late by {late_ms:.2f} ms (p99); others had {others:.2f} cores at most"
        failed = sum(run.seen.unexpected(200) + run.seen.skipped for runs in each.runs.values() for run in runs)
        text += f"; p99 of {TWIN} {each.noise():.2f} times"
        yield f"{each.cell.name}: {text}" + (f"; {failed} not served" if failed else "")


def run_real(settings: Mapping[Cell, Sequence[str]], guess_per_s: float, args: argparse.Namespace) -> list[CellRounds]:
    """Serve every setting and send each its cell's load, round after round."""
    trial = Trial(settings)
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        trial.write(Path(name))
        with penstock(Path(name)) as server:
            trial.find_knees(server, guess_per_s, end)
            for number in range(rounds := args.choosing + args.rounds):
                if number == args.choosing:
                    for each in trial.cells:
                        each.keep_best()
                trial.round(server, number, args.seconds, end)
                print(f"round {number + 1} of {rounds} done", flush=True)
    return trial.cells


def run_simulated(requests: int, minutes: float) -> tuple[list[Comparison], float]:
    """Simulate the whole grid with the measured behavior of a server on this machine. Also returns its knee."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), Variant(MODEL, MODEL), DEFAULT_POLICY)
        with penstock(Path(name)) as server:
            calibration = calibrate(server, time.monotonic() + 60 * minutes)

    def serve(arrivals: Arrivals, policy: BatchPolicy, run_times: RunTimes) -> Result:
        return simulate_server(arrivals, policy, run_times, calibration.costs)

    return compare_simulated(calibration.run_times, requests, run=serve), calibration.peak_per_s


def show(title: str, comparisons: Sequence[Comparison]) -> None:
    """Print one table and its verdicts."""
    print("", title, table(comparisons), *verdicts(comparisons), sep="\n", flush=True)


def main() -> None:
    """Compare, simulated and real, and print the tables."""
    parser = argparse.ArgumentParser(prog="make bench-batching", description=__doc__)
    parser.add_argument("--choosing", type=positive_int, default=2, help="rounds that choose the best static for real")
    parser.add_argument("--rounds", type=positive_int, default=5, help="that compare it with the default")
    parser.add_argument("--seconds", type=positive_float, default=2, help="of load per cell, setting and round")
    parser.add_argument(
        "--statics", type=positive_int, default=STATIC_COUNT, help="settings tried beside the first guess"
    )
    parser.add_argument("--requests", type=positive_int, default=6000, help="simulated per cell and setting")
    parser.add_argument(
        "--minutes", type=non_negative_float, default=5, help="for how long to measure anew what was not calm"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--simulated-only", action="store_true")
    only.add_argument("--real-only", action="store_true", help="beside static settings that nobody has ranked")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the servers and removes the folders
    models.make(models.DEFAULT_FOLDER)
    knee, ranked = KNEE_GUESS_PER_S, dict[Cell, Comparison]()
    if not args.real_only:
        comparisons, knee = run_simulated(args.requests, args.minutes / 4)
        ranked = {each.cell: each for each in comparisons}
        show(f"simulated, {knee:,.0f} rows/s at most", comparisons)
    if not args.simulated_only:
        settings = {cell: promising_settings(ranked.get(cell), args.statics) for cell in cells()}
        fields = run_real(settings, knee, args)
        knees = ", ".join(f"{each.cell.name} {each.knee_per_s:,.0f}" for each in fields)
        show(f"real, rows/s at most: {knees}", [each.comparison() for each in fields])
        print(*cost_lines(fields), sep="\n")


if __name__ == "__main__":
    main()
