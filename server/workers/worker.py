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
from .order import ENDED, STARTED, NotStartedError, Order, WorkerLost
from .process import Process, describe_end, is_external_kill
from .watch import CHECK_INTERVAL_S, LimitExtension, WorkerWatch, read_process_state

IDLE_S = 5.0
"""A worker that has been idle for this long is pinged."""
CLOSE_LIMIT_S = 10.0
"""How long closing may take, and how long the process may take to exit afterwards."""
EXIT_GRACE_S = 0.1
"""How long a process may take to exit after it closes its socket, or after it is killed before its callers are
answered."""

logger = logging.getLogger("penstock.workers")
Reply = tuple[bytes, list[Array | None]]
OnReply = Callable[[bytes, list[Array | None], Exception | None], None]
"""Called when a call ends, with its reply or with the error."""
_Call = tuple[int, OnReply, float]
"""A call in flight: its number, its callback, and its limit in seconds from when it is first in line (0: no limit)."""
_NUMBER = struct.Struct("<Q")
_OPEN_NUMBER = 1
"""The number of the OPEN call."""
_REPLY_KINDS = frozenset((REPLY, ERROR))


class Worker:
    """One worker process. Calls run one at a time, in order; several may be in flight.

    Invariants: every call is answered exactly once: with its reply, with the error that the worker raised, with
    WorkerLost if the worker ended while the call ran, or with NotStartedError if the call had not begun. A caller may
    cancel its future earlier. A call that exceeds its limit ends the worker. `kill`, `stop` and the end of the server
    leave no process behind. `ready` holds the answer to OPEN; if opening fails, the worker ends. `on_lost` is called
    once, when the worker has ended without `stop`, even if it never became ready. `ended` always completes, once the
    process is reaped and its resources are released. `serving`: the worker accepts calls. `end_reason` is the cause of
    its end as a metrics label, `end_message` the same as text.
    Threads: the event loop's.
    Raises: InferError (NOT_READY) if the system has no descriptors or threads left.
    """

    def __init__(
        self, order: Order, on_lost: Callable[[Worker], None] = lambda _: None,
        on_message: Callable[[int, int, bytes, list[Array | None]], None] | None = None,
    ) -> None:  # fmt: skip
        self.order = order
        self.serving = True
        self.exited = False
        self.end_reason = ""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._on_lost = on_lost
        self._on_message = on_message
        self._calls: deque[_Call] = deque()
        self._last_number = 0
        self._line_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._next_check_s = math.inf
        self._ping_number = 0
        self._extension = LimitExtension(0.001)
        self.end_message = ""
        self._end_code = Code.NOT_READY
        self._stopping = False
        self._exit_status: int | OSError | None = None
        self._disconnect_timer: asyncio.TimerHandle | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._watch = WorkerWatch(order.memory_bytes)
        body = {"service": order.service, "settings": dict(order.settings), "path": list(order.path)}
        opening = json.dumps(body).encode()
        try:
            self._spawn(order)
        except (OSError, RuntimeError) as error:
            raise InferError(Code.NOT_READY, f"{order.label}: no worker could be started: {error}") from error
        order.on_event(STARTED)
        self.ready = self.call(OPEN, opening, limit_s=order.open_limit_s)
        _ignore_result(self.ready)

    def _spawn(self, order: Order) -> None:
        with contextlib.ExitStack() as undo:
            own_socket, child_socket = socket.socketpair()
            undo.callback(own_socket.close)
            sock = child_socket.detach()
            undo.callback(os.close, sock)
            begun_fd = os.memfd_create("begun", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, begun_fd)
            os.ftruncate(begun_fd, mmap.PAGESIZE)
            seal(begun_fd)
            self._begun_memory = mmap.mmap(begun_fd, mmap.PAGESIZE)
            undo.callback(self._begun_memory.close)
            read_fd, write_fd = os.pipe()
            undo.callback(os.close, read_fd)
            undo.callback(os.close, write_fd)
            self._process = Process(order, (sock, begun_fd, write_fd), self._on_exit)
            undo.pop_all()
        self._output = Output(
            read_fd, order.label, order.log_fields, order.harmless_lines, always_logged=order.always_logged,
            on_line=order.on_line,
        )  # fmt: skip
        self._link = Link(own_socket, self._on_messages, self._on_disconnect)

    @property
    def pid(self) -> int:
        """The process id. Raises: RuntimeError before the process is spawned; it is spawned once `ready` is done."""
        if not self._process.pid:
            raise RuntimeError("the worker has not started yet")
        return self._process.pid

    @property
    def in_flight_count(self) -> int:
        """The number of calls in flight."""
        return len(self._calls)

    def call(
        self, kind: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None, *, limit_s: float = 0.0
    ) -> asyncio.Future[Reply]:
        """Send a call. Cancelling the future does not cancel the call.

        Raises: NotStartedError if the worker is gone; TypeError or ValueError for values that cannot be sent.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.send_call(functools.partial(_settle, future), kind, body, arrays, limit_s)
        return future

    def send_call(
        self, on_reply: OnReply, kind: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        limit_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Send a call. `on_reply` is called once, in the order of the calls, and must not raise.

        A future instead would add 1 us and one turn of the loop to each call. Raises: as `call`.
        """
        if not self.serving:
            raise NotStartedError
        number = self._last_number + 1
        self._link.send(kind, number, body, arrays)
        self._last_number = number
        was_idle = not self._calls
        self._calls.append((number, on_reply, limit_s))
        if was_idle:
            self._line_since_s = time.monotonic()
        if was_idle or 0.0 < limit_s < CHECK_INTERVAL_S:  # otherwise the running timer fires soon enough
            within_s = limit_s if 0.0 < limit_s < CHECK_INTERVAL_S else CHECK_INTERVAL_S
            if self._loop.time() + within_s < self._next_check_s:
                self._schedule_check(within_s)

    def send_message(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a message that has no answer; does nothing if the worker is gone. `descriptors` are duplicated.

        Raises: TypeError or ValueError for values that cannot be sent; OSError if `descriptors` cannot be duplicated.
        """
        self._link.send(kind, number, body, arrays, descriptors)

    def stop(self) -> None:
        """Let the calls in flight finish, then end the worker."""
        if self.serving:
            _ignore_result(self.call(CLOSE, limit_s=CLOSE_LIMIT_S))
            self.serving = False
        self._stopping = True

    def kill(self, message: str, code: Code = Code.NOT_READY, reason: str = "killed") -> None:
        """Kill the worker now; `message` is the error that its callers receive."""
        if not self.exited and not self.end_message:
            self.end_message, self._end_code, self.end_reason = message, code, reason
            self.serving = False
            self._process.kill()
            self._kill_timer = self._loop.call_later(EXIT_GRACE_S, self._settle)

    @property
    def killed_externally(self) -> bool:
        """Whether something other than its own code or this server killed the worker."""
        return self.end_reason == "signal" and is_external_kill(self._exit_status)

    # -- messages from the worker ---------------------------------------------------------------------------------

    def _on_messages(self, messages: list[Message]) -> None:
        try:
            self._handle_messages(messages)
        except Exception:
            # user code may write to any descriptor
            logger.exception("%s sent an invalid message", self.order.label, extra=dict(self.order.log_fields))
            self.kill(f"{self.order.label} sent an invalid message")

    def _handle_messages(self, messages: list[Message]) -> None:
        now_s = time.monotonic()
        for kind, number, body, arrays, _ in messages:
            if kind not in _REPLY_KINDS:
                if self._on_message is not None:
                    self._on_message(kind, number, body, arrays)
                continue
            if not self._calls or self._calls[0][0] != number:
                self.kill(f"{self.order.label} answered a call that was not made")
                return
            error = read_error(body) if kind == ERROR else None
            _, on_reply, _ = self._calls.popleft()
            self._line_since_s = now_s
            if error is None:
                on_reply(body, arrays, None)
                continue
            on_reply(b"", [], error)
            if number == _OPEN_NUMBER:
                self.kill(f"{self.order.label} could not be started: {error.message}", reason="open")

    # -- supervision -----------------------------------------------------------------------------------------------

    def _schedule_check(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_check_s = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._next_check_s, self._check)

    def _check(self) -> None:
        """Check the first call in line and the process. One timer serves all calls."""
        now_s = time.monotonic()
        if self.end_message:
            return
        within_s = IDLE_S
        if self._calls or self._stopping:
            within_s = self._next_check_in_s(now_s)
        elif self.serving and now_s - self._line_since_s >= IDLE_S:
            _ignore_result(self.call(PING))
            self._ping_number, within_s = self._last_number, CHECK_INTERVAL_S
        elif self.order.memory_bytes:
            within_s = CHECK_INTERVAL_S
        pinged = bool(self._calls) and self._calls[0][0] == self._ping_number
        state = read_process_state(self._process.pid, memory=self.order.memory_bytes > 0) if self._process.pid else None
        fault = self._watch.check(now_s, state, pinged=pinged) if state else None
        if fault is not None:
            self.kill(f"{self.order.label} {fault[1]}", reason=fault[0])
        elif not self.end_message:
            self._schedule_check(within_s)

    def _next_check_in_s(self, now_s: float) -> float:
        """Return the seconds until the next check. A call past its limit ends the worker."""
        number, _, limit_s = self._calls[0] if self._calls else (self._last_number, None, CLOSE_LIMIT_S)
        self._extension.record_check(number, self._loop.time() - self._next_check_s)
        remaining_s = self._line_since_s + limit_s - now_s
        if not limit_s or remaining_s >= CHECK_INTERVAL_S:
            return CHECK_INTERVAL_S
        if remaining_s > 0.0:
            return remaining_s
        if extra_s := self._extension.extra_s(number, -remaining_s, limit_s):
            return extra_s
        closing = self._stopping and len(self._calls) < 2
        activity = "opening" if number == _OPEN_NUMBER else "closing" if closing else "a call"
        self.kill(f"{self.order.label}: {activity} took longer than its limit of {limit_s:g} s", Code.EXPIRED, "time")
        return CHECK_INTERVAL_S

    # -- the end ---------------------------------------------------------------------------------------------------

    def _on_disconnect(self, reason: str) -> None:
        if self._exit_status is not None:
            self._finish()
        elif self._calls or not self._stopping:  # after CLOSE, the time that `_next_check_in_s` allows applies
            self.serving = False
            self._disconnect_timer = self._loop.call_later(EXIT_GRACE_S, self._kill_unreachable, reason)

    def _kill_unreachable(self, reason: str) -> None:
        state = read_process_state(self._process.pid, memory=False)
        if state is None or state.state in "ZX":
            return  # it has exited, and its status is about to arrive: the machine is busy
        self.kill(f"{self.order.label} cannot be reached: {reason}", reason="silent")

    def _on_exit(self, status: int | OSError) -> None:
        self._exit_status = status
        if self._disconnect_timer is not None:
            self._disconnect_timer.cancel()
        self._link.read_remaining()
        self._finish()

    def _finish(self) -> None:
        if self.exited:
            return
        self.exited, self.serving = True, False
        for timer in (self._timer, self._disconnect_timer, self._kill_timer):
            if timer is not None:
                timer.cancel()
        self._link.close()
        self._output.close()
        opening = bool(self._calls) and self._calls[0][0] == _OPEN_NUMBER
        ending = describe_end(self.order, self._exit_status, self._output.last_line if opening else None)
        orderly = self._stopping and not self.end_message
        if not self.end_message:
            self.end_reason, self.end_message, self._end_code = ending
        if not orderly:
            # if opening failed or was cancelled, the caller reports it
            is_reported = self.end_reason == "open" or (opening and self.end_reason == "killed")
            level = logging.DEBUG if is_reported else logging.WARNING
            logger.log(level, "%s", self.end_message, extra=dict(self.order.log_fields))
        self._settle()
        self._begun_memory.close()
        if not self.ended.done():
            self.ended.set_result(None)
        # drop the references to the owner, which refers to this Worker: the cycle would wait for the garbage collector
        on_lost, self._on_lost, self._on_message = self._on_lost, _ignore_loss, None
        if not self._stopping:
            self.order.on_event(ENDED + self.end_reason)
            on_lost(self)

    def _settle(self) -> None:
        """Answer all calls: when the worker has ended, or EXIT_GRACE_S after a kill: large processes exit slowly."""
        (begun_number,) = _NUMBER.unpack_from(self._begun_memory)
        calls, self._calls = self._calls, deque()
        for number, on_reply, _ in calls:
            was_started = number <= max(begun_number, _OPEN_NUMBER)
            on_reply(b"", [], WorkerLost(self.end_message, self._end_code) if was_started else NotStartedError())


def _ignore_loss(_: Worker) -> None:
    """Replace the callback of a worker whose end has been reported."""


def _settle(future: asyncio.Future[Reply], body: bytes, arrays: list[Array | None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result((body, arrays))
    else:
        future.set_exception(error)


def _ignore_result(future: asyncio.Future[Reply]) -> None:
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
