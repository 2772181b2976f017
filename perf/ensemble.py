"""Ensembles beside the sum of their parts: `python -m penstock.perf.ensemble`.

One server has a small model under two names, an ensemble of the two, and an ensemble of ten steps of the first. In
turns, round after round, over HTTP with raw tensors on loopback:

- CPU: the ensemble of two, and each of its parts called directly, under the closed loop of wrk. The CPU time of the
server's process per request of the ensemble is compared with the sum for one request to each part, measured right
before and after: a client without the ensemble would make both calls.
- p50: the ensemble of ten steps at one connection, compared with ten times the step alone at one connection.

Then the same ten steps run inside one Engine, without a server: one request to the ensemble, and ten to the step, each
awaited before the next. Medians over the rounds count, also of the ratio: a shared machine can be slow for seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import uvloop

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.scan import scan

from . import bench, models, processes
from .calls import Call
from .claims import verdict
from .server_process import Process, penstock
from .wrk import Load, drive

WIDTH = 16
STEPS = 10
ROWS = 64
FIRST, SECOND, PAIR, CHAIN = "first", "second", "pair", "chain"
MAX_CPU_RATIO = 1.15
MAX_ADDED_MS = 1.0
WARM_UP_S = 1


def small() -> onnx.ModelProto:
    """Build one layer, 16-16: all overhead, like `iris`."""
    graph = models.Graph(seed=6)
    hidden = graph.node("MatMul", "input", graph.weight(WIDTH, WIDTH, fan_in=WIDTH))
    return graph.model("small", graph.node("Tanh", hidden), ("N", WIDTH), ("N", WIDTH))


def config(name: str, steps: Sequence[str]) -> str:
    """Write the config.pbtxt of an ensemble of consecutive steps."""
    tensors = ["input", *(f"t{number}" for number in range(1, len(steps))), "output"]
    lines = [f'name: "{name}" platform: "ensemble" max_batch_size: {ROWS}']
    lines += [f'{side} {{ name: "{side}" data_type: TYPE_FP32 dims: {WIDTH} }}' for side in ("input", "output")]
    step_entries = []
    for number, model in enumerate(steps):
        maps = f'input_map {{ key: "input" value: "{tensors[number]}" }}'
        maps += f' output_map {{ key: "output" value: "{tensors[number + 1]}" }}'
        step_entries.append(f'step {{ model_name: "{model}" model_version: -1 {maps} }}')
    return "\n".join([*lines, f"ensemble_scheduling {{ {' '.join(step_entries)} }}", ""])


def write(folder: Path) -> None:
    """Write the models and the ensembles as a repository."""
    models.make(folder, {FIRST: small, SECOND: small})
    for name, steps in ((PAIR, (FIRST, SECOND)), (CHAIN, (FIRST,) * STEPS)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config(name, steps), "utf-8")


def call(model: str) -> Call:
    """Make a request: one row, raw."""
    return bench.make_call(bench.Case(model, "binary", 1, ((1, WIDTH),)))


@dataclass(slots=True)
class Sides:
    """The results of the rounds: loads by model, and p50 of one and of ten calls inside the Engine. Units: ms."""

    busy: dict[str, list[Load]] = field(default_factory=dict)
    alone: dict[str, list[Load]] = field(default_factory=dict)
    inside: dict[str, list[float]] = field(default_factory=dict)

    def round(self, server: Process, connections: int, seconds: int) -> None:
        """Measure everything over HTTP once, one after the other."""
        for model in (FIRST, PAIR, SECOND):
            self.busy.setdefault(model, []).append(drive(server, call(model), connections, seconds))
        for model in (FIRST, CHAIN):
            self.alone.setdefault(model, []).append(drive(server, call(model), 1, seconds))

    def failed(self) -> int:
        """Count the failed requests."""
        loads = [load for side in (self.busy, self.alone) for each in side.values() for load in each]
        return sum(load.refused + load.broken for load in loads)

    def lines(self) -> list[str]:
        """Format both sides of each comparison, and the verdicts."""
        cpu = {name: _median(loads, lambda load: load.cpu_us) for name, loads in self.busy.items()}
        rate = {name: _median(loads, lambda load: load.requests_per_s) for name, loads in self.busy.items()}
        p50 = {name: _median(loads, lambda load: load.p50_ms) for name, loads in self.alone.items()}
        inside_ms = {name: statistics.median(each) for name, each in self.inside.items()}
        rounds = zip(*(self.busy[name] for name in (FIRST, PAIR, SECOND)), strict=True)
        ratios = [pair.cpu_us / (first.cpu_us + second.cpu_us) for first, pair, second in rounds]
        ratio = statistics.median(ratios)
        line = (
            f"server CPU: ensemble of two {cpu[PAIR]:.1f} us a request; its parts called directly {cpu[FIRST]:.1f} + "
        )
        line += f"{cpu[SECOND]:.1f} us; a round {min(ratios):.2f} to {max(ratios):.2f} times, "
        return [
            f"under load: {', '.join(f'{name} {each:,.0f}/s' for name, each in rate.items())}",
            verdict(f"{line}median {ratio:.2f}, at most {MAX_CPU_RATIO}", ratio <= MAX_CPU_RATIO),
            _chain("HTTP, one connection", p50[CHAIN], p50[FIRST] * STEPS),
            _chain("inside the Engine", inside_ms[CHAIN], inside_ms[FIRST]),
            *([f"{self.failed()} FAILED"] if self.failed() else []),
        ]


def _chain(where: str, chain_ms: float, parts_ms: float) -> str:
    more_ms = chain_ms - parts_ms
    text = f"p50, {where}: {STEPS} steps in a row {chain_ms:.3f} ms; {STEPS} calls of the step {parts_ms:.3f} ms"
    return verdict(f"{text}: {more_ms:+.3f} ms, at most +{MAX_ADDED_MS:g}", more_ms <= MAX_ADDED_MS)


def _median(loads: Sequence[Load], figure: Callable[[Load], float]) -> float:
    return float(statistics.median(figure(load) for load in loads))


async def inside(folder: Path, count: int) -> Mapping[str, float]:
    """Return the p50 of one request to the chain, and of ten to the step, one after another. Units: ms."""
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    entries, _ = scan([folder], Defaults())
    for entry in sorted(entries, key=lambda entry: bool(entry.dependencies)):
        await engine.load(entry.specs[0])
    row = [np.ones((1, WIDTH), np.float32)]
    chain, step = engine.model(CHAIN), engine.model(FIRST)
    latencies_ns: dict[str, list[int]] = {CHAIN: [], FIRST: []}
    for _ in range(count):
        start_ns = time.perf_counter_ns()
        await engine.infer(chain, [*row])
        middle_ns = time.perf_counter_ns()
        for _ in range(STEPS):
            await engine.infer(step, [*row])
        latencies_ns[CHAIN].append(middle_ns - start_ns)
        latencies_ns[FIRST].append(time.perf_counter_ns() - middle_ns)
    await engine.stop(10)
    return {name: statistics.median(each) / 1e6 for name, each in latencies_ns.items()}


def pin_to_separate_cpus(server: Process) -> None:
    """Pin the server to one CPU and the load to the others, if there are several.

    When the kernel moved them, the ratio of a round was between 0.7 and 1.65; pinned, between 0.74 and 1.37.
    """
    server_cpu, *load_cpus = sorted(os.sched_getaffinity(0))
    if load_cpus:
        for thread in (processes.PROC / str(server.pid) / "task").iterdir():
            os.sched_setaffinity(int(thread.name), {server_cpu})
        os.sched_setaffinity(0, load_cpus)


def main() -> None:
    """Run the rounds and print both sides."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.ensemble", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=int, default=1, help="of load per side and round")
    parser.add_argument("--connections", type=int, default=32, help="of the load")
    parser.add_argument("--calls", type=int, default=500, help="inside the Engine, per round")
    args = parser.parse_args()
    sides = Sides()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        with penstock(folder) as server:
            pin_to_separate_cpus(server)
            for model in (FIRST, SECOND, PAIR, CHAIN):
                sent = call(model)
                server.request("POST", sent.path, sent.bodies[0], sent.headers)
            Sides().round(server, args.connections, WARM_UP_S)
            for number in range(args.rounds):
                sides.round(server, args.connections, args.seconds)
                print(f"round {number + 1} of {args.rounds} done", flush=True)
        for _ in range(args.rounds):
            for model, ms in uvloop.run(inside(folder, args.calls)).items():
                sides.inside.setdefault(model, []).append(ms)
    print(*sides.lines(), sep="\n")


if __name__ == "__main__":
    main()
