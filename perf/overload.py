"""Overload: ten times a model's capacity, for 20 s, and its aftermath. `python -m penstock.perf.overload`.

The model served has a capacity far below what the front end can accept. Its best throughput is measured with a closed
loop, then ten times as many requests per second are sent by an open loop, and then the first measurement is repeated.
That is one round. Goodput and rejections are judged by the median of the rounds, each relative to the calm before and
after it, since a shared machine may be a third slower a minute later. `--soak SECONDS` looks for growth instead: steady
load, and memory over time.

The model gets one thread: on a machine of two cores, server and load share the other, so that the load takes nothing
from the model's work. `--threads 0` leaves the model its default, all cores, and it loses the load's share of them.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.batching.scheduling.queue_limits import MIN_ROWS

from . import models
from .argument_types import positive_int
from .bench import IRIS_64, MLP_32, Case, make_call
from .claims import verdict
from .open_loop import OpenLoopResult, run_open_loop
from .server_process import Process, penstock
from .simulator.arrivals import constant
from .wrk import Load, drive

DEEP = Case("deep", "binary", 64, ((1, 64),))
SOAK_CASES = (IRIS_64, MLP_32)
CONNECTIONS = (16, 64)
MAX_CONNECTIONS = 2 * MIN_ROWS
BASELINE_S = 4
SAMPLE_S = 0.25
MAX_DRAIN_S = 60.0
MIN_OFFERED = 0.95
MIN_OF_PEAK = 0.9
MAX_REJECTION_MS = 10.0
MAX_GROWTH_MIB = 4.0
"""Limit for memory growth once the queue has filled. The bodies rejected meanwhile are fifty times as much."""
MAX_GROWTH_MIB_PER_MINUTE = 1.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """The server without overload: its best throughput, 16 clients, a single client, and its memory."""

    best_per_s: float
    concurrent: Load
    single: Load
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment of an overload."""

    waiting_rows: int
    rss_mib: float


@dataclass(frozen=True, slots=True)
class Overload:
    """An overload, as the load measured it, and the state of the server meanwhile."""

    target_per_s: float
    seconds: int
    result: OpenLoopResult
    samples: list[Sample]
    drain_s: float

    @property
    def sent(self) -> int:
        return len(self.result.records) - self.result.skipped

    @property
    def offered_per_s(self) -> float:
        return self.sent / self.seconds

    @property
    def goodput_per_s(self) -> float:
        """Good answers per second, without the first second, in which the queue fills."""
        answered = self.result.answered(200)
        at_s = (answered["due_ns"] + answered["took_ns"]) / 1e9
        return float(((at_s >= 1) & (at_s < self.seconds)).sum()) / (self.seconds - 1)

    @property
    def max_waiting_rows(self) -> int:
        return max(sample.waiting_rows for sample in self.samples)

    @property
    def growth_mib(self) -> float:
        """The growth of memory from the second quarter, when the queue was already full, to the last."""
        rss_mib = [sample.rss_mib for sample in self.samples]
        quarter = len(rss_mib) // 4
        return max(rss_mib[-quarter:]) - max(rss_mib[quarter : 2 * quarter])

    @property
    def cores_used(self) -> tuple[float, float]:
        """How many cores the server and the load kept busy until the queue was empty again."""
        per_s = self.sent / 1e6 / (self.seconds + self.drain_s)
        return self.result.cpu_us * per_s, self.result.load_cpu_us * per_s


@dataclass(frozen=True, slots=True)
class Round:
    """An overload, and the server before and after it."""

    before: Baseline
    during: Overload
    after: Baseline

    @property
    def peak_per_s(self) -> float:
        return max(self.before.best_per_s, self.after.best_per_s)

    @property
    def offered_ratio(self) -> float:
        """The offered load, as a multiple of the peak."""
        return self.during.offered_per_s / self.peak_per_s

    @property
    def goodput_ratio(self) -> float:
        """The good answers, as a fraction of the peak."""
        return self.during.goodput_per_s / self.peak_per_s

    @property
    def recovery_ratio(self) -> float:
        """The server's throughput afterwards, as a fraction of that before."""
        return self.after.best_per_s / self.before.best_per_s


def measure_baseline(server: Process) -> Baseline:
    """Measure the server undisturbed."""
    call = make_call(DEEP)
    server.request("POST", call.path, call.bodies[0], call.headers)
    single = drive(server, call, 1, BASELINE_S // 2)
    loads = [drive(server, call, connections, BASELINE_S) for connections in CONNECTIONS]
    return Baseline(max(load.requests_per_s for load in loads), loads[0], single, server.rss_mib())


def run_overload(server: Process, rate_per_s: float, seconds: int) -> Overload:
    """Flood the server, and sample it until its queue is empty again."""
    with ThreadPoolExecutor(1) as pool:
        times = constant(rate_per_s, seconds).at_ns
        load_future = pool.submit(run_open_loop, server, [make_call(DEEP)], times, connections=MAX_CONNECTIONS)
        start, samples = time.monotonic(), []
        while (passed_s := time.monotonic() - start) < seconds:
            samples.append(_sample(server))
            time.sleep(SAMPLE_S)
        while _sample(server).waiting_rows and passed_s < seconds + MAX_DRAIN_S:
            time.sleep(SAMPLE_S / 5)
            passed_s = time.monotonic() - start
        return Overload(rate_per_s, seconds, load_future.result(), samples, passed_s - seconds)


def _sample(server: Process) -> Sample:
    page = server.request("GET", "/metrics").decode()
    match = re.search(rf'^penstock_waiting_rows{{model="{DEEP.model}",.*}} (\d+)$', page, re.MULTILINE)
    if match is None:
        raise RuntimeError("the metrics page does not say how many rows wait")
    return Sample(int(match[1]), server.rss_mib())


def report(rounds: Sequence[Round]) -> str:
    """Format the table, and which of issue 2's claims hold."""
    rows = [f"{'':<10} {'good/s':>8} {'503/s':>8} {'p50 ms':>9} {'p99 ms':>9} {'alone p50':>9} {'RSS MiB':>8}"]
    rows.append(_baseline_row("before", rounds[0].before))
    for each in rounds:
        rows += [_overload_row(each.during), _baseline_row("after", each.after)]
    for number, each in enumerate(rounds, 1):
        during, result = each.during, each.during.result
        row = f"round {number}: offered {during.offered_per_s:,.0f}/s for {during.seconds} s over {result.connections}"
        ratios = f"{each.goodput_ratio:.1%} of the peak, after it {each.recovery_ratio:.1%} of before"
        rows.append(f"{row} connections; goodput {ratios}")
        p50_ms, p99_ms, most_ms = (result.server_latency_ms(quantile, 503) for quantile in (0.5, 0.99, 1))
        rows.append(f"  refusals: p50 {p50_ms:.3f} ms, p99 {p99_ms:.3f} ms, most {most_ms:.1f} ms")
        server, load = during.cores_used
        row = f"  cores in use: server {server:.2f}, load {load:.2f}"
        rows.append(f"{row}; queue empty {during.drain_s:.1f} s after the last request")
    return "\n".join([*rows, *_verdicts(rounds)])


def _baseline_row(name: str, state: Baseline) -> str:
    row = f"{name:<10} {state.best_per_s:>8,.0f} {0:>8} {state.concurrent.p50_ms:>9.2f} {state.concurrent.p99_ms:>9.2f}"
    return f"{row} {state.single.p50_ms:>9.2f} {state.rss_mib:>8.0f}"


def _overload_row(during: Overload) -> str:
    result = during.result
    row = f"{'overload':<10} {during.goodput_per_s:>8,.0f} {len(result.answered(503)) / during.seconds:>8,.0f}"
    row += f" {result.latency_ms(0.5):>9.2f} {result.latency_ms(0.99):>9.2f} {'':>9}"
    return f"{row} {max(each.rss_mib for each in during.samples):>8.0f}"


def _verdicts(rounds: Sequence[Round]) -> list[str]:
    overloads = [each.during for each in rounds]
    times = statistics.median(each.offered_ratio for each in rounds)
    goodput_ratio = statistics.median(each.goodput_ratio for each in rounds)
    recovery_ratio = statistics.median(each.recovery_ratio for each in rounds)
    refused_ms = [each.result.server_latency_ms(0.99, 503) for each in overloads if len(each.result.answered(503))]
    rows = max(each.max_waiting_rows for each in overloads)
    unexpected = sum(each.result.unexpected(200, 503) for each in overloads)
    growth_mib = max(each.growth_mib for each in overloads)
    return [
        verdict(
            f"offered {times:.1f} times the peak",
            all(each.offered_per_s >= MIN_OFFERED * each.target_per_s for each in overloads),
        ),
        verdict(f"queue: at most {rows} rows of {MIN_ROWS}", rows <= MIN_ROWS),
        verdict(f"goodput: {goodput_ratio:.1%} of the peak", goodput_ratio >= MIN_OF_PEAK),
        _refusals_verdict(refused_ms),
        verdict(f"neither 200 nor 503: {unexpected}", unexpected == 0),
        verdict(f"memory: {growth_mib:+.1f} MiB with the queue full", growth_mib <= MAX_GROWTH_MIB),
        verdict(f"after: {recovery_ratio:.1%} of the goodput before", recovery_ratio >= MIN_OF_PEAK),
    ]


def _refusals_verdict(p99_ms: Sequence[float]) -> str:
    if not p99_ms:
        return verdict("refusals: there were none", False)
    median_ms = statistics.median(p99_ms)
    return verdict(f"refusals: p99 {median_ms:.3f} ms from sent to received", median_ms < MAX_REJECTION_MS)


def soak(server: Process, case: Case, seconds: int) -> str:
    """Load the server steadily, and report its memory growth: a line fitted to all but the first quarter."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(drive, server, make_call(case), case.connections, seconds)
        start, points = time.monotonic(), []
        while not running.done():
            points.append((time.monotonic() - start, server.rss_mib()))
            time.sleep(SAMPLE_S)
        load = running.result()
    at_s, rss_mib = np.array(points[len(points) // 4 :]).T
    slope = float(np.polyfit(at_s, rss_mib, 1)[0]) * 60
    text = (
        f"{case.name} at {case.connections}: {load.requests_per_s:,.0f} requests/s, {load.refused + load.broken} failed"
    )
    text += f", RSS {points[0][1]:.1f} to {points[-1][1]:.1f} MiB, lately {slope:+.2f} MiB a minute"
    return verdict(text, slope <= MAX_GROWTH_MIB_PER_MINUTE and not load.refused + load.broken)


def _run_rounds(times: float, seconds: int, threads: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.make(folder, {DEEP.model: models.deep})
        if threads:
            (folder / DEEP.model / "penstock.toml").write_text(f"[runtime]\nintra_op_threads = {threads}\n", "utf-8")
        with penstock(folder) as server:
            results, before = [], measure_baseline(server)
            for _ in range(rounds):
                during = run_overload(server, times * before.best_per_s, seconds)
                results.append(Round(before, during, before := measure_baseline(server)))
            return report(results)


def overload_seconds(text: str) -> int:
    """Parse how long the overload takes: its first second is not counted. Raises: argparse.ArgumentTypeError."""
    seconds = positive_int(text)
    if seconds < 2:
        raise argparse.ArgumentTypeError("it must be 2 or more: the first second is not counted")
    return seconds


def main() -> None:
    """Overload or soak, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.overload", description=__doc__)
    parser.add_argument("--times", type=float, default=10, help="what to offer, in peaks")
    parser.add_argument("--seconds", type=overload_seconds, default=20, help="how long")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="the model's; 0: as many as there are cores")
    parser.add_argument("--soak", type=int, metavar="SECONDS", help="steady load on iris and mlp instead, each so long")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the servers and removes the folders
    if not args.soak:
        print(_run_rounds(args.times, args.seconds, args.threads, args.rounds))
        return
    models.make(models.DEFAULT_FOLDER)
    with penstock(models.DEFAULT_FOLDER) as server:
        for case in SOAK_CASES:
            print(soak(server, case, args.soak), flush=True)


if __name__ == "__main__":
    main()
