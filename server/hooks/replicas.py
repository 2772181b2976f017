"""Replicas: how many instances of a model's hook file there are, and which request holds which.

Called by `runner.py`, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec
from penstock.batching.statistics import OTHER

from .call import Call, Form, MovedError
from .holding import Holding
from .loading import POST
from .plan import Plan
from .pull import Answer, Pull
from .replica import Replica

LIGHT_LOAD_NS = 100_000_000
LIGHT_BYTES = 8 << 20
"""What loading an instance more may take, of time and of memory, for it to be light."""
MAX_HANGING = 8
"""Abandoned replicas whose threads have not ended; past that many, no fresh one is made until one of them ends."""

logger = logging.getLogger("penstock.hooks")
T = TypeVar("T")


class Replicas:
    """The replicas of one model.

    Invariant: unless the plan is shared, a replica is held by at most one request, from `take` or `wait` to `leave`.
    A replica more is made when a request has to wait, one at a time. One that hangs or dies is replaced likewise.
    `guests` are the requests under way. `holding`, where there is one, hears what each call has computed.
    """

    def __init__(self, model: Model, spec: HookSpec, decided: Plan, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = decided.shared
        self.holding: Holding | None = None
        self.guests = 0
        self._retired = False
        self._model = model
        self._spec = spec
        self._loop = loop
        self._limit = decided.replicas
        self._light_limit = decided.light
        self._max_waiting = max(model.spec.policy.max_queue_rows, 1)
        self._live: list[Any] = []
        self._free: list[Any] = []
        self._making: Replica | None = None
        self._hanging: list[Replica] = []
        self._refusing = False
        self._closing = False
        self._waiters: deque[asyncio.Future[Any]] = deque()

    async def start(self) -> Any:
        """Make the first replica, so that what is wrong with the file fails the load of the model.

        Raises: InferError.
        """
        return await self.wait(0)

    def admit(self) -> Passage:
        """Let a request in, or refuse it at the door when too many wait. Raises: InferError (OVERLOADED)."""
        waiting = len(self._waiters)
        if self.shared and self._live:
            waiting += self._live[0].waiting
        self._check(waiting)
        return Passage(self, self._model)

    def _check(self, waiting: int) -> None:
        if waiting >= self._max_waiting:
            text = f"{waiting} requests wait for the hooks of model '{self._model.name}', which is the limit"
            raise InferError(Code.OVERLOADED, text)

    def take(self) -> Any:
        """Take a replica if one is free."""
        if self.shared:
            return self._live[0] if self._live and self._live[0].serves else None
        while self._free:
            replica = self._free.pop()
            if replica.serves:
                return replica
        return None

    async def wait(self, deadline_ns: int) -> Any:
        """Wait for a replica; requests are served in the order they came.

        Raises: InferError (EXPIRED, OVERLOADED, or why no replica can be made).
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(future)
        self._grow()
        timer = None
        if deadline_ns:
            timer = self._loop.call_later(max(deadline_ns - time.monotonic_ns(), 0) / 1e9, self._expire, future)
        try:
            return await future
        except (asyncio.CancelledError, InferError):
            if future.done() and not future.cancelled() and future.exception() is None:
                # handed over in the loop turn in which its request was cancelled
                self.leave(future.result())
            elif future in self._waiters:
                self._waiters.remove(future)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def leave(self, replica: Any) -> None:
        """Give a replica back. It is handed on when the hook that may still run in it has ended."""
        if not self.shared:
            replica.leave()

    def watch(self, now_ns: int) -> None:
        """Abandon the replicas whose hooks are past their limit by `now_ns`; they do so themselves in time."""
        for replica in list(self._live):
            replica.watch(now_ns)

    def close(self) -> None:
        """End the threads of all replicas; whoever still waits is refused."""
        self._closing = True
        self._refuse(InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded"))
        for replica in self._live:
            replica.stop()
        if self._making is not None:
            self._making.stop()
        self._live, self._free = [], []

    def runs(self) -> bool:
        """Whether a hook runs in any of them now."""
        return any(replica.waiting for replica in self._live)

    def retire(self) -> None:
        """Close when the requests under way have ended; no more come."""
        self._retired = True
        if not self.guests:
            self.close()

    def departed(self) -> None:
        """Hear that a request has ended."""
        self.guests -= 1
        if self._retired and not self.guests:
            self.close()

    # -- called by replicas ------------------------------------------------------------------------------------

    def freed(self, replica: Any) -> None:
        """Hand a replica to the request that has waited longest."""
        if replica not in self._live:
            return
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(replica)
                if not self.shared:
                    return
        if not self.shared:
            self._free.append(replica)

    def lost(self, replica: Any) -> None:
        """Replace a replica that hangs or has died."""
        if replica.hangs:
            self._hanging.append(replica)
        if replica is self._making or replica not in self._live:
            return
        self._live.remove(replica)
        if replica in self._free:
            self._free.remove(replica)
        if self._waiters or not self._live:
            self._grow()

    # -- growing -----------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        if self._closing or self._making is not None or len(self._live) >= max(self._limit, self._light_limit):
            return
        self._hanging = [replica for replica in self._hanging if replica.hangs]
        if len(self._hanging) >= MAX_HANGING:
            self._refuse_to_grow()
            return
        self._refusing = False
        self._making = Replica(self._model, self._spec, self._loop, self)
        self._making.ready.add_done_callback(self._made)

    def _refuse_to_grow(self) -> None:
        text = f"{len(self._hanging)} hooks of model '{self._model.name}' hang past their limit"
        if not self._refusing:
            self._refusing = True
            logger.error("%s; no fresh replica is made until one ends", text, extra={"model": self._model.name})
        if not self._live:
            self._refuse(InferError(Code.OVERLOADED, text))

    def _made(self, ready: asyncio.Future[None]) -> None:
        replica, self._making = self._making, None
        error = ready.exception()
        if replica is None or self._closing:
            return
        if error is None:
            if self._live and not (replica.load_ns <= LIGHT_LOAD_NS and replica.load_bytes <= LIGHT_BYTES):
                self._light_limit = 0
            self._live.append(replica)
            self.freed(replica)
            if self._waiters:
                self._grow()
        elif self._live:
            # those there are will do: a file that cannot be loaded again is not tried at every request
            self._limit, self._light_limit = len(self._live), 0
            logger.warning("staying at %d replicas", self._limit, extra={"model": self._model.name})
        elif isinstance(error, InferError):
            self._refuse(error)

    def _refuse(self, error: InferError) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_exception(InferError(error.code, error.message))

    @staticmethod
    def _expire(future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(InferError(Code.EXPIRED, "Request timeout expired"))


class Passage:
    """One request's way through the hooks: the replica it holds, from its first hook until `leave`."""

    __slots__ = ("_begun", "_model", "_replica", "_replicas")

    def __init__(self, replicas: Any, model: Model) -> None:
        self._replicas = replicas
        self._model = model
        self._replica: Any = None
        self._begun = False
        replicas.guests += 1

    async def call(self, call: Call) -> Any:
        """Run one of the request's hooks, on the replica it holds or on the first that is free.

        Raises: InferError.
        """
        return await self._on_replica(call, lambda replica: replica.submit(call))

    def pull(self, outputs: list[Any], form: Form, request_id: str) -> Pull:
        """Make the Pull of what the request's hook yields for a prediction."""
        return Pull(outputs, form.code, request_id)

    def post(self, outputs: list[Any], form: Form, request_id: str) -> Call:
        """Make the call of post_inference. A deadline is for waiting: what the model has run for is finished."""
        return Call(POST, outputs, form.code, 0, request_id)

    async def next(self, pull: Pull) -> Answer | None:
        """Give what the request's hook yields next, None after the last. Raises: InferError."""
        return await self._on_replica(pull, pull.next)

    async def _on_replica(self, call: Call, work: Callable[[Any], Awaitable[T]]) -> T:
        start_ns = time.monotonic_ns()
        try:
            while True:
                if self._replica is None:
                    self._replica = self._replicas.take() or await self._replicas.wait(call.deadline_ns)
                try:
                    result = await work(self._replica)
                except MovedError:
                    if call.begun or self._is_bound():
                        # what pre_inference left in that replica's globals has gone with it
                        raise self._gone() from None
                    self._replica = None
                else:
                    self._begun = True
                    return result
        except InferError:
            self._model.statistics.record_failure(OTHER, start_ns, time.monotonic_ns())
            raise

    def _is_bound(self) -> bool:
        """Whether no other replica can go on with the request."""
        return self._begun and not self._replicas.shared

    def _gone(self) -> InferError:
        """Make what the client is told when the replica that it needs is gone."""
        return InferError(Code.INTERNAL, f"the hooks of model '{self._model.name}' ended their thread")

    def leave(self) -> None:
        """Give back what is held. To be called once."""
        if self._replica is not None:
            self._replicas.leave(self._replica)
            self._replica = None
        self._replicas.departed()
