"""Servers driven in turns by the same load, each with all its processes, and their results.

Used by seldon.py, deepaas.py and abeja.py to compare with the originals.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from . import processes
from .background_load import BackgroundLoad
from .claims import verdict
from .server_process import Process, await_ready
from .wrk import Load, Rounds

WARM_UP_S = 1


class ProcessTree(Process):
    """A server and all the processes that it has started."""

    def pids(self) -> list[int]:
        """Return the live processes, the server's main process first."""
        return processes.descended([self.pid], processes.living())

    def cpu_s(self) -> float:
        """CPU time so far of all processes together."""
        return processes.cpu_s(self.pids())


_F = TypeVar("_F", bound=ProcessTree)
Sides = Mapping[str, contextlib.AbstractContextManager[_F]]
Loads = Mapping[str, Callable[[_F, int], Load]]
"""By case: a function that drives a side for a number of seconds."""


@contextlib.contextmanager
def served(
    command: Sequence[str],
    folder: Path,
    port: int,
    check_ready: Callable[[Process], object],
    environ: Mapping[str, str] | None = None,
) -> Iterator[ProcessTree]:
    """Run a server in a folder, until the block ends. `environ` overrides variables."""
    variables = os.environ | dict(environ or {})
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log) as child,
    ):
        family = ProcessTree(child.pid, port)
        try:
            await_ready(family, child, check_ready)
            yield family
        finally:
            pids = family.pids()
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)
            for pid in pids:  # some of the originals' processes outlive the first
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass(slots=True)
class Line(Rounds):
    """The rounds of one side, with the cores that others used meanwhile."""

    others: list[float] = field(default_factory=list)


Lines = dict[tuple[str, str], Line]
"""By case and side."""


def measure(sides: Sides[_F], loads: Loads[_F], rounds: int, seconds: int) -> Lines:
    """Drive all sides in turns, with one round of warm-up. Raises: RuntimeError if any request failed."""
    lines: Lines = {(case, side): Line() for case in loads for side in sides}
    with contextlib.ExitStack() as stack:
        families = {side: stack.enter_context(served) for side, served in sides.items()}
        for number in range(rounds + 1):
            for (case, side), line in lines.items():
                background = BackgroundLoad(families[side])
                load = loads[case](families[side], seconds if number else WARM_UP_S)
                if load.refused:
                    raise RuntimeError(f"{side} refused {load.refused} of {case}")
                if number:
                    line.loads.append(load)
                    line.others.append(background.cores())
    return lines


def report(lines: Lines, min_ratios: Mapping[str, float]) -> Iterator[str]:
    """Format the medians, and for each case compare the first side with the others.

    `min_ratios`: by case, the least ratio of the first side's requests/s to the second's.
    """
    width = max(len(side) for _, side in lines) + 2
    case_width = max(len(case) for case, _ in lines) + 2
    yield f"{'':<{case_width}}{'':<{width}}{'req/s':>9}{'CPU us':>9}{'p50 ms':>9}{'p99 ms':>9}{'others':>9}"
    for (case, side), line in lines.items():
        figures = (line.median(name) for name in ("requests_per_s", "cpu_us", "p50_ms", "p99_ms"))
        rate, cpu_us, p50_ms, p99_ms = figures
        background_cores = f"{max(line.others, default=0.0):>9.2f}"
        broken = sum(load.broken for load in line.loads)
        failed = f"  {broken} FAILED" if broken else ""
        yield (
            f"{case:<{case_width}}{side:<{width}}{rate:>9,.0f}{cpu_us:>9.1f}{p50_ms:>9.2f}{p99_ms:>9.2f}{background_cores}{failed}"
        )
    our_side, *rest = dict.fromkeys(side for _, side in lines)
    for case, min_ratio in min_ratios.items():
        for side in rest:
            required_ratio = min_ratio if side == rest[0] else None
            yield f"{case}: {_compare_sides(lines[case, our_side], lines[case, side], required_ratio)} ({side})"


def _compare_sides(ours: Line, theirs: Line, min_ratio: float | None) -> str:
    throughput_ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
    throughput_text = f"{throughput_ratio:.1f} times the requests/s"
    if min_ratio is not None:
        throughput_text = verdict(f"{throughput_text}, at least {min_ratio:g}", throughput_ratio >= min_ratio)
    p99_text = verdict("a p99 that is lower", ours.median("p99_ms") < theirs.median("p99_ms"))
    cpu_ratio = theirs.median("cpu_us") / ours.median("cpu_us")
    return f"{throughput_text}; {p99_text}; {cpu_ratio:.1f} times less CPU"


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line, with the options for how long to measure."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="of load per side, case and round")
    return parser.parse_args()


def show(sides: Sides[_F], loads: Loads[_F], min_ratios: Mapping[str, float], args: argparse.Namespace) -> None:
    """Measure, and print the results. `args` comes from `arguments`."""
    before = os.getloadavg()[0]
    for line in report(measure(sides, loads, args.rounds, args.seconds), min_ratios):
        print(line, flush=True)
    print(
        f"the machine's load: {before:.1f} before, {os.getloadavg()[0]:.1f} after; others: the cores they used, at most"
    )
