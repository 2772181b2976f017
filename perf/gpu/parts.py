"""Parts: what the check consists of, when each must have ended, and the process that each runs in.

A part is a generator of Rows. It has a process of its own, so that an error that stays with a CUDA context, or a driver
that hangs, costs its own part only. What it found before it failed, or was ended, stands.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from .rows import Row, failed, parsed
from .world import World, of_words

Report = Callable[[World], Iterator[Row]]
_LEAST_S = 3.0
_END_S = 6.0
ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its module in this package, whose `report` gives the Rows, and how long it may take."""

    name: str
    seconds: float

    def report(self) -> Report:
        """Import it."""
        found: Report = importlib.import_module(f"{__package__}.{self.name}").report
        return found


PARTS = (
    Part("machine", 20),  # what is there, and the models are written
    Part("offline", 55),  # ONNX Runtime alone, rows/s by batch size
    Part("engine", 55),  # the same through the Engine in this process
    Part("served", 135),  # the same through a server: HTTP, gRPC, system and CUDA shared memory; latency
    Part("bindings", 15),  # what the CUDA Bindings take for granted of ONNX Runtime
    Part("correct", 40),  # answers against the CPU's
    Part("shared", 15),  # answers through CUDA shared memory, and through the system's while it is taken away
    Part("copies", 25),  # whether copies and compute overlap
    Part("graphs", 30),  # CUDA graphs on and off, and what they take
    Part("sizes", 20),  # the first run of a batch size beside its later ones
    Part("faults", 40),  # out of memory, budgets, a device that is broken on purpose, no device
    Part("memory", 20),  # memory after 50 loads and unloads
    Part("telemetry", 20),  # metrics against nvidia-smi, and the doctor
)
TOTAL_S = 490.0
"""What all may take together: the machine is lent for commands of ten minutes."""


def deadlines(parts: Sequence[Part], start_s: float) -> dict[str, float]:
    """Say when each must have ended: what one leaves over the next ones have, and none takes of another's."""
    ends, end_s = {}, start_s
    for part in parts:
        end_s += part.seconds
        ends[part.name] = end_s
    return ends


def run_all(parts: Sequence[Part], world: World, say: Callable[[Row], None], start_s: float) -> list[Row]:
    """Run parts one after the other, each in a process; tell every Row as it comes."""
    rows = list(world.earlier)
    for name, end_s in deadlines(parts, start_s).items():
        for row in in_process(name, replace(world, end_s=end_s)):
            rows.append(row)
            say(row)
    return rows


def in_process(name: str, world: World, command: Sequence[str] = ()) -> Iterator[Row]:
    """Run one part in a process of its own, and end it when its time is over."""
    if world.left_s() < _LEAST_S:
        yield failed(name, "the whole part", "no time was left for it")
        return
    words = list(command) or [sys.executable, "-m", "penstock.perf.gpu.parts", name, *world.words()]
    began_s, log = time.monotonic(), world.folder / f"{name}.log"
    with log.open("ab") as noise:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=noise, start_new_session=True)
    lines = _lines(child)
    line: str | None = None
    try:
        while line := _next(lines, world.left_s()):
            if (row := parsed(line)) is not None:
                yield row
    finally:
        status = _ended(child, _END_S if line == "" else 0.0)
    took = f"after {time.monotonic() - began_s:.0f} s"
    if line is None:
        yield failed(name, "the whole part", f"it had not ended {took}; what is above stands")
    elif status:
        yield failed(name, "the whole part", f"its process ended with status {status} {took}: {_last_line(log)}")


def _lines(child: subprocess.Popen[bytes]) -> queue.SimpleQueue[str]:
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                found.put(line.decode("utf-8", "replace").strip() or " ")
        found.put("")

    if child.stdout is not None:
        threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    return found


def _next(lines: queue.SimpleQueue[str], left_s: float) -> str | None:
    """Give the next line, "" where there is none any more; None where the time is over."""
    try:
        return lines.get(timeout=max(left_s, 0))
    except queue.Empty:
        return None


def _ended(child: subprocess.Popen[bytes], patience_s: float) -> int:
    """Wait for its end; then end it, first as it likes, and whatever it has started. Give its status."""
    for number, after_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _END_S)):
        try:
            return child.wait(after_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
    return child.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:200]


def reported(report: Report, name: str, world: World) -> Iterator[Row]:
    """Run a part here; what it raises is a Row."""
    try:
        yield from report(world)
    except Exception as error:  # noqa: BLE001 - it is a finding
        yield failed(name, "the whole part", error)


def main(words: Sequence[str]) -> None:
    """Run one part for `in_process`: its name, and its World."""
    name, said = words
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has started goes with it
    world = of_words(said, Path(_folder(said)) / ROWS)
    part = next(part for part in PARTS if part.name == name)
    for row in reported(part.report(), name, world):
        print(row.line(), flush=True)


def _folder(said: str) -> str:
    return str(of_words(said, Path("/nonexistent")).folder)


def chosen(only: Iterable[str]) -> tuple[Part, ...]:
    """Give the parts that were asked for, in their order; all where none was. Raises: ValueError."""
    names = set(only)
    known: Mapping[str, Part] = {part.name: part for part in PARTS}
    if unknown := sorted(names - known.keys()):
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(part for part in PARTS if not names or part.name in names)


if __name__ == "__main__":
    main(sys.argv[1:])
