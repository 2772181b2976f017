"""Soak: mixed load with a fault every few seconds, to see whether anything grows. `python -m penstock.perf.soak`.

Starts `penstock serve`, keeps sending requests over JSON, binary HTTP and gRPC, to a model with hooks in two workers
and to a Python model, and checks every answer. At intervals a process is killed or stopped, each kind in turn. Each
second the resources of all processes are recorded. It prints how requests of each kind ended, the recovery time after
each kind of fault, the first and last resources of each kind of process, and PASS or FAIL; the exit status is 0 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.perf.server_process import Process, await_ready, free_port, http_ready

from .clients import Client, ExpectedAnswers, make_clients, running_clients, write_repository
from .process_usage import ProcessUsage, is_alive, process_usages
from .request_log import BROKEN, OUTCOMES, REFUSED, RIGHT, Ending, RequestLog

READY_WITHIN_S = 120.0
SETTLE_S = 3.0
SAMPLE_S = 1.0
IRIS_KINDS, WORKER_KINDS = ("json", "binary", "grpc"), ("hooked", "python")
MAX_RECOVERY_S, MAX_WORKER_RECOVERY_S = 2.0, 4.0
"""Limits for recovery after a kill: of iris, and of what must also start workers. A stop must be noticed first."""
STOP_DETECTION_S = 1.5
MAX_GROWTH = {"processes": (0.0, 0.5), "rss_mib": (0.1, 16.0), "descriptors": (0.05, 3.0), "threads": (0.05, 2.0)}
"""The growth that is tolerated: a fraction, plus a number."""
LASTING_ROLES = ("server", "supervisor", "all")
"""The roles whose growth counts: the others are short-lived, since they are killed repeatedly."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. Units: seconds, monotonic. `victim` is the role of the process."""

    at_s: float
    action: str
    victim: str

    def limit_s(self, kind: str) -> float:
        """Return how long requests of a kind may be affected; 0: not at all."""
        if self.victim == "worker" and kind in IRIS_KINDS:
            return 0.0
        return (MAX_RECOVERY_S if kind in IRIS_KINDS else MAX_WORKER_RECOVERY_S) + STOP_DETECTION_S * (
            self.action == "stop"
        )

    def explains(self, end: Ending) -> bool:
        """Return whether this fault may have caused the end of a request."""
        limit_s = self.limit_s(end.kind)
        return bool(limit_s) and end.ended_s >= self.at_s and end.started_s <= self.at_s + limit_s


@dataclass(slots=True)
class Soak:
    """One run: its faults, and its observations."""

    server: subprocess.Popen[bytes]
    fault_cycle: Sequence[tuple[str, str]]
    request_log: RequestLog = field(default_factory=RequestLog)
    faults: list[Fault] = field(default_factory=list)
    samples: list[tuple[float, list[ProcessUsage]]] = field(default_factory=list)
    recovery_s: dict[tuple[str, str, str], list[float | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, minutes: float, every_s: float, rng: random.Random) -> None:
        """Sample every second, and inject a fault every `every_s`, except at the start and end."""
        begin_s = time.monotonic()
        end_s, fault_s = begin_s + minutes * 60, begin_s + every_s
        for turn in range(10**9):
            now_s = time.monotonic()
            if now_s >= end_s or self.server.poll() is not None:
                break
            self.samples.append((now_s, process_usages(self.server.pid)))
            if now_s >= fault_s and now_s < end_s - every_s:
                self.record_recovery()
                self.inject(*self.fault_cycle[len(self.faults) % len(self.fault_cycle)], rng)
                fault_s += every_s
            time.sleep(max(0.0, begin_s + (turn + 1) * SAMPLE_S - time.monotonic()))
        self.record_recovery()

    def inject(self, action: str, victim: str, rng: random.Random) -> None:
        """Inject one fault."""
        candidates = [
            usage for usage in process_usages(self.server.pid) if usage.role == victim and usage.state not in "TZ"
        ]
        if not candidates:
            self.problems.append(f"no {victim} to {action}")
        self.request_log.clear_times()
        self.faults.append(Fault(time.monotonic(), action, victim))
        if candidates:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(candidates).pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def record_recovery(self) -> None:
        """Record how soon each kind of request was served again after the last fault."""
        if self.faults:
            fault = self.faults[-1]
            for kind in (*IRIS_KINDS, *WORKER_KINDS):
                took_s = self.request_log.recovery_s(kind, fault.at_s)
                self.recovery_s.setdefault((fault.action, fault.victim, kind), []).append(took_s)

    # -- the verdict -------------------------------------------------------------------------------------------

    def all_problems(self) -> list[str]:
        """Return everything that is not as it should be."""
        problems = list(self.problems)
        if self.request_log.pending_count or self.request_log.ended_twice:
            problems.append(
                f"{self.request_log.pending_count} requests without an end, {self.request_log.ended_twice} with two"
            )
        strange = [end for end in self.request_log.failures() if not self._is_expected(end)]
        for end in strange[:10]:
            last_fault = max((fault for fault in self.faults if fault.at_s <= end.ended_s), key=_at, default=None)
            after = (
                f"{end.ended_s - last_fault.at_s:.2f} s after {last_fault.action} {last_fault.victim}"
                if last_fault
                else "before any fault"
            )
            problems.append(
                f"{end.kind} {end.outcome} {after}, begun {end.ended_s - end.started_s:.2f} s before: {end.text[:200]}"
            )
        if len(strange) > 10:
            problems.append(f"and {len(strange) - 10} more like these")
        for (action, victim, kind), times in self.recovery_s.items():
            limit_s = Fault(0.0, action, victim).limit_s(kind) or MAX_RECOVERY_S
            if late_recoveries := [each for each in times if each is None or each > limit_s]:
                delays = ", ".join("never" if each is None else f"{each:.2f} s" for each in late_recoveries)
                problems.append(f"{kind} after {action} {victim}: recovered after {delays}, limit {limit_s:g} s")
        return problems + self._growth_problems()

    def _is_expected(self, end: Ending) -> bool:
        return end.outcome in {REFUSED, BROKEN} and any(fault.explains(end) for fault in self.faults)

    def _growth_problems(self) -> list[str]:
        problems = []
        for role, names in self.usage_by_role().items():
            for name, (first, last, _) in names.items() if role in LASTING_ROLES else ():
                max_share, max_increase = MAX_GROWTH[name]
                if last > first * (1 + max_share) + max_increase or (name == "processes" and last < first):
                    problems.append(f"{role}: {name} went from {first:.1f} to {last:.1f}")
        return problems

    def usage_by_role(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Return the resources of each role and of all: medians of the first and last fifth, and slope per hour.

        If the run is long enough, only from when each kind of fault has occurred once, since restarted processes may
        differ.
        """
        round_ = len(self.fault_cycle)
        begin_s = self.faults[round_ - 1].at_s if len(self.faults) >= 3 * round_ else 0.0
        samples = [(at_s, each) for at_s, each in self.samples if at_s >= begin_s]
        roles = sorted({usage.role for _, each in samples for usage in each})
        times = np.array([at_s for at_s, _ in samples]) / 3600
        table: dict[str, dict[str, tuple[float, float, float]]] = {}
        for role in (*roles, "all"):
            for name in MAX_GROWTH:
                values = np.array([_total(each, role, name) for _, each in samples])
                fifth = max(1, len(values) // 5)
                slope = float(np.polyfit(times, values, 1)[0]) if len(values) > 2 else 0.0
                first, last = float(np.median(values[:fifth])), float(np.median(values[-fifth:]))
                table.setdefault(role, {})[name] = first, last, slope
        return table

    def lines(self) -> Iterator[str]:
        """Format the tables."""
        yield f"{'requests':<10}" + "".join(f"{end:>10}" for end in OUTCOMES)
        for kind, counts in self.request_log.counts().items():
            yield f"{kind:<10}" + "".join(f"{counts[end]:>10,}" for end in OUTCOMES)
        yield ""
        yield f"{'recovered after, s':<24}{'faults':>7}" + "".join(
            f"{kind:>9}" for kind in (*IRIS_KINDS, *WORKER_KINDS)
        )
        for action, victim in dict.fromkeys((fault.action, fault.victim) for fault in self.faults):
            columns = [self.recovery_s.get((action, victim, kind), []) for kind in (*IRIS_KINDS, *WORKER_KINDS)]
            yield f"{action + ' ' + victim:<24}{len(columns[0]):>7}" + "".join(
                f"{_worst(column):>9}" for column in columns
            )
        yield ""
        yield f"{'held':<12}{'':<12}{'first':>10}{'last':>10}{'per hour':>12}"
        for role, names in self.usage_by_role().items():
            for name, (first, last, slope) in names.items():
                yield f"{role:<12}{name:<12}{first:>10.1f}{last:>10.1f}{slope:>12.1f}"
        yield ""
        problems = self.all_problems()
        yield from problems
        yield "FAIL" if problems else "PASS"


def _at(fault: Fault) -> float:
    return fault.at_s


def _worst(times: Sequence[float | None]) -> str:
    return "never" if None in times else f"{max((each for each in times if each is not None), default=0.0):.2f}"


def _total(usages: Sequence[ProcessUsage], role: str, name: str) -> float:
    chosen = [usage for usage in usages if role in {usage.role, "all"}]
    return float(len(chosen)) if name == "processes" else float(sum(getattr(usage, name) for usage in chosen))


@contextlib.contextmanager
def serving(
    root: Path, fronts: int, ports: tuple[int, int], problems: list[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends. It must exit cleanly and leave no process."""
    command = [sys.executable, "-m", "penstock.server.cli", "serve", str(root), "--allow-metrics=false",
               "--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--http-workers", str(fronts)]  # fmt: skip
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as server:
        usages: list[ProcessUsage] = []
        try:
            yield server
            usages = process_usages(server.pid)
            server.terminate()
            status = server.wait(60)
            if status:
                problems.append(f"the server ended with {status}")
        finally:
            if server.poll() is None:
                usages = process_usages(server.pid)
                server.kill()
            # the system ends the workers of a killed server in its own time
            end_s = time.monotonic() + 2.0
            while any(map(is_alive, usages)) and time.monotonic() < end_s:
                time.sleep(0.05)
            for survivor in filter(is_alive, usages):
                problems.append(f"left behind: {survivor.role}, process {survivor.pid}")
                os.kill(survivor.pid, signal.SIGKILL)
            problems += _tracebacks(log)


def _tracebacks(log: Path) -> list[str]:
    """Return what a server has logged with a traceback: none of the injected faults should cause one."""
    lines = log.read_text("utf-8", "replace").splitlines()
    traceback_lines = [line for line in lines if "traceback" in line or "Traceback" in line]
    return (
        [f"{len(traceback_lines)} tracebacks in the log, the first: {traceback_lines[0][:1500]}"]
        if traceback_lines
        else []
    )


def _await_answers(clients: Sequence[Client], request_log: RequestLog, server: subprocess.Popen[bytes]) -> None:
    """Wait until every kind of request has been answered."""
    end_s = time.monotonic() + READY_WITHIN_S
    while len([kind for kind, counts in request_log.counts().items() if counts[RIGHT] > 10]) < len(
        IRIS_KINDS + WORKER_KINDS
    ):
        if server.poll() is not None or time.monotonic() > end_s:
            ends = {end.text for end in request_log.failures()[-20:]}
            raise SystemExit(f"not every kind of request is served: {dict(request_log.counts())} {ends}")
        time.sleep(0.1)


def soak(args: argparse.Namespace, fronts: int) -> bool:
    """Run and print. Returns: whether everything was as it should be."""
    minutes, every_s, callers_each = args.minutes, args.fault_every, args.callers
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "models")
        write_repository(root)
        answers = ExpectedAnswers(root)
        ports = free_port(), free_port()
        problems: list[str] = []
        victims = ("worker", "front", "engine") if fronts else ("worker",)
        # in this order, since two hits in a row would be taken for a process that keeps crashing
        fault_cycle = [(action, victim) for action in ("kill", "stop") for victim in victims]
        with serving(root, fronts, ports, problems, args.log or Path(name, "log")) as server:
            await_ready(Process(server.pid, ports[0]), server, http_ready("/v2/health/ready"))
            warm = RequestLog()
            with running_clients(make_clients(*ports, answers, warm, callers_each)) as clients:
                _await_answers(clients, warm, server)
            run = Soak(server, fault_cycle)
            run.problems = problems
            with running_clients(make_clients(*ports, answers, run.request_log, callers_each)):
                run.run(minutes, every_s, random.Random(args.seed))
            time.sleep(SETTLE_S)
        load = f"{callers_each} clients of each kind"
        print(f"{fronts} front ends, {minutes:g} minutes, a fault every {every_s:g} s, {load}")
        lines = list(run.lines())
        print(*lines, sep="\n", flush=True)
        return lines[-1] == "PASS"


def main() -> int:
    """Run with the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--http-workers", type=int, nargs="+", default=[2, 0], metavar="N", help="one run for each")
    parser.add_argument("--callers", type=int, default=2, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep what the (last) server logs")
    args = parser.parse_args()
    passed = [soak(args, fronts) for fronts in args.http_workers]
    return 0 if all(passed) else 1
