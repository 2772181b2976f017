"""The simulator against reality: mlp under Poisson load, measured and simulated. `python -m penstock.perf.reality`.

A server is calibrated: batches of 1, 2, 4, ... rows from a single client, and, from one load, what the event loop
spends on requests. Then a load is sent, and the simulator gets the moments at which each request was really sent. This
is done for each of five loads, each right after a calibration, since the speed of a shared host changes by a third
within minutes. All times are from sent to answered, by the kernel's timestamps, so the load's own lateness does not
count. The model has one thread, so that loop and load have the other core. Other work on the machine affects the
measured figures but not the simulated ones: each part is measured at a moment when others leave the machine idle
(background_load.py), as long as there is time to wait for one. Figures are medians, and the table reports what others
used.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS, BatchPolicy

from . import models
from .background_load import measure_when_idle
from .bench import Case, make_call
from .calls import HOST, Call
from .open_loop import OpenLoopResult, run_open_loop
from .processes import loop_ns
from .server_process import Process, penstock
from .simulator.arrivals import SHAPELESS, Arrivals, poisson, recorded
from .simulator.front_end import WIRE_NS, FrontCosts, simulate_server
from .simulator.run_times import RunTimes, from_table

MODEL = "mlp"
SHARES = (0.15, 0.3, 0.45, 0.6, 0.75)
"""The loads, as fractions of the simulated server's capacity."""
WITHIN = 0.15
ALONE_S = 0.8
LOADED_SHARE = 0.4
WARM_UP_RUNS = 20
_SIZES = (1, 2, 4, 8, 16, 32, 64)
POLICY = BatchPolicy(max_batch_rows=DEFAULT_MAX_BATCH_ROWS)
_SO_TIMESTAMPNS = 35  # Linux, asm-generic/socket.h


@dataclass(frozen=True, slots=True)
class Calibration:
    """The simulator's parameters for one server on one machine, and the capacity that it predicts for the server."""

    run_times: RunTimes
    costs: FrontCosts
    peak_per_s: float


@dataclass(frozen=True, slots=True)
class SingleClient:
    """Requests of one size from a single client: the latency of each, and the mean times of the run and of the loop."""

    took_ns: np.ndarray[Any, np.dtype[np.float64]]
    run_ns: float
    loop_ns: float


@dataclass(frozen=True, slots=True)
class Point:
    """One load: measured and simulated p50 and p99, and what others used meanwhile.

    Units: milliseconds, rows per second, cores.
    """

    rate_per_s: float
    others: float
    measured: tuple[float, float]
    simulated: tuple[float, float]
    rows_per_batch: tuple[float, float]


def calibrate(server: Process, end: float) -> Calibration:
    """Measure an otherwise idle server, each part at a calm moment before `end`, if there is one."""
    alone_by_size = {
        size: measure_when_idle(server, partial(_measure_single_client, server, size), end)[0] for size in _SIZES
    }
    # the run varies; everything else stays at its mean
    run_times = from_table({
        size: np.maximum(measured.run_ns + measured.took_ns - measured.took_ns.mean(), measured.run_ns / 4).tolist()
        for size, measured in alone_by_size.items()
    })  # fmt: skip
    _, knee_per_s = run_times.knee(SHAPELESS, max(_SIZES))
    load = poisson(LOADED_SHARE * knee_per_s, 2 * ALONE_S, seed=7)
    (loaded_ns, rows_per_batch), _ = measure_when_idle(server, lambda: _measure_loaded(server, load), end)
    single_row = alone_by_size[1]
    costs = _split_front_costs(
        single_row.loop_ns, loaded_ns, rows_per_batch, float(single_row.took_ns.mean()) - single_row.run_ns
    )
    overload = poisson(2 * knee_per_s, 1.0, seed=7)
    return Calibration(run_times, costs, simulate_server(overload, POLICY, run_times, costs).goodput_per_s())


def _measure_single_client(server: Process, rows: int) -> SingleClient:
    before, before_ns = _runs(server), loop_ns(server.pid)
    took_ns = _closed_loop_latencies_ns(server, _call(rows), ALONE_S)
    spent_ns = loop_ns(server.pid) - before_ns
    runs, ns = _since(before, _runs(server))[rows]
    return SingleClient(took_ns, ns / runs, spent_ns / runs)


def _measure_loaded(server: Process, load: Arrivals) -> tuple[float, float]:
    """Return what the loop spends on a request under a load, and the rows per batch."""
    before_ns = loop_ns(server.pid)
    _, batches = _run_load(server, load)
    return (loop_ns(server.pid) - before_ns) / len(load), len(load) / batches


def _run_load(server: Process, load: Arrivals) -> tuple[OpenLoopResult, int]:
    """Send a load. Returns: its results, and the number of batches."""
    before = _runs(server)
    result = run_open_loop(server, [_call(1)], load.at_ns)
    return result, sum(runs for runs, _ in _since(before, _runs(server)).values())


def _split_front_costs(alone_ns: float, loaded_ns: float, rows_per_batch: float, beside_ns: float) -> FrontCosts:
    """Split the loop's time into costs of a request and of a batch, and the waiting into three wake-ups."""
    batch_share = 1 / max(rows_per_batch, 1.5)
    request_ns = min(max((loaded_ns - alone_ns * batch_share) / (1 - batch_share), loaded_ns / 3), alone_ns)
    wake_ns = max((beside_ns - alone_ns - WIRE_NS) / 3, 5_000)
    return FrontCosts.split(request_ns, alone_ns - request_ns, wake_ns)


def _call(rows: int) -> Call:
    return make_call(Case(MODEL, "binary", 1, ((rows, 512),)))


def _runs(server: Process) -> dict[int, tuple[int, int]]:
    """Read how many batches of each size have run, and their total time."""
    stats: dict[str, Any] = json.loads(server.request("GET", f"/v2/models/{MODEL}/stats"))["model_stats"][0]
    stages = ("compute_input", "compute_infer", "compute_output")
    return {
        entry["batch_size"]: (entry["compute_infer"]["count"], sum(entry[stage]["ns"] for stage in stages))
        for entry in stats["batch_stats"]
    }


def _since(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    old = {size: before.get(size, (0, 0)) for size in after}
    return {size: (count - old[size][0], ns - old[size][1]) for size, (count, ns) in after.items()}


def _closed_loop_latencies_ns(server: Process, sent: Call, seconds: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Send a request as soon as the previous one is answered. Returns: the latency of each."""
    request = sent.request()
    took_ns: list[int] = []
    with socket.create_connection((HOST, server.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(took_ns) <= 2 * WARM_UP_RUNS:
            sent_ns = time.time_ns()
            sock.sendall(request)
            took_ns.append(_answered_ns(sock) - sent_ns)
    return np.array(took_ns[WARM_UP_RUNS:], float)


def _answered_ns(sock: socket.socket) -> int:
    """Read one answer. Returns: when its last part arrived, by the kernel's timestamp."""
    answer, remaining, stamp_ns = b"", 1, 0
    while remaining > 0:
        part, ancillary, _, _ = sock.recvmsg(1 << 20, 64)
        if not part:
            raise RuntimeError("the server closed the connection")
        answer += part
        seconds, part_ns = struct.unpack("qq", ancillary[0][2])
        stamp_ns = seconds * 1_000_000_000 + part_ns
        end = answer.find(b"\r\n\r\n") + 4
        if end >= 4:
            length = answer.index(b"\r\ncontent-length: ", 0, end) + 18
            remaining = end + int(answer[length : answer.index(b"\r", length)]) - len(answer)
    if answer[9:12] != b"200":
        raise RuntimeError(repr(answer[:500]))
    return stamp_ns


def compare(
    server: Process, calibration: Calibration, load_fraction: float, seconds: float, seed: int, end: float
) -> Point:
    """Send one load, and simulate it."""
    load = poisson(load_fraction * calibration.peak_per_s, seconds, seed=seed)
    (open_loop_result, batches), cores = measure_when_idle(server, lambda: _run_load(server, load), end)
    result = simulate_server(_sent(open_loop_result), POLICY, calibration.run_times, calibration.costs, seed=seed)
    p50, p99 = result.quantile_ms(0.5, 0.99)
    rows = len(open_loop_result.answered()) / max(batches, 1), result.rows_per_batch
    return Point(
        load.rows_per_s,
        cores,
        (open_loop_result.server_latency_ms(0.5), open_loop_result.server_latency_ms(0.99)),
        (p50, p99),
        rows,
    )


def _sent(result: OpenLoopResult) -> Arrivals:
    """Return when requests were really sent."""
    return recorded((result.records["due_ns"] + result.records["late_ns"]) / 1e9)


def measure(server: Process, rounds: int, seconds: float, minutes: float) -> Iterator[tuple[float, list[Point]]]:
    """Measure each load `rounds` times, at calm moments as long as there is time, then at any."""
    end = time.monotonic() + 60 * minutes
    points = []
    for seed in range(rounds):
        points.append(
            [compare(server, calibrate(server, end), load_fraction, seconds, seed, end) for load_fraction in SHARES]
        )
        print(f"round {seed + 1} of {rounds} done", flush=True)
    yield from zip(SHARES, map(list, zip(*points, strict=True)), strict=True)


def table_of(loads: Iterable[tuple[float, Sequence[Point]]]) -> str:
    """Format the medians. Ratios are medians of each measurement's own ratio."""
    lines = [
        f"{'':>13} {'measured':>15} {'simulated':>17} {'ratio':>13} {'rows/batch':>13}",
    ]
    head = f"{'load':>4} {'rows/s':>8} {'p50 ms':>7} {'p99':>7} {'p50 ms':>9} {'p99':>7} {'p50':>7} {'p99':>5}"
    lines.append(f"{head} {'real':>7} {'sim':>5}")
    for load_fraction, points in loads:
        measured, simulated = (
            _medians([point.measured for point in points]),
            _medians([point.simulated for point in points]),
        )
        ratios_by_point = [
            [sim / real for sim, real in zip(point.simulated, point.measured, strict=True)] for point in points
        ]
        ratios, rows = _medians(ratios_by_point), _medians([point.rows_per_batch for point in points])
        rate, background_cores = _medians([(point.rate_per_s, point.others) for point in points])
        line = f"{load_fraction:>4.0%} {rate:>8,.0f} {measured[0]:>7.2f} {measured[1]:>7.2f} {simulated[0]:>9.2f}"
        line += f" {simulated[1]:>7.2f} {ratios[0]:>7.2f} {ratios[1]:>5.2f} {rows[0]:>7.1f} {rows[1]:>5.1f}"
        line += f"  of {len(points)}, others {background_cores:.2f}: "
        holds = all(abs(ratio - 1) <= WITHIN for ratio in ratios)
        lines.append(line + (f"within {WITHIN:.0%}" if holds else f"NOT WITHIN {WITHIN:.0%}"))
    return "\n".join(lines)


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*rows, strict=True)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.reality", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each load")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to wait for calm moments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.make(folder, {MODEL: models.mlp})
        (folder / MODEL / "penstock.toml").write_text("[runtime]\nintra_op_threads = 1\n", "utf-8")
        with penstock(folder) as server:
            print(table_of(measure(server, args.rounds, args.seconds, args.minutes)))


if __name__ == "__main__":
    main()
