"""Worker: one worker process, as its server sees it. Made by whoever has calls for it: hooks, Python models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message

from .kinds import CLOSE, ERROR, OPEN, REPLY
from .order import NotBegunError, Order, WorkerLost

logger = logging.getLogger("penstock.workers")
Reply = tuple[bytes, list[Array | None]]
_NUMBER = struct.Struct("<Q")
_PACKAGES = ("server", "batching", "backends")


class _Call:
    """A call under way. Units: `limit_s` seconds from when it is the first in line, 0 for none."""

    __slots__ = ("future", "limit_s", "number")

    def __init__(self, number: int, future: asyncio.Future[Reply], limit_s: float) -> None:
        self.number = number
        self.future = future
        self.limit_s = limit_s


class Worker:
    """One process. Calls run there one at a time, in order; several may be on their way.

    Invariants: every call's future is settled exactly once: by its reply, by the error the worker raised, by WorkerLost
    if the worker ended while it ran, by NotBegunError if it had not begun, or by its own cancellation. A call that runs
    for longer than its limit ends the worker. No process is left behind by `kill`, by `stop` or by the server's end.
    `ready` has the answer to opening. `lost` is called once when the process ends, unless `stop` was called.
    Threads: the event loop's, on the main thread (the process would die with another one).
    """

    def __init__(
        self, order: Order, lost: Callable[[Worker], None] = lambda _: None,
        said: Callable[[int, int, bytes, list[Array | None]], None] | None = None,
    ) -> None:  # fmt: skip
        self.order = order
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._said = said
        self._calls: deque[_Call] = deque()
        self._last = 0
        self._since_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._why = ""
        self._code = Code.NOT_READY
        self._stopping = False
        self.gone = False
        self._process, sock, self._begun = _spawned(order)
        self._link = Link(sock, self._take, self._ended)
        body = {"service": order.service, "settings": dict(order.settings), "path": list(order.path)}
        self.ready = self.call(OPEN, json.dumps(body).encode(), limit_s=order.open_limit_s)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def serves(self) -> bool:
        """Whether a call given to it will be run."""
        return not (self.gone or self._stopping or self._why)

    @property
    def waiting(self) -> int:
        """How many calls are on their way."""
        return len(self._calls)

    def call(
        self, kind: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None, *, limit_s: float = 0.0
    ) -> asyncio.Future[Reply]:
        """Have something done; cancelling the future leaves the call to run.

        Raises: NotBegunError when it is gone; TypeError for a tensor that cannot travel.
        """
        if not self.serves:
            raise NotBegunError
        self._last += 1
        self._link.send(kind, self._last, body, arrays)
        call = _Call(self._last, self._loop.create_future(), limit_s)
        if not self._calls:
            self._since_ns = time.monotonic_ns()
        self._calls.append(call)
        if limit_s and self._loop.time() + limit_s < self._due:
            self._look_in(limit_s)
        return call.future

    def _look_in(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._due, self._watch)

    def tell(self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None) -> None:
        """Tell it something that is not answered."""
        self._link.send(kind, number, body, arrays)

    def stop(self) -> None:
        """Let it do what was asked, and end."""
        if self.serves:
            closing = self.call(CLOSE)
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._stopping = True

    def kill(self, why: str, code: Code = Code.NOT_READY) -> None:
        """End it here and now; `why` is what its callers are told."""
        if not self.gone and not self._why:
            self._why, self._code = why, code
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- events ------------------------------------------------------------------------------------------------

    def _take(self, messages: list[Message]) -> None:
        for kind, number, body, arrays, _ in messages:
            if kind not in {REPLY, ERROR}:
                if self._said is not None:
                    self._said(kind, number, body, arrays)
                continue
            call = self._calls.popleft()
            self._since_ns = time.monotonic_ns()
            if call.future.done():
                continue
            if kind == REPLY:
                call.future.set_result((body, arrays))
            else:
                call.future.set_exception(read_error(body))

    def _watch(self) -> None:
        self._timer, self._due = None, math.inf
        limited = [call for call in self._calls if call.limit_s]
        if not limited or self.gone:
            return
        call = self._calls[0]
        left_s = (call.limit_s or limited[0].limit_s) - (time.monotonic_ns() - self._since_ns) / 1e9 * (
            call.limit_s > 0
        )
        if left_s <= 0:
            self.kill(f"{self.order.label} took longer than the limit of {call.limit_s:g} s", Code.EXPIRED)
            return
        self._look_in(left_s)

    def _ended(self, why: str) -> None:
        self.gone = True
        if self._timer is not None:
            self._timer.cancel()
        status = self._reap()
        if not self._stopping:
            logger.warning("%s: its worker has ended (%s)", self.order.label, self._why or status)
        (begun,) = _NUMBER.unpack_from(self._begun)
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.future.done():
                error: Exception = NotBegunError()
                if call.number <= begun:
                    text = self._why or f"{self.order.label} ended: {status}"
                    error = WorkerLost(text, self._code)
                call.future.set_exception(error)
        if not self._stopping:
            self._lost(self)

    def _reap(self) -> str:
        try:
            status = self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"


def read_error(body: bytes) -> InferError:
    """Read an error that a worker has raised."""
    said: dict[str, Any] = json.loads(body)
    return InferError(Code[said["code"]], said["message"], said["retry_after_ns"])


def _spawned(order: Order) -> tuple[subprocess.Popen[bytes], socket.socket, mmap.mmap]:
    here, there = socket.socketpair()
    begun = os.memfd_create("begun", os.MFD_CLOEXEC)
    try:
        os.ftruncate(begun, mmap.PAGESIZE)
        memory = mmap.mmap(begun, mmap.PAGESIZE)
        root = Path(__file__).parents[1]
        folders = [f"{name}={_folder(name, root)}" for name in _PACKAGES]
        words = [str(there.fileno()), str(begun), str(os.getpid()), *folders]
        process = subprocess.Popen(  # noqa: S603 - the user's own Python
            [order.interpreter or sys.executable, str(Path(__file__).parent / "child.py"), *words],
            stdin=subprocess.DEVNULL, pass_fds=(there.fileno(), begun), cwd=order.folder, start_new_session=True,
            env={**os.environ, **order.environment},
        )  # fmt: skip
    except BaseException:
        here.close()
        raise
    finally:
        there.close()
        os.close(begun)
    return process, here, memory


def _folder(name: str, server: Path) -> str:
    """Give where a package of penstock is."""
    if name == "server":
        return str(server)
    module = __import__(f"penstock.{name}", fromlist=["__path__"])
    return str(Path(module.__file__ or "").parent)
