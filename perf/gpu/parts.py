"""Parts: the parts of the check, their deadlines, and the process that each one runs in.

A part is a generator of Rows. It runs in its own process, so that a sticky error of a CUDA context, or a hanging
driver, fails only that part. What it found before it failed or was stopped is kept.
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

from .context import CheckContext, from_arguments
from .rows import Row, failed, parse_row

Report = Callable[[CheckContext], Iterator[Row]]
_MIN_REMAINING_S = 3.0
_STOP_TIMEOUT_S = 6.0
ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its module in this package, whose `report` yields the Rows, and how long it may take."""

    name: str
    seconds: float

    def report(self) -> Report:
        """Import the module."""
        report_function: Report = importlib.import_module(f"{__package__}.{self.name}").report
        return report_function


MACHINE = "machine"
PARTS = (
    Part(MACHINE, 20),  # the machine's properties; also writes the models
    Part("offline", 55),  # ONNX Runtime alone, rows/s by batch size
    Part("engine", 55),  # the same through the Engine in this process
    Part("served", 135),  # the same through a server: HTTP, gRPC, system and CUDA shared memory; latency
    Part("bindings", 15),  # what the CUDA Bindings assume about ONNX Runtime
    Part("correct", 40),  # answers compared with the CPU's
    Part("shared", 15),  # answers through CUDA shared memory, and through the system's while it is truncated
    Part("copies", 25),  # whether copies and compute overlap
    Part("graphs", 30),  # CUDA graphs on and off, and what they cost
    Part("sizes", 20),  # the first run of a batch size compared with its later ones
    Part("faults", 40),  # out of memory, budgets, a device broken on purpose, no device
    Part("memory", 20),  # memory after 50 loads and unloads
    Part("telemetry", 20),  # metrics compared with nvidia-smi, and the doctor
)
TOTAL_S = 490.0
"""The time of all parts together: the machine is lent for commands of ten minutes."""


def deadlines(parts: Sequence[Part], start_s: float) -> dict[str, float]:
    """Return the parts' deadlines: time that one part leaves over goes to the next ones, and none takes another's."""
    ends, end_s = {}, start_s
    for part in parts:
        end_s += part.seconds
        ends[part.name] = end_s
    return ends


def run_all(parts: Sequence[Part], context: CheckContext, on_row: Callable[[Row], None], start_s: float) -> list[Row]:
    """Run parts one after another, each in its own process; report every Row as it comes.

    If the requested GPU does not work, `machine` says so and is the last one: every other part would fail for it.
    """
    rows = list(context.earlier)
    for name, end_s in deadlines(parts, start_s).items():
        for row in in_process(name, replace(context, end_s=end_s)):
            rows.append(row)
            on_row(row)
        if name == MACHINE and context.on_gpu and any(row.held is False for row in rows if row.part == MACHINE):
            break
    return rows


def in_process(name: str, context: CheckContext, command: Sequence[str] = ()) -> Iterator[Row]:
    """Run one part in its own process, and end that process at the deadline."""
    if context.remaining_s() < _MIN_REMAINING_S:
        yield failed(name, "the whole part", "no time was left for it")
        return
    arguments = list(command) or [sys.executable, "-m", "penstock.perf.gpu.parts", name, *context.words()]
    began_s, log = time.monotonic(), context.folder / f"{name}.log"
    with log.open("ab") as log_file:
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log_file, start_new_session=True)
    lines = _lines(child)
    line: str | None = None
    try:
        while line := _next(lines, context.remaining_s()):
            if (row := parse_row(line)) is not None:
                yield row
    finally:
        status = _ended(child, _STOP_TIMEOUT_S if line == "" else 0.0)
    after_text = f"after {time.monotonic() - began_s:.0f} s"
    if line is None:
        yield failed(name, "the whole part", f"it had not ended {after_text}; what is above stands")
    elif status:
        yield failed(name, "the whole part", f"its process ended with status {status} {after_text}: {_last_line(log)}")


def _lines(child: subprocess.Popen[bytes]) -> queue.SimpleQueue[str]:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                lines.put(line.decode("utf-8", "replace").strip() or " ")
        lines.put("")

    if child.stdout is not None:
        threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    return lines


def _next(lines: queue.SimpleQueue[str], remaining_s: float) -> str | None:
    """Return the next line, "" at the end of the output; None if the deadline has passed."""
    try:
        return lines.get(timeout=max(remaining_s, 0))
    except queue.Empty:
        return None


def _ended(child: subprocess.Popen[bytes], patience_s: float) -> int:
    """Wait for the process to end; then end it, gracefully at first, and all that it started. Return its status."""
    for number, after_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _STOP_TIMEOUT_S)):
        try:
            return child.wait(after_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
    return child.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:200]


def reported(report: Report, name: str, context: CheckContext) -> Iterator[Row]:
    """Run a part in this process; an exception becomes a Row."""
    try:
        yield from report(context)
    except Exception as error:  # noqa: BLE001 - it is a finding
        yield failed(name, "the whole part", error)


def main(arguments: Sequence[str]) -> None:
    """Run one part for `in_process`: its name, and its context."""
    name, context_text = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that whatever it has started is ended too
    context = from_arguments(context_text, Path(_folder(context_text)) / ROWS)
    part = next(part for part in PARTS if part.name == name)
    for row in reported(part.report(), name, context):
        print(row.line(), flush=True)


def _folder(context_text: str) -> str:
    return str(from_arguments(context_text, Path("/nonexistent")).folder)


def chosen(only: Iterable[str]) -> tuple[Part, ...]:
    """Return the requested parts, in their order; all if none was requested. Raises: ValueError."""
    names = set(only)
    parts_by_name: Mapping[str, Part] = {part.name: part for part in PARTS}
    if unknown := sorted(names - parts_by_name.keys()):
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(parts_by_name)}")
    return tuple(part for part in PARTS if not names or part.name in names)


if __name__ == "__main__":
    main(sys.argv[1:])
