"""WorkerReplica: one instance of a model's hook file, in its own process. Made by `worker_replicas.py`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from typing import Any, Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec
from penstock.server.ipc.errors import read_error
from penstock.server.workers.order import NotStartedError, Order
from penstock.server.workers.watch import LimitExtension
from penstock.server.workers.worker import Worker

from .call import STATISTICS_NAMES, HookCall, MovedError, ReplicaOwner, about_of, blame, log, log_lines
from .packing import ANSWER, DONE, FORGET, GIVE_WAY, REFUSED, REPLIED
from .pull import AHEAD
from .worker_pull import WorkerPull

AHEAD_NS = 1_000_000
"""The work queued at a worker besides its current call: enough for this long, so that it need not be woken for each
call, and no call waits there that another worker could take."""
MOST_AHEAD = 32
_QUICK_NS = AHEAD_NS / MOST_AHEAD
_REPLIED_BYTES = REPLIED.size

logger = logging.getLogger("penstock.hooks")


class WorkerOwner(ReplicaOwner, Protocol):
    """The owner of replicas in processes. Threads: called on the event loop."""

    def roomy(self) -> None:
        """Handle that a replica has room for another call."""


class WorkerReplica:
    """One process with one instance of the user's module, with a Replica's interface: its hooks run one at a time.

    Invariants: every call's future is completed exactly once: by the hook's result or error, by WorkerLost if the
    process ended while it ran, by `MovedError` if it had not begun, or by its own cancellation. A call that exceeds its
    limit ends the process. `waiting` counts the calls queued here and those sent; `room` is how many more may be sent,
    not counting turns of generators, which give way to any call. `keeps`: what pre_inference leaves in the parameters
    stays in the process for the request's post_inference. `proved`: a call has been answered.
    Threads: the event loop's.
    """

    hangs = False

    def __init__(self, model: Model, spec: HookSpec, order: Order, owner: WorkerOwner) -> None:
        self._model = model
        self._owner = owner
        self._count_hook = model.statistics.record_hook
        self._limit_ns = int(spec.timeout_s * 1e9)
        self._loop = asyncio.get_running_loop()
        self._line: deque[HookCall] = deque()
        self._sent: deque[HookCall] = deque()
        self._generators: dict[int, WorkerPull] = {}
        self._turns = self._turns_sent = 0
        self._mean_ns = float(AHEAD_NS)
        self.room = self._most = 2
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = self._stopping = False
        self._doubt = LimitExtension(0.001)
        self._due_ns = 0
        self._takes: tuple[bool, ...] = (False, False)
        self.has_pre = self.has_post = self.yields = self.keeps = False
        self.proved = False
        self.waiting = 0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(lambda ready: ready.exception())
        self._worker = Worker(order, self._lost, self._said)
        self._worker.ready.add_done_callback(self._opened)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._worker.pid

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done once the process is gone and reaped."""
        return self._worker.ended

    @property
    def serves(self) -> bool:
        """Whether a call given to it will run."""
        return self._worker.serving and not self._stopping

    def holds(self, pull: WorkerPull) -> bool:
        """Return whether the generator is active in the process."""
        return pull.number in self._generators

    def submit(self, call: HookCall) -> asyncio.Future[Any]:
        """Run a hook here; if its future is cancelled, a running hook continues, and a waiting one is skipped.

        Raises: MovedError.
        """
        future = call.future = self._loop.create_future()
        self.put(call)
        return future

    def put(self, call: HookCall) -> None:
        """Run a hook whose future already exists. Raises: MovedError."""
        if not self.serves:
            raise MovedError
        self.waiting += 1
        self._line.append(call)
        self._go_on()

    def take(self, call: HookCall) -> None:
        """Run a call that already has its future. Only if there is room, so that none is queued here."""
        self.waiting += 1
        self._send(call)

    def tell(self, kind: int, number: int) -> None:
        """Send the worker a notification."""
        self._worker.send_message(kind, number)

    def leave(self) -> None:
        """Give the replica back to its owner, once none of its hooks is running."""
        if self.waiting:
            self._leaving = True
        else:
            self._owner.freed(self)

    def stop(self) -> None:
        """End the process once it has done what it was sent, without waiting for that."""
        self._stopping = True
        if self.ready.done():
            self._worker.stop()
        else:
            self.kill()
        self._move()

    def kill(self) -> None:
        """Kill the process now."""
        self._worker.kill(f"{self._worker.order.label} were stopped before they had finished")

    def watch(self, now_ns: int) -> int:
        """End the process if its hook has exceeded the limit at `now_ns`.

        Returns: in how many nanoseconds to check again; 0 means not before the next call.
        """
        if not self._sent or not self.ready.done():
            return 0
        running = self._sent[0]
        left_ns = running.since_ns + self._limit_ns - now_ns
        if left_ns > 0:
            return left_ns
        limit_s = self._limit_ns / 1e9
        if more_s := self._doubt.extra_s(running.since_ns, -left_ns / 1e9, limit_s):
            return int(more_s * 1e9)
        text = f"{running.hook} of model '{self._model.name}' took longer than its limit of {limit_s:g} s"
        log(text, about_of(self._model, running))
        self._worker.kill(text, Code.EXPIRED, "time")
        return 0

    # -- sending -----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        while self._line and self.room > 0:
            self._send(self._line.popleft())

    def _send(self, call: HookCall) -> None:
        now_ns = time.monotonic_ns() if call.deadline_ns or not self._sent else 0
        error: Exception | None = None
        if call.future.done():
            self._forget(call)
        elif call.deadline_ns and now_ns >= call.deadline_ns:
            error = InferError(Code.EXPIRED, "Request timeout expired")
        else:
            try:
                self._put(call, now_ns)
            except NotStartedError:
                error = MovedError()
            except Exception as problem:  # noqa: BLE001 - cannot be encoded, or is nested too deeply
                error = InferError(Code.INTERNAL, str(problem))
            else:
                return
        self.waiting -= 1
        if error is not None:
            call.future.set_exception(error)

    def _put(self, call: HookCall, now_ns: int) -> None:
        if self._turns_sent:
            self.tell(GIVE_WAY, self._turns)
        pull = call if isinstance(call, WorkerPull) else None
        if pull is not None:
            self._turns += 1
            pull.turn = self._turns
            pull.most = AHEAD if self.waiting == 1 else 1
        kind, body, arrays = call.written(self._takes)
        self._worker.send_call(self._answered, kind, body, arrays)
        if pull is not None:
            self._turns_sent += 1
            self._generators[pull.number] = pull
        else:
            self.room -= 1
        call.replica = self
        if not self._sent:
            call.since_ns = now_ns
        self._sent.append(call)
        if self._timer is None:
            self._look_in(self._limit_ns)

    # -- events ------------------------------------------------------------------------------------------------

    def _opened(self, opened: asyncio.Future[Any]) -> None:
        if self.ready.done():
            return
        error = opened.exception()
        if error is not None:
            self.ready.set_exception(error)
            return
        try:
            has = json.loads(opened.result()[0])
            self.has_pre, self.has_post, self.yields = has["pre"], has["post"], has["yields"]
            self._takes, self.keeps = tuple(has["takes"]), has["keeps"]
        except (ValueError, TypeError, LookupError) as wrong:
            self.kill()
            self.ready.set_exception(InferError(Code.INTERNAL, f"{self._worker.order.label}: {wrong!r}"))
            return
        self.ready.set_result(None)

    def _answered(self, body: bytes, arrays: list[Array | None], error: Exception | None) -> None:
        """Handle the end of the call that was sent first."""
        call = self._sent.popleft()
        self.waiting -= 1
        if self._sent:
            self._sent[0].since_ns = time.monotonic_ns()
        pull = call if isinstance(call, WorkerPull) else None
        if pull is not None:
            self._turns_sent -= 1
        else:
            self.room += 1
        if error is None:
            try:
                error = self._read(call, body, arrays)
            except Exception as wrong:
                text = f"{call.hook} of model '{self._model.name}' returned an answer that cannot be read"
                logger.exception("%s", text)
                error = InferError(Code.INTERNAL, f"{text}: {wrong!r}")
                self._worker.kill(text)
        elif isinstance(error, NotStartedError):
            error = MovedError()
        if error is not None and not call.future.done():
            call.future.set_exception(error)
        if pull is not None and (error is not None or pull.ended_ns >= 0):
            self._generators.pop(pull.number, None)
        self._go_on()
        if self._leaving and not self.waiting:
            self._leaving = False
            if self.serves:
                self._owner.freed(self)
        self._owner.roomy()

    def _read(self, call: HookCall, body: bytes, arrays: list[Array | None]) -> InferError | None:
        how, took_ns, ended_ns = REPLIED.unpack_from(body)
        text = body[_REPLIED_BYTES:]
        self.proved = True
        name = STATISTICS_NAMES.get(call.hook)
        if name is not None:
            self._mean_ns = mean_ns = self._mean_ns + (took_ns - self._mean_ns) / 8
            most = MOST_AHEAD if mean_ns <= _QUICK_NS else 1 + int(AHEAD_NS / mean_ns)
            if most != self._most:
                self.room += most - self._most
                self._most = most
            self._count_hook(name, took_ns)
        if how == DONE:
            result = call.taken(text, arrays, ended_ns - 1)
            if call.future.done():
                self._forget(call)
            else:
                call.future.set_result(result)
            return None
        if how == REFUSED:
            error = read_error(text)
            if error.code is Code.INTERNAL:
                log(f"{call.hook}: {error.message}", about_of(self._model, call))
            return error
        raised, plain, lines, worded = json.loads(text)
        error = read_error(worded) if worded else blame(call, raised, sample=plain)
        log_lines(f"{call.hook} raised {raised}", about_of(self._model, call), lines)
        return error

    def _forget(self, call: HookCall) -> None:
        """Have the worker discard what it keeps for a request that nobody waits for."""
        if self.keeps:
            self.tell(FORGET, call.number)

    def _said(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        pull = self._generators.get(number)
        if kind == ANSWER and pull is not None:
            if self._sent:
                self._sent[0].since_ns = time.monotonic_ns()  # the limit is per step
            pull.told(body, arrays)

    def _lost(self, worker: Worker) -> None:
        if self.ready.done() and not self._stopping:
            self._stopping = True
            self._move()
            self._owner.lost(self)

    def _move(self) -> None:
        """Hand back the calls that have not been sent."""
        if self._timer is not None and not self._sent:
            self._timer.cancel()
        line, self._line = self._line, deque()
        for call in line:
            self.waiting -= 1
            if not call.future.done():
                call.future.set_exception(MovedError())

    def _look(self) -> None:
        """Check the running hook. One timer for any number of calls, which fires at intervals."""
        self._timer = None
        now_ns = time.monotonic_ns()
        if self._sent:
            self._doubt.record_check(self._sent[0].since_ns, (now_ns - self._due_ns) / 1e9)
        left_ns = self.watch(now_ns)
        if left_ns:
            self._look_in(left_ns)

    def _look_in(self, after_ns: int) -> None:
        self._due_ns = time.monotonic_ns() + after_ns
        self._timer = self._loop.call_later(after_ns / 1e9, self._look)
