"""Part 3: `penstock perf` beside perf_analyzer, with the same arguments on the same server.

perf_analyzer is a compiled client that takes much of the cores that the server needs, so the server is one that needs
none: INSTANCES instances of a Python model that sleeps. Both write perf_analyzer's own CSV, which is parsed alike. The
two take turns. If they differ, they are measured four more times, and the medians of all five turns count: a turn is a
thousand requests, so a single hiccup of the machine, which delays the sixteen in flight, determines its p99.
"""

from __future__ import annotations

import contextlib
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.perf.calls import HOST
from penstock.perf.claims import verdict
from penstock.perf.server_process import penstock_over_grpc

WITHIN = 0.05
INSTANCES, SLEEP_S = 8, 0.02
WINDOW_MS = 1000
MAX_RUNS = 5
FIGURES = {
    "requests/s": "Inferences/Second", "avg": "Avg latency", "p50": "p50 latency", "p90": "p90 latency",
    "p95": "p95 latency", "p99": "p99 latency",
}  # fmt: skip
"""Our names for the columns of the CSV; latencies in microseconds."""
BURST_US = (*[2000] * (INSTANCES + INSTANCES // 2 - 1), 80_000)
"""A recorded trace: half again as many requests as there are places, then time for all of them."""
_SERVER = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")
_PEERS = Path(sys.prefix) / "peers"
_PROGRAM = _PEERS / "perf_analyzer"
_OURS = (sys.executable, "-m", "penstock.server.cli", "perf")
_ENDS_WITHIN_S = 60

_CODE = f"""import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({SLEEP_S})
        inputs = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.as_numpy())]) for each in inputs]
"""
_CONFIG = f"""backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
instance_group {{ kind: KIND_CPU count: {INSTANCES} }}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: arguments that both accept. `intervals`: with BURST_US as its file.

    `times`: a factor for its windows. perf_analyzer's Poisson arrivals are the same in every run, and so are ours: it
    takes 9 s of each until their numbers are equal, and at this load no request waits, in either. `late`: perf_analyzer
    notices answers late there, by its own table: its latency is far above the server's (HTTP --async at a rate: 34 ms
    for 21; without --async it agrees). Ours is then compared with the server's statistics.
    """

    name: str
    words: str
    grpc: bool = False
    intervals: bool = False
    times: int = 1
    late: bool = False


_CLOSED = f"--concurrency-range {2 * INSTANCES}"
_EVEN, _POISSON = "--request-rate-range 200", "--request-rate-range 100 --request-distribution poisson"
_THREADS = f"--max-threads {4 * INSTANCES}"
CASES = (
    Case("HTTP", _CLOSED),
    Case("HTTP, async", f"--async {_CLOSED}"),
    Case("HTTP, JSON", f"--input-tensor-format json --output-tensor-format json {_CLOSED}"),
    Case("HTTP, shared memory", f"--shared-memory system {_CLOSED}"),
    Case("HTTP, even rate", f"{_EVEN} {_THREADS}"),
    Case("HTTP, Poisson", f"{_POISSON} {_THREADS}", times=3),
    Case("HTTP, recorded", _THREADS, intervals=True),
    Case("HTTP, async, even rate", f"--async {_EVEN}", late=True),
    Case("gRPC", _CLOSED, grpc=True),
    Case("gRPC, async", f"--async {_CLOSED}", grpc=True),
    Case("gRPC, shared memory", f"--shared-memory system {_CLOSED}", grpc=True),
    Case("gRPC, even rate", f"--async {_EVEN}", grpc=True),
    Case("gRPC, Poisson", f"--async {_POISSON}", grpc=True, times=3),
    Case("gRPC, recorded", "--async", grpc=True, intervals=True),
    Case("gRPC, streaming", f"--streaming --async {_CLOSED}", grpc=True),
    Case("gRPC, streaming, even rate", f"--streaming --async {_EVEN}", grpc=True),
)

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Served:
    """The server's ports, and a folder for files."""

    http_port: int
    grpc_port: int
    folder: Path
    window_ms: int

    def turn(self, case: Case) -> tuple[Figures, Figures]:
        """Run both, ours first."""
        return self.run(_OURS, case), self.run((str(_PROGRAM),), case)

    def run(self, program: Sequence[str], case: Case) -> Figures:
        """Run one of the two. Returns: its FIGURES. Raises: RuntimeError with its output if it fails."""
        table = self.folder / "table.csv"
        table.unlink(missing_ok=True)
        protocol_and_port = ("grpc", self.grpc_port) if case.grpc else ("http", self.http_port)
        command = [
            *program,
            "-m",
            "held",
            "-i",
            protocol_and_port[0],
            "-u",
            f"{HOST}:{protocol_and_port[1]}",
            *case.words.split(),
        ]
        if case.intervals:
            command += ["--request-intervals", str(self.folder / "intervals")]
        command += ["-p", str(self.window_ms * case.times), "-s", "999", "-r", "3", "--verbose-csv", "-f", str(table)]
        completed = subprocess.run(
            command, env={**os.environ, "LD_LIBRARY_PATH": str(_PEERS)}, capture_output=True, text=True, check=False,
            timeout=_ENDS_WITHIN_S,
        )  # fmt: skip
        if completed.returncode or not table.exists():
            raise RuntimeError(f"{command}: {(completed.stdout + completed.stderr)[-1000:]}")
        with table.open(encoding="utf-8", newline="") as file:
            return figures(file)


def figures(table: Iterator[str]) -> Figures:
    """Parse the FIGURES from a CSV of one level, and the request time from the server's statistics: `server`."""
    (row,) = csv.DictReader(table)
    server = {"server": sum(float(row[column]) for column in _SERVER)}
    return {name: float(row[column]) for name, column in FIGURES.items()} | server


def relative_differences(ours: Figures, theirs: Figures) -> Figures:
    """Return the differences of ours from theirs, as fractions of theirs."""
    return {name: ours[name] / theirs[name] - 1 for name in FIGURES}


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the medians of several turns."""
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def median_comparison(run_both: Callable[[], tuple[Figures, Figures]], max_runs: int) -> tuple[Figures, Figures, int]:
    """Take one turn, or all if the two differ in it. Returns: the medians, and the number of turns."""
    runs = [run_both()]
    if not _close(*runs[0]):
        runs += [run_both() for _ in range(max_runs - 1)]
    ours, theirs = (medians(side) for side in zip(*runs, strict=True))
    return ours, theirs, len(runs)


def _close(ours: Figures, theirs: Figures) -> bool:
    return all(abs(difference) <= WITHIN for difference in relative_differences(ours, theirs).values())


def report(*, quick: bool) -> Iterator[str]:
    """Run everything, and yield the lines as they come."""
    if not _PROGRAM.exists():
        raise SystemExit("this needs perf_analyzer in .venv/peers: .ci/peers fetches it")
    yield (
        f"perf_analyzer and `penstock perf` with the same flags, {INSTANCES} instances that take {SLEEP_S * 1e3:g} ms: "
        f"ours, and how far from perf_analyzer's; latencies in ms"
    )
    with tempfile.TemporaryDirectory() as name, _served(Path(name), WINDOW_MS // (4 if quick else 1)) as served:
        for case in CASES:
            ours, theirs, runs = median_comparison(partial(served.turn, case), 1 if quick or case.late else MAX_RUNS)
            line = f"{case.name:<27}" + "".join(_cell(*each) for each in _comparison_cells(ours, theirs))
            line += f" (medians of {runs})" if runs > 1 else ""
            if case.late:
                line += (
                    f" (late by itself; the server says {theirs['server'] / 1e3:.1f}: {_excess_over_server(ours):+.1%})"
                )
            yield verdict(line, abs(_excess_over_server(ours)) <= WITHIN if case.late else _close(ours, theirs))


def _excess_over_server(figures: Figures) -> float:
    """Return how much longer requests took than by the server's statistics, as a fraction."""
    return figures["avg"] / figures["server"] - 1


def _comparison_cells(ours: Figures, theirs: Figures) -> Iterator[tuple[str, float, float]]:
    for name, difference in relative_differences(ours, theirs).items():
        yield name, ours[name] / (1 if name == "requests/s" else 1e3), difference


def _cell(name: str, value: float, difference: float) -> str:
    return f" {name} {value:.1f} {difference:+.1%}".ljust(22)


@contextlib.contextmanager
def _served(folder: Path, window_ms: int) -> Iterator[Served]:
    model = folder / "models" / "held"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(_CODE, "utf-8")
    (model / "config.pbtxt").write_text(_CONFIG, "utf-8")
    (folder / "intervals").write_text("".join(f"{each}\n" for each in BURST_US), "ascii")
    with penstock_over_grpc(folder / "models", "--allow-client-shm") as (server, grpc_port):
        yield Served(server.port, grpc_port, folder, window_ms)
