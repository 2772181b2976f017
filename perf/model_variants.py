"""Variants: one model served under several names, each with its own batch policy, and their results under a load.

All are in one server, so that rounds can switch between them within a second and other load on the machine affects all.
The model has one thread: the machine's other core is for the server's loop and the load, so that those take nothing
from the model's work. Used by `perf/batching.py` and `perf/targets.py`.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.batching.spec import BatchPolicy

from . import models
from .background_load import MAX_BACKGROUND_CORES, BackgroundLoad, measure_when_idle
from .bench import Case, make_call
from .calls import Call
from .open_loop import OpenLoopResult, run_open_loop
from .open_loop_sender import INITIAL_CONNECTIONS
from .server_process import Process
from .simulator.arrivals import Arrivals, Kind, poisson
from .static_policies import Figures

OVERLOAD_FACTOR = 1.4
"""The load for finding the knee, as a multiple of the guess: what is then answered is the capacity."""
HIGH_SHARE, LOW_SHARE = 0.9, 0.4
"""Above the first fraction answered, the capacity is higher; below the second, the load itself hinders the server."""
KNEE_S, TRIES = 2.0, 6
MANY_CONNECTIONS = 1024
"""Connections that are open from the start under overload."""
LENGTHS: Mapping[str, int] = {"mlp": 512, "deep": 64}
"""Numbers in a row, if the model fixes them; otherwise the Kind does."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A model of the server: the one of `perf/models.py` that it is, and its name."""

    model: str
    name: str

    def calls(self, kinds: Sequence[Kind]) -> list[Call]:
        """Make a request of each kind."""
        calls = [make_call(Case(self.model, "binary", 1, (self._shape(kind),))) for kind in kinds]
        return [replace(each, path=f"/v2/models/{self.name}/infer") for each in calls]

    def _shape(self, kind: Kind) -> tuple[int, ...]:
        ((length, *_), *_) = kind.key  # type: ignore[misc]
        return kind.rows, LENGTHS.get(self.model, length)


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one variant. `others`: the cores that others used meanwhile."""

    figures: Figures
    seen: OpenLoopResult
    others: float


def write(folder: Path, variant: Variant, policy: BatchPolicy, threads: int = 1) -> None:
    """Write a variant into a model repository. The model itself must have been made (`models.make`)."""
    target = folder / variant.name / "1" / "model.onnx"
    target.parent.mkdir(parents=True)
    shutil.copyfile(models.DEFAULT_FOLDER / variant.model / "1" / "model.onnx", target)
    (folder / variant.name / "penstock.toml").write_text(toml(policy, threads), "utf-8")


def toml(policy: BatchPolicy, threads: int = 1) -> str:
    """Format a policy as a penstock.toml, without what it leaves to be learned."""
    values = {
        "max_batch_size": policy.max_batch_rows,
        "cap": policy.cap_rows,
        "max_queue_delay_us": policy.max_queue_delay_us,
        "preferred": list(policy.preferred_rows),
        "latency_target_ms": policy.latency_target_us / 1000,
    }
    lines = [f"{key} = {value}" for key, value in values.items() if value]
    return "\n".join(["[batching]", *lines, "", "[runtime]", f"intra_op_threads = {threads}", ""])


def run(
    server: Process, variant: Variant, arrivals: Arrivals, opened: int = INITIAL_CONNECTIONS, end: float = 0.0
) -> Run:
    """Send arrivals to a variant, with `opened` connections from the start.

    If others used the machine meanwhile, it is repeated at a calm moment, if there is one before `end`.
    """
    calls = variant.calls(arrivals.kinds)

    def measure() -> tuple[OpenLoopResult, float]:
        rows, batches = server.counts(variant.name)
        result = run_open_loop(server, calls, arrivals.at_ns, arrivals.kind_indexes, opened=opened)
        rows_after, batches_after = server.counts(variant.name)
        return result, (rows_after - rows) / max(batches_after - batches, 1)

    background = BackgroundLoad(server)
    (result, rows_per_batch), background_cores = measure(), background.cores()
    if background_cores > MAX_BACKGROUND_CORES and time.monotonic() < end:
        (result, rows_per_batch), background_cores = measure_when_idle(server, measure, end)
    answered = result.answered()
    sizes = np.array([kind.rows for kind in arrivals.kinds])
    span_s = max(arrivals.seconds, float((answered["due_ns"] + answered["took_ns"]).max(initial=0)) / 1e9)
    figures = Figures(
        goodput_per_s=float(sizes[answered["which"]].sum()) / span_s,
        p50_ms=result.latency_ms(0.5),
        p99_ms=result.latency_ms(0.99),
        rows_per_batch=rows_per_batch,
    )
    return Run(figures, result, background_cores)


def knee_per_s(server: Process, variant: Variant, kinds: Sequence[Kind], guess_per_s: float, end: float = 0.0) -> float:
    """Measure how many rows per second are answered under overload.

    The search starts from a guess. Answers in the second half count, when the queue is full.
    """
    sizes = np.array([kind.rows for kind in kinds])
    mean_rows = float(np.average(sizes, weights=[kind.weight for kind in kinds]))
    knee = 0.0
    for _ in range(TRIES):
        arrivals = poisson(OVERLOAD_FACTOR * guess_per_s / mean_rows, KNEE_S, kinds)
        answered = run(server, variant, arrivals, MANY_CONNECTIONS, end).seen.answered()
        at_s = (answered["due_ns"] + answered["took_ns"]) / 1e9
        in_steady_state = (at_s >= KNEE_S / 2) & (at_s < KNEE_S)
        answered_per_s = float(sizes[answered["which"][in_steady_state]].sum()) / (KNEE_S / 2)
        knee = max(knee, answered_per_s)
        offered_ratio = answered_per_s / (OVERLOAD_FACTOR * guess_per_s)
        if LOW_SHARE < offered_ratio < HIGH_SHARE:
            break
        guess_per_s = knee if offered_ratio <= LOW_SHARE else 2 * knee
    return knee


def median(runs: Sequence[Run]) -> Figures:
    """Return the medians of rounds."""
    names = ("goodput_per_s", "p50_ms", "p99_ms", "rows_per_batch")
    return Figures(*(statistics.median(getattr(each.figures, name) for each in runs) for name in names))
