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

from penstock.perf.load import Process, await_ready, free_port, http_ready

from .callers import Answers, Caller, callers, calling, write_repository
from .census import Seen, census, is_there
from .ledger import BROKEN, ENDS, REFUSED, RIGHT, End, Ledger

READY_WITHIN_S = 120.0
SETTLE_S = 3.0
SAMPLE_S = 1.0
IRIS, WORKED = ("json", "binary", "grpc"), ("hooked", "python")
WHOLE_S, WORKED_WHOLE_S = 2.0, 4.0
"""Limits for recovery after a kill: of iris, and of what must also start workers. A stop must be noticed first."""
NOTICED_S = 1.5
GROWS = {"processes": (0.0, 0.5), "rss_mib": (0.1, 16.0), "descriptors": (0.05, 3.0), "threads": (0.05, 2.0)}
"""The growth that is tolerated: a fraction, plus a number."""
LASTING = ("server", "supervisor", "all")
"""The roles whose growth counts: the others are short-lived, since they are killed repeatedly."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault. Units: seconds, monotonic. `victim` is the role of the process."""

    at_s: float
    deed: str
    victim: str

    def limit_s(self, kind: str) -> float:
        """Return how long requests of a kind may be affected; 0: not at all."""
        if self.victim == "worker" and kind in IRIS:
            return 0.0
        return (WHOLE_S if kind in IRIS else WORKED_WHOLE_S) + NOTICED_S * (self.deed == "stop")

    def explains(self, end: End) -> bool:
        """Return whether this fault may have caused the end of a request."""
        limit_s = self.limit_s(end.kind)
        return bool(limit_s) and end.ended_s >= self.at_s and end.begun_s <= self.at_s + limit_s


@dataclass(slots=True)
class Soak:
    """One run: its faults, and its observations."""

    server: subprocess.Popen[bytes]
    faults_in_turn: Sequence[tuple[str, str]]
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[Fault] = field(default_factory=list)
    samples: list[tuple[float, list[Seen]]] = field(default_factory=list)
    whole_s: dict[tuple[str, str, str], list[float | None]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, minutes: float, every_s: float, chance: random.Random) -> None:
        """Sample every second, and inject a fault every `every_s`, except at the start and end."""
        begin_s = time.monotonic()
        end_s, fault_s = begin_s + minutes * 60, begin_s + every_s
        for turn in range(10**9):
            now_s = time.monotonic()
            if now_s >= end_s or self.server.poll() is not None:
                break
            self.samples.append((now_s, census(self.server.pid)))
            if now_s >= fault_s and now_s < end_s - every_s:
                self.judge()
                self.hit(*self.faults_in_turn[len(self.faults) % len(self.faults_in_turn)], chance)
                fault_s += every_s
            time.sleep(max(0.0, begin_s + (turn + 1) * SAMPLE_S - time.monotonic()))
        self.judge()

    def hit(self, deed: str, victim: str, chance: random.Random) -> None:
        """Inject one fault."""
        found = [seen for seen in census(self.server.pid) if seen.role == victim and seen.state not in "TZ"]
        if not found:
            self.problems.append(f"no {victim} to {deed}")
        self.ledger.mark()
        self.faults.append(Fault(time.monotonic(), deed, victim))
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found).pid, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)

    def judge(self) -> None:
        """Record how soon each kind of request was served again after the last fault."""
        if self.faults:
            fault = self.faults[-1]
            for kind in (*IRIS, *WORKED):
                took_s = self.ledger.served_again_s(kind, fault.at_s)
                self.whole_s.setdefault((fault.deed, fault.victim, kind), []).append(took_s)

    # -- the verdict -------------------------------------------------------------------------------------------

    def judged(self) -> list[str]:
        """Return everything that is not as it should be."""
        found = list(self.problems)
        if self.ledger.without_end or self.ledger.twice:
            found.append(f"{self.ledger.without_end} requests without an end, {self.ledger.twice} with two")
        strange = [end for end in self.ledger.not_right() if not self._expected(end)]
        for end in strange[:10]:
            near = max((fault for fault in self.faults if fault.at_s <= end.ended_s), key=_at, default=None)
            after = f"{end.ended_s - near.at_s:.2f} s after {near.deed} {near.victim}" if near else "before any fault"
            found.append(
                f"{end.kind} {end.end} {after}, begun {end.ended_s - end.begun_s:.2f} s before: {end.text[:200]}"
            )
        if len(strange) > 10:
            found.append(f"and {len(strange) - 10} more like these")
        for (deed, victim, kind), times in self.whole_s.items():
            limit_s = Fault(0.0, deed, victim).limit_s(kind) or WHOLE_S
            if late := [each for each in times if each is None or each > limit_s]:
                said = ", ".join("never" if each is None else f"{each:.2f} s" for each in late)
                found.append(f"{kind} after {deed} {victim}: whole after {said}, limit {limit_s:g} s")
        return found + self._grown()

    def _expected(self, end: End) -> bool:
        return end.end in {REFUSED, BROKEN} and any(fault.explains(end) for fault in self.faults)

    def _grown(self) -> list[str]:
        found = []
        for role, names in self.held().items():
            for name, (first, last, _) in names.items() if role in LASTING else ():
                share, more = GROWS[name]
                if last > first * (1 + share) + more or (name == "processes" and last < first):
                    found.append(f"{role}: {name} went from {first:.1f} to {last:.1f}")
        return found

    def held(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Return the resources of each role and of all: medians of the first and last fifth, and slope per hour.

        If the run is long enough, only from when each kind of fault has occurred once, since restarted processes may
        differ.
        """
        round_ = len(self.faults_in_turn)
        begin_s = self.faults[round_ - 1].at_s if len(self.faults) >= 3 * round_ else 0.0
        samples = [(at_s, each) for at_s, each in self.samples if at_s >= begin_s]
        roles = sorted({seen.role for _, each in samples for seen in each})
        times = np.array([at_s for at_s, _ in samples]) / 3600
        table: dict[str, dict[str, tuple[float, float, float]]] = {}
        for role in (*roles, "all"):
            for name in GROWS:
                values = np.array([_total(each, role, name) for _, each in samples])
                fifth = max(1, len(values) // 5)
                slope = float(np.polyfit(times, values, 1)[0]) if len(values) > 2 else 0.0
                first, last = float(np.median(values[:fifth])), float(np.median(values[-fifth:]))
                table.setdefault(role, {})[name] = first, last, slope
        return table

    def lines(self) -> Iterator[str]:
        """Format the tables."""
        yield f"{'requests':<10}" + "".join(f"{end:>10}" for end in ENDS)
        for kind, counted in self.ledger.counts().items():
            yield f"{kind:<10}" + "".join(f"{counted[end]:>10,}" for end in ENDS)
        yield ""
        yield f"{'whole again after, s':<24}{'faults':>7}" + "".join(f"{kind:>9}" for kind in (*IRIS, *WORKED))
        for deed, victim in dict.fromkeys((fault.deed, fault.victim) for fault in self.faults):
            columns = [self.whole_s.get((deed, victim, kind), []) for kind in (*IRIS, *WORKED)]
            yield f"{deed + ' ' + victim:<24}{len(columns[0]):>7}" + "".join(f"{_worst(each):>9}" for each in columns)
        yield ""
        yield f"{'held':<12}{'':<12}{'first':>10}{'last':>10}{'per hour':>12}"
        for role, names in self.held().items():
            for name, (first, last, slope) in names.items():
                yield f"{role:<12}{name:<12}{first:>10.1f}{last:>10.1f}{slope:>12.1f}"
        yield ""
        problems = self.judged()
        yield from problems
        yield "FAIL" if problems else "PASS"


def _at(fault: Fault) -> float:
    return fault.at_s


def _worst(times: Sequence[float | None]) -> str:
    return "never" if None in times else f"{max((each for each in times if each is not None), default=0.0):.2f}"


def _total(seen: Sequence[Seen], role: str, name: str) -> float:
    chosen = [each for each in seen if role in {each.role, "all"}]
    return float(len(chosen)) if name == "processes" else float(sum(getattr(each, name) for each in chosen))


@contextlib.contextmanager
def serving(
    root: Path, fronts: int, ports: tuple[int, int], problems: list[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends. It must exit cleanly and leave no process."""
    command = [sys.executable, "-m", "penstock.server.cli", "serve", str(root), "--allow-metrics=false",
               "--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--http-workers", str(fronts)]  # fmt: skip
    with log.open("wb") as said, subprocess.Popen(command, stderr=said) as server:
        seen: list[Seen] = []
        try:
            yield server
            seen = census(server.pid)
            server.terminate()
            status = server.wait(60)
            if status:
                problems.append(f"the server ended with {status}")
        finally:
            if server.poll() is None:
                seen = census(server.pid)
                server.kill()
            # the system ends the workers of a killed server in its own time
            end_s = time.monotonic() + 2.0
            while any(map(is_there, seen)) and time.monotonic() < end_s:
                time.sleep(0.05)
            for left in filter(is_there, seen):
                problems.append(f"left behind: {left.role}, process {left.pid}")
                os.kill(left.pid, signal.SIGKILL)
            problems += _tracebacks(log)


def _tracebacks(log: Path) -> list[str]:
    """Return what a server has logged with a traceback: none of the injected faults should cause one."""
    lines = log.read_text("utf-8", "replace").splitlines()
    found = [line for line in lines if "traceback" in line or "Traceback" in line]
    return [f"{len(found)} tracebacks in the log, the first: {found[0][:1500]}"] if found else []


def _await_right(made: Sequence[Caller], ledger: Ledger, server: subprocess.Popen[bytes]) -> None:
    """Wait until every kind of request has been answered."""
    end_s = time.monotonic() + READY_WITHIN_S
    while len([kind for kind, counted in ledger.counts().items() if counted[RIGHT] > 10]) < len(IRIS + WORKED):
        if server.poll() is not None or time.monotonic() > end_s:
            ends = {end.text for end in ledger.not_right()[-20:]}
            raise SystemExit(f"not every kind of request is served: {dict(ledger.counts())} {ends}")
        time.sleep(0.1)


def soak(args: argparse.Namespace, fronts: int) -> bool:
    """Run and print. Returns: whether everything was as it should be."""
    minutes, every_s, each = args.minutes, args.fault_every, args.callers
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "models")
        write_repository(root)
        answers = Answers(root)
        ports = free_port(), free_port()
        problems: list[str] = []
        victims = ("worker", "front", "engine") if fronts else ("worker",)
        # in this order, since two hits in a row would be taken for a process that keeps crashing
        turns = [(deed, victim) for deed in ("kill", "stop") for victim in victims]
        with serving(root, fronts, ports, problems, args.log or Path(name, "log")) as server:
            await_ready(Process(server.pid, ports[0]), server, http_ready("/v2/health/ready"))
            warm = Ledger()
            with calling(callers(*ports, answers, warm, each)) as made:
                _await_right(made, warm, server)
            run = Soak(server, turns)
            run.problems = problems
            with calling(callers(*ports, answers, run.ledger, each)):
                run.run(minutes, every_s, random.Random(args.seed))
            time.sleep(SETTLE_S)
        print(f"{fronts} front ends, {minutes:g} minutes, a fault every {every_s:g} s, {each} callers of each kind")
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
