"""Worker: one worker process, as seen by the server. Created by the owners of calls: hooks, Python models."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.arena import seal
from penstock.server.ipc.errors import read_error
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message

from .kinds import CLOSE, ERROR, OPEN, PING, REPLY
from .lines import Output
from .order import ENDED, STARTED, NotBegunError, Order, WorkerLost
from .process import Process, ending_of, is_taken
from .watch import LOOK_S, Doubt, WorkerWatch, see

IDLE_S = 5.0
"""A worker that has been idle for this long is pinged."""
CLOSE_LIMIT_S = 10.0
"""How long closing may take, and how long the process may take to exit afterwards."""
END_S = 0.1
"""How long a process may take to exit after it closes its socket, or after it is killed before its callers are
answered."""

logger = logging.getLogger("penstock.workers")
Reply = tuple[bytes, list[Array | None]]
Answered = Callable[[bytes, list[Array | None], Exception | None], None]
"""Called when a call ends, with its reply or with the error."""
_Call = tuple[int, Answered, float]
"""A call in flight: its number, its callback, and its limit in seconds from when it is first in line (0: no limit)."""
_NUMBER = struct.Struct("<Q")
_FIRST = 1
"""The number of the OPEN call."""
_ANSWERS = frozenset((REPLY, ERROR))


class Worker:
    """One worker process. Calls run one at a time, in order; several may be in flight.

    Invariants: every call is answered exactly once: with its reply, with the error that the worker raised, with
    WorkerLost if the worker ended while the call ran, or with NotBegunError if the call had not begun. A caller may
    cancel its future earlier. A call that exceeds its limit ends the worker. `kill`, `stop` and the end of the server
    leave no process behind.
    `ready` holds the answer to OPEN; if opening fails, the worker ends. `lost` is called once, when the worker has
    ended without `stop`, even if it never became ready. `ended` always completes, once the process is reaped and its
    resources are released. `serves`: the worker accepts calls. `reason` is the cause of its end as a metrics label,
    `why` the same as text.
    Threads: the event loop's.
    Raises: InferError (NOT_READY) if the system has no descriptors or threads left.
    """

    def __init__(
        self, order: Order, lost: Callable[[Worker], None] = lambda _: None,
        said: Callable[[int, int, bytes, list[Array | None]], None] | None = None,
    ) -> None:  # fmt: skip
        self.order = order
        self.serves = True
        self.gone = False
        self.reason = ""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._lost = lost
        self._said = said
        self._calls: deque[_Call] = deque()
        self._last = 0
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._pinged = 0
        self._doubt = Doubt(0.001)
        self.why = ""
        self._code = Code.NOT_READY
        self._stopping = False
        self._exit: int | OSError | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._watch = WorkerWatch(order.memory_bytes)
        body = {"service": order.service, "settings": dict(order.settings), "path": list(order.path)}
        opening = json.dumps(body).encode()
        try:
            self._spawn(order)
        except (OSError, RuntimeError) as error:
            raise InferError(Code.NOT_READY, f"{order.label}: no worker could be started: {error}") from error
        order.count(STARTED)
        self.ready = self.call(OPEN, opening, limit_s=order.open_limit_s)
        _ignore(self.ready)

    def _spawn(self, order: Order) -> None:
        with contextlib.ExitStack() as undo:
            here, there = socket.socketpair()
            undo.callback(here.close)
            sock = there.detach()
            undo.callback(os.close, sock)
            begun = os.memfd_create("begun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, begun)
            os.ftruncate(begun, mmap.PAGESIZE)
            seal(begun)
            self._begun = mmap.mmap(begun, mmap.PAGESIZE)
            undo.callback(self._begun.close)
            read, written = os.pipe()
            undo.callback(os.close, read)
            undo.callback(os.close, written)
            self._process = Process(order, (sock, begun, written), self._exited)
            undo.pop_all()
        self._output = Output(read, order.label, order.about, order.noise, heard=order.heard, line=order.line)
        self._link = Link(here, self._take, self._unlinked)

    @property
    def pid(self) -> int:
        """The process id. Raises: RuntimeError before the process is spawned; it is spawned once `ready` is done."""
        if not self._process.pid:
            raise RuntimeError("the worker has not started yet")
        return self._process.pid

    @property
    def waiting(self) -> int:
        """The number of calls in flight."""
        return len(self._calls)

    def call(
        self, kind: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None, *, limit_s: float = 0.0
    ) -> asyncio.Future[Reply]:
        """Send a call. Cancelling the future does not cancel the call.

        Raises: NotBegunError if the worker is gone; TypeError or ValueError for values that cannot be sent.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.ask(functools.partial(_settle, future), kind, body, arrays, limit_s)
        return future

    def ask(
        self, answered: Answered, kind: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        limit_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Send a call. `answered` is called once, in the order of the calls, and must not raise.

        A future instead would add 1 us and one turn of the loop to each call. Raises: as `call`.
        """
        if not self.serves:
            raise NotBegunError
        number = self._last + 1
        self._link.send(kind, number, body, arrays)
        self._last = number
        alone = not self._calls
        self._calls.append((number, answered, limit_s))
        if alone:
            self._since_s = time.monotonic()
        if alone or 0.0 < limit_s < LOOK_S:  # otherwise the running timer fires soon enough
            within_s = limit_s if 0.0 < limit_s < LOOK_S else LOOK_S
            if self._loop.time() + within_s < self._due_s:
                self._look_in(within_s)

    def tell(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a message that has no answer; does nothing if the worker is gone. `descriptors` are duplicated.

        Raises: TypeError or ValueError for values that cannot be sent; OSError if `descriptors` cannot be duplicated.
        """
        self._link.send(kind, number, body, arrays, descriptors)

    def stop(self) -> None:
        """Let the calls in flight finish, then end the worker."""
        if self.serves:
            _ignore(self.call(CLOSE, limit_s=CLOSE_LIMIT_S))
            self.serves = False
        self._stopping = True

    def kill(self, why: str, code: Code = Code.NOT_READY, reason: str = "killed") -> None:
        """Kill the worker now; `why` is the error that its callers receive."""
        if not self.gone and not self.why:
            self.why, self._code, self.reason = why, code, reason
            self.serves = False
            self._process.kill()
            self._kill_timer = self._loop.call_later(END_S, self._settle)

    @property
    def killed_externally(self) -> bool:
        """Whether something other than its own code or this server killed the worker."""
        return self.reason == "signal" and is_taken(self._exit)

    # -- messages from the worker ---------------------------------------------------------------------------------

    def _take(self, messages: list[Message]) -> None:
        try:
            self._take_each(messages)
        except Exception:
            # user code may write to any descriptor
            logger.exception("%s sent an invalid message", self.order.label, extra=dict(self.order.about))
            self.kill(f"{self.order.label} sent an invalid message")

    def _take_each(self, messages: list[Message]) -> None:
        now_s = time.monotonic()
        for kind, number, body, arrays, _ in messages:
            if kind not in _ANSWERS:
                if self._said is not None:
                    self._said(kind, number, body, arrays)
                continue
            if not self._calls or self._calls[0][0] != number:
                self.kill(f"{self.order.label} answered a call that was not made")
                return
            error = read_error(body) if kind == ERROR else None
            _, answered, _ = self._calls.popleft()
            self._since_s = now_s
            if error is None:
                answered(body, arrays, None)
                continue
            answered(b"", [], error)
            if number == _FIRST:
                self.kill(f"{self.order.label} could not be started: {error.message}", reason="open")

    # -- supervision -----------------------------------------------------------------------------------------------

    def _look_in(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        """Check the first call in line and the process. One timer serves all calls."""
        now_s = time.monotonic()
        if self.why:
            return
        within_s = IDLE_S
        if self._calls or self._stopping:
            within_s = self._left_s(now_s)
        elif self.serves and now_s - self._since_s >= IDLE_S:
            _ignore(self.call(PING))
            self._pinged, within_s = self._last, LOOK_S
        elif self.order.memory_bytes:
            within_s = LOOK_S
        pinged = bool(self._calls) and self._calls[0][0] == self._pinged
        seen = see(self._process.pid, memory=self.order.memory_bytes > 0) if self._process.pid else None
        wrong = self._watch.look(now_s, seen, pinged=pinged) if seen else None
        if wrong is not None:
            self.kill(f"{self.order.label} {wrong[1]}", reason=wrong[0])
        elif not self.why:
            self._look_in(within_s)

    def _left_s(self, now_s: float) -> float:
        """Return the seconds until the next check. A call past its limit ends the worker."""
        number, _, limit_s = self._calls[0] if self._calls else (self._last, None, CLOSE_LIMIT_S)
        self._doubt.looked(number, self._loop.time() - self._due_s)
        left_s = self._since_s + limit_s - now_s
        if not limit_s or left_s >= LOOK_S:
            return LOOK_S
        if left_s > 0.0:
            return left_s
        if more_s := self._doubt.more_s(number, -left_s, limit_s):
            return more_s
        what = "opening" if number == _FIRST else "closing" if self._stopping and len(self._calls) < 2 else "a call"
        self.kill(f"{self.order.label}: {what} took longer than its limit of {limit_s:g} s", Code.EXPIRED, "time")
        return LOOK_S

    # -- the end ---------------------------------------------------------------------------------------------------

    def _unlinked(self, why: str) -> None:
        if self._exit is not None:
            self._end()
        elif self._calls or not self._stopping:  # after CLOSE, the time that _look allows applies
            self.serves = False
            self._end_timer = self._loop.call_later(END_S, self._cut_off, why)

    def _cut_off(self, why: str) -> None:
        self.kill(f"{self.order.label} cannot be reached: {why}", reason="silent")

    def _exited(self, ended: int | OSError) -> None:
        self._exit = ended
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._link.read_remaining()
        self._end()

    def _end(self) -> None:
        if self.gone:
            return
        self.gone, self.serves = True, False
        for timer in (self._timer, self._end_timer, self._kill_timer):
            if timer is not None:
                timer.cancel()
        self._link.close()
        self._output.close()
        opening = bool(self._calls) and self._calls[0][0] == _FIRST
        ending = ending_of(self.order, self._exit, self._output.last if opening else None)
        orderly = self._stopping and not self.why
        if not self.why:
            self.reason, self.why, self._code = ending
        if not orderly:
            # if opening failed or was cancelled, the caller reports it
            told = self.reason == "open" or (opening and self.reason == "killed")
            logger.log(logging.DEBUG if told else logging.WARNING, "%s", self.why, extra=dict(self.order.about))
        self._settle()
        self._begun.close()
        if not self.ended.done():
            self.ended.set_result(None)
        # drop the references to the owner, which refers to this Worker: the cycle would wait for the garbage collector
        lost, self._lost, self._said = self._lost, _nobody, None
        if not self._stopping:
            self.order.count(ENDED + self.reason)
            lost(self)

    def _settle(self) -> None:
        """Answer all calls: when the worker has ended, or END_S after it was killed: large processes exit slowly."""
        (begun,) = _NUMBER.unpack_from(self._begun)
        calls, self._calls = self._calls, deque()
        for number, answered, _ in calls:
            ran = number <= max(begun, _FIRST)
            answered(b"", [], WorkerLost(self.why, self._code) if ran else NotBegunError())


def _nobody(_: Worker) -> None:
    """Replace the callback of a worker whose end has been reported."""


def _settle(future: asyncio.Future[Reply], body: bytes, arrays: list[Array | None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result((body, arrays))
    else:
        future.set_exception(error)


def _ignore(future: asyncio.Future[Reply]) -> None:
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
