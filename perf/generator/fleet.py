"""The fleet: all processes of the generator, controlled as one."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from . import process
from .orders import ARRAYS, Load, Part, Payloads, Target, Window

_LEAD_NS = 5_000_000
_POLL_S = 0.05
_END_LIMIT_S = 5.0
_CHILD = "from penstock.perf.generator.process import main; main({}, {})"


class FleetError(RuntimeError):
    """A process of the generator has died or failed: from here on the load is not the one requested."""


@dataclass(frozen=True, slots=True)
class _Child:
    orders: Connection
    failures: Connection
    process: subprocess.Popen[bytes]


class Fleet:
    """Processes that share a load. Threads: one at a time.

    A KeyboardInterrupt may interrupt any call: the order in progress is still carried out, its answer is dropped, and
    the next call works normally. `take` is not interrupted, since what it takes would be lost.
    """

    def __init__(self, children: list[_Child]) -> None:
        self._children = children
        self._serial = 0
        self._ended = False

    def start_load(self, load: Load) -> None:
        """Begin a load, or change to another. Raises: ConnectionError if the server cannot be reached, FleetError."""
        self._wait_for_failure(0)
        self._ended = False
        self._send_order(process.READY, load)
        self._send_order(process.START, time.monotonic_ns() + _LEAD_NS)

    def take(self) -> Window:
        """Return what ended since the last call. Raises: FleetError."""
        with _deferring_interrupts():
            windows: list[Window] = self._send_order(process.TAKE)
        return reduce(Window.merge, windows)

    def count(self) -> int:
        """Return how many have ended since the last `take`, successfully or not. Raises: FleetError."""
        return sum(self._send_order(process.COUNT))

    def wait(self, seconds: float, requests: int = 0) -> bool:
        """Wait. Returns: whether the wait ended early.

        It does so if the load cannot continue (`take` says why, or raises), or once `requests` requests have ended.
        """
        end_s = time.monotonic() + seconds
        while not self._ended:
            if requests and self.count() >= requests:
                return True
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_for_failure(min(left_s, _POLL_S) if requests else left_s)
        return True

    def halt(self) -> None:
        """Stop sending and wait for requests in flight, at most 10 s; then they count as errors."""
        self._send_order(process.HALT)

    def _wait_for_failure(self, seconds: float) -> None:
        all_failures = [child.failures for child in self._children]
        for failures in multiprocessing.connection.wait(all_failures, seconds):
            with contextlib.suppress(EOFError, OSError):
                all_failures[all_failures.index(failures)].recv()  # type: ignore[arg-type]
            self._ended = True

    def _send_order(self, *order: Any) -> list[Any]:
        self._serial += 1
        try:
            with _deferring_interrupts():
                for child in self._children:
                    child.orders.send((self._serial, *order))
            answers = [self._answer(child) for child in self._children]
        except (EOFError, OSError) as error:
            self._ended = True
            raise FleetError(f"a process of the generator has died{self._reported_failures()}") from error
        for succeeded, answer in answers:
            if not succeeded:
                is_os_error, reason = answer
                failure = f"a process of the generator failed: {reason}"
                raise ConnectionError(reason) if is_os_error else FleetError(failure)
        return [answer for _, answer in answers]

    def _reported_failures(self) -> str:
        reasons = ""
        for child in self._children:
            with contextlib.suppress(EOFError, OSError):
                while child.failures.poll():
                    reasons += f": {child.failures.recv()}"
        return reasons

    def _answer(self, child: _Child) -> tuple[bool, Any]:
        while True:
            multiprocessing.connection.wait([child.orders])
            with _deferring_interrupts():
                serial, succeeded, answer = child.orders.recv()
                if isinstance(answer, Window):
                    for name in ARRAYS:
                        setattr(answer, name, np.frombuffer(child.orders.recv_bytes(), np.int64))
            if serial == self._serial:  # others answer calls that were interrupted
                return succeeded, answer


@contextmanager
def _deferring_interrupts() -> Iterator[None]:
    """Defer a Ctrl-C, so that no partial message stays in a pipe."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])


@contextmanager
def fleet(target: Target, payloads: Payloads, processes: int = 1) -> Iterator[Fleet]:
    """Run `processes` processes until the block ends, or this process exits or is killed.

    They run on any core that this process may use. If the generator shares the machine with the server, the user can
    assign cores (taskset) for the whole command.
    """
    children: list[_Child] = []
    try:
        children.extend(_child() for _ in range(processes))
        for number, child in enumerate(children):
            child.orders.send(sys.path)
            child.orders.send((target, payloads, Part(number, processes)))
        yield Fleet(children)
    finally:
        for child in children:
            child.orders.close()
            child.failures.close()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(_END_LIMIT_S)
            child.process.kill()
            child.process.wait()


def _child() -> _Child:
    """Start one, in its own process group, so that a Ctrl-C at the terminal does not reach it."""
    orders, child_orders = multiprocessing.Pipe()
    failures, child_failures = multiprocessing.Pipe(duplex=False)
    files = (child_orders.fileno(), child_failures.fileno())
    child = subprocess.Popen([sys.executable, "-c", _CHILD.format(*files)], pass_fds=files, process_group=0)
    child_orders.close()
    child_failures.close()
    return _Child(orders, failures, child)
