"""Hooks: their cost, and the delay they cause, in the server's process and in workers. `python -m penstock.perf.hooks`.

Three tables, each measured within one run: the gain from a second worker for a hook that computes 5 ms in pure Python;
the latency of a small model beside that hook; and the cost of a one-line hook in each place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import models
from .calls import Call
from .open_loop import run_open_loop
from .server_process import Process, penstock
from .side_by_side import ProcessTree
from .wrk import Load, drive, require_programs

HEAVY = """
import time

def pre_inference(sample, metadata):
    end = time.thread_time_ns() + 5_000_000
    while time.thread_time_ns() < end:
        sum(range(200))
    return sample
"""
LIGHT = "def pre_inference(sample, metadata): return sample\n"
SAMPLE = json.dumps([[5.1, 3.5, 1.4, 0.2]]).encode()
TENSOR = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}
JSON = {"Content-Type": "application/json"}
PREDICT = Call("/v2/models/hooked/predict", (SAMPLE,), JSON)
INFER = Call("/v2/models/iris/infer", (json.dumps({"inputs": [TENSOR]}).encode(),), JSON)
BESIDE_PER_S = 300
"""Requests to the other model: few, so that its latency is measured and not its load."""


@contextlib.contextmanager
def served(source: str, workers: int) -> Iterator[Process]:
    """Serve iris twice: `iris` plain and `hooked` with hooks."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        models.make(root, {"iris": models.iris, "hooked": models.iris})
        (root / "hooked" / "hooks.py").write_text(source)
        (root / "hooked" / "penstock.toml").write_text(f'[hooks]\nfile = "hooks.py"\nworkers = {workers}\n')
        with penstock(root) as server:
            server.request("POST", PREDICT.path, SAMPLE)
            yield server


def measured(server: Process, connections: int, seconds: int) -> tuple[Load, float]:
    """Drive the hooked model. Returns: the load, and the workers' CPU per request in microseconds."""
    family = ProcessTree(server.pid, server.port)
    before_s = family.cpu_s() - server.cpu_s()
    load = drive(server, PREDICT, connections, seconds)
    spent_s = family.cpu_s() - server.cpu_s() - before_s
    return load, spent_s * 1e6 / max(load.requests_per_s * seconds, 1)


def several(seconds: int, rounds: int) -> Iterator[str]:
    """Report the throughput of the heavy hook in the server, in one worker and in two."""
    rates: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for _ in range(rounds):
        for workers, values in rates.items():
            with served(HEAVY, workers) as server:
                values.append(measured(server, 16, seconds)[0].requests_per_s)
    medians = {workers: statistics.median(values) for workers, values in rates.items()}
    for workers, rate in medians.items():
        yield f"5 ms of Python, {workers or 'no'} worker{'s' * (workers != 1)}: {rate:7.1f} requests/s"
    yield f"two workers do {medians[2] / medians[1]:.2f} times what one does (1.8 is asked for)"


def beside(seconds: int, rounds: int) -> Iterator[str]:
    """Report the latency of iris, alone and beside the heavy hook."""
    at_ns = np.arange(BESIDE_PER_S * seconds) * (1_000_000_000 // BESIDE_PER_S)
    latencies_ms: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for workers in (0, 1, 2):
            with served(HEAVY, workers) as server:
                for label, connections in (("alone", 0), (f"beside {workers or 'no'} workers", 4)):
                    loading = threading.Thread(target=drive, args=(server, PREDICT, connections, seconds + 1))
                    if connections:
                        loading.start()
                    result = run_open_loop(server, [INFER], at_ns, connections=64, opened=16)
                    if connections:
                        loading.join()
                    latencies_ms.setdefault(label, []).append(
                        (result.server_latency_ms(0.5), result.server_latency_ms(0.99))
                    )
    alone_p99_ms = statistics.median(p99 for _, p99 in latencies_ms["alone"])
    for label, values in latencies_ms.items():
        p50, p99 = (statistics.median(column) for column in zip(*values, strict=True))
        yield f"iris {label:17}: p50 {p50:6.2f} ms, p99 {p99:6.2f} ms, {p99 - alone_p99_ms:+6.2f} ms"


def cost(seconds: int, rounds: int) -> Iterator[str]:
    """Report the CPU cost of the light hook per request, at 64 connections."""
    costs: dict[int, list[tuple[float, float, float]]] = {0: [], 1: [], 2: []}
    for _ in range(rounds):
        for workers, values in costs.items():
            with served(LIGHT, workers) as server:
                load, worker_cpu_us = measured(server, 64, seconds)
                values.append((load.cpu_us, worker_cpu_us, load.requests_per_s))
    for workers, values in costs.items():
        server_cpu_us, worker_cpu_us, rate = (statistics.median(column) for column in zip(*values, strict=True))
        yield (
            f"a line of Python, {workers or 'no'} workers: server {server_cpu_us:5.1f} us, "
            f"workers {worker_cpu_us:5.1f} us, together {server_cpu_us + worker_cpu_us:5.1f} us "
            f"of CPU per request; {rate:7.0f} requests/s"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    require_programs("wrk")
    print(f"{os.cpu_count()} CPUs")
    for table in (several, beside, cost):
        for line in table(args.seconds, args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
