"""A Backend for tests, loaded in worker processes: y = 2 x, unless x holds a Fault.

Options: `load` is a Fault that happens during the load; `on` "1" makes Bindings with `run_on`, which return what
they were given; `width` is the width of a row, -1 by default; `mark` is a file that is made when a Fault begins.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec


class Fault(enum.IntEnum):
    """A fault to inject, given as the value of an element."""

    DIE = -1001
    CRASH = enum.auto()
    HANG = enum.auto()
    WAIT = enum.auto()
    REFUSE = enum.auto()
    RAISE = enum.auto()
    NO_MEMORY = enum.auto()
    TOO_MUCH = enum.auto()
    LOSE = enum.auto()
    STOP = enum.auto()
    LEAVE = enum.auto()
    MAP = enum.auto()
    COMPLEX = enum.auto()
    GROW = enum.auto()
    FREEZE = enum.auto()
    PRINT = enum.auto()
    FEWER = enum.auto()
    SLOW = enum.auto()
    CLOSE = enum.auto()
    NONE = enum.auto()


class FaultyBinding:
    def __init__(self, signature: Signature, capacity_rows: int, *, on: bool, mark: str) -> None:
        self.capacity_rows = capacity_rows
        self._mark = mark
        self._dtypes = [spec.type.dtype for spec in signature.inputs]
        self._lent: list[Array | None] = []
        self._stopped = threading.Event()
        if on:
            self.run_on, self.clear_stop = self._run, self._stopped.clear

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        self._stopped.clear()
        self._lent = [
            None if shape is None else np.empty(shape, dtype) for shape, dtype in zip(shapes, self._dtypes, strict=True)
        ]
        return self._lent

    def run(self, wanted: Sequence[int]) -> list[Any]:
        return self._run(self._lent, wanted)

    def _run(self, arrays: Sequence[Array | None], positions: Sequence[int]) -> list[Any]:
        (x,) = arrays
        assert x is not None
        fault = next((fault for fault in Fault if x.size and (x == fault).any()), None)
        if fault is not None and self._mark:
            Path(self._mark).touch()
        if fault is Fault.WAIT:
            self._stopped.wait(60)
            raise RunStopped(Code.EXPIRED, "stopped in time")
        if fault is not None:
            odd = happen(fault)
            if odd is not None:
                return [odd] * (fault is not Fault.NONE and len(positions))
        place = np.full(len(x), x.ctypes.data % 64)
        pid = np.full(len(x), os.getpid())
        return [[x if self.__dict__.get("run_on") else x * 2, place, pid][position] for position in positions]

    def stop(self) -> None:
        self._stopped.set()


class FaultyBackend:
    """Outputs: y, the address of x (modulo 64), and the process id."""

    platform = "faulty"
    compiles_each_size = True
    runtime_metadata: Mapping[str, Any] = {"said": {"of": "it", "deep": [1, None]}}

    def __init__(self, options: Mapping[str, str]) -> None:
        self._on, self._mark = options.get("on") == "1", options.get("mark", "")
        width = int(options.get("width", "-1"))
        self.graph = Signature(
            (TensorSpec("x", "FP32", (-1, width)),),
            (
                TensorSpec("y", "FP32", (-1, width)),
                TensorSpec("place", "INT64", (-1,)),
                TensorSpec("pid", "INT64", (-1,)),
            ),
        )
        self.node_inputs = [Node("x", "float", [None, "width"])]
        self.node_outputs = [Node("y", "float", [None, 4])]

    def bind(self, signature: Signature, capacity_rows: int) -> FaultyBinding:
        if capacity_rows == Fault.DIE:
            os._exit(9)
        if capacity_rows == Fault.REFUSE:
            raise InferError(Code.INVALID, "no such Binding")
        return FaultyBinding(signature, capacity_rows, on=self._on, mark=self._mark)

    def close(self) -> None:
        sys.stdout.write("the model is closed\n")


def load(path: Path, device: str, options: Mapping[str, str]) -> FaultyBackend:
    if "load" in options:
        happen(Fault(int(options["load"])))
    return FaultyBackend({**options, "device": device})


def happen(fault: Fault) -> Any:
    """Perform the fault. Some return an output that is not a tensor."""
    return _ACTS[fault]()


def _refuse(error: Exception) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def _die() -> None:
    sys.stderr.write("this is the end\n")
    os._exit(7)


def _crash() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    time.sleep(60)


def _leave() -> None:
    sys.exit(3)


def _grow() -> None:
    array = np.ones(300 << 20, np.uint8)
    time.sleep(60)
    del array


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # this thread is stopped slightly later than the thread that gets the signal


def _print() -> None:
    sys.stdout.write("a line of the runtime\n")


def _slow() -> None:
    time.sleep(0.2)


_ACTS: dict[Fault, Callable[[], Any]] = {
    Fault.DIE: _die,
    Fault.CRASH: _crash,
    Fault.HANG: _hang,
    Fault.REFUSE: _refuse(InferError(Code.INVALID, "not this one", 5)),
    Fault.RAISE: _refuse(ZeroDivisionError("what only the log is told")),
    Fault.NO_MEMORY: _refuse(MemoryError()),
    Fault.TOO_MUCH: _refuse(OutOfMemory(Code.OVERLOADED, "too many rows", 3)),
    Fault.LOSE: _refuse(DeviceLost(Code.NOT_READY, "the device is gone")),
    Fault.STOP: _refuse(RunStopped(Code.EXPIRED, "it was stopped")),
    Fault.LEAVE: _leave,
    Fault.MAP: lambda: {"no": "tensor"},
    Fault.COMPLEX: lambda: np.ones(1, np.complex64),
    Fault.GROW: _grow,
    Fault.FREEZE: _freeze,
    Fault.PRINT: _print,
    Fault.NONE: lambda: 0,
    Fault.FEWER: lambda: np.ones((0, 4), np.float32),
    Fault.SLOW: _slow,
    Fault.CLOSE: lambda: os.closerange(3, 1 << 12),
}
