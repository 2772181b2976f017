"""Replicas: how many instances of a model's hook file there are, and which request holds which.

Called by `placement.py` and by each request's Visit, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from operator import attrgetter
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.scheduling.queue_limits import queue_requests
from penstock.batching.spec import HookSpec

from .bench import Bench
from .call import HookCall
from .holding import LONG_NS, Holding
from .plan import ReplicaPlan
from .replica import Replica
from .visit import Visit
from .waits import Waits

LIGHT_LOAD_NS = 100_000_000
LIGHT_BYTES = 8 << 20
"""The most time and memory that loading another instance may take for it to be light."""
SLOW_LOADS = 2
"""This many slow loads in a row are not a coincidence; a single one may be due to a stopped machine."""
FIRST_BYTES = 256 << 20
"""A shared instance gets others beside it only if loading it took at most this much, which includes the libraries."""
FEW = 32
"""Up to this many concurrent requests on average, running swift hooks on the loop costs less than a thread (ADR
0023)."""
MAX_HANGING = 8
"""The most abandoned replicas with unfinished threads; beyond it, no new replica is made until one of them ends."""

logger = logging.getLogger("penstock.hooks")
waiting_of = attrgetter("waiting")


class Replicas:
    """The replicas of one model.

    Invariant: unless the plan is shared, a replica is held by at most one request, from `take` or `wait` to `leave`.
    Another replica is made when a request has to wait, one at a time. One that hangs or dies is replaced the same way.
    A shared one gets equivalent others while its hooks wait (waits.py) and loading is light; these are removed when
    they are idle and its hooks no longer wait. Where the plan has replicas together, they share as many threads as the
    waiting of the hooks makes worthwhile.
    `guests` are the active requests. `holding`, if set, is told how long each call has computed.
    """

    def __init__(self, model: Model, spec: HookSpec, decided: ReplicaPlan, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = decided.shared
        self.holding: Holding | None = None
        self.guests = 0
        self._crowd = 0.0
        self._retired = False
        self._model = model
        self._spec = spec
        self._loop = loop
        self._limit = decided.replicas
        self._light_limit = decided.light
        self._slow_loads = 0
        self._together = decided.together
        self._constant = decided.constant
        self._bench: Bench | None = None
        self._waits = Waits(decided.light if decided.shared or decided.together else 1)
        self._max_waiting = queue_requests(model.spec.policy)
        self._live: list[Any] = []
        self._free: list[Any] = []
        self._making: Replica | None = None
        self._hanging: list[Replica] = []
        self._refusing = False
        self._started = False
        self._closing = False
        self._waiters: deque[asyncio.Future[Any]] = deque()

    async def start(self) -> Any:
        """Make the first replica, so that an error in the file fails the load of the model.

        Raises: InferError.
        """
        first = await self.wait(0)
        self._started = True
        return first

    def admit(self) -> Visit:
        """Admit a request, or reject it on arrival if too many are waiting. Raises: InferError (OVERLOADED)."""
        waiting = len(self._waiters)
        if self.shared:
            for replica in self._live:
                waiting += replica.waiting
        self._check(waiting)
        self._crowd += (self.guests - self._crowd) / FEW
        return Visit(self, self._model)

    def _check(self, waiting: int) -> None:
        if waiting >= self._max_waiting:
            text = f"{waiting} requests wait for the hooks of model '{self._model.name}', which is the limit"
            raise InferError(Code.OVERLOADED, text)

    def take(self) -> Any:
        """Take a replica if one is free; if they are shared, the one with the fewest waiting calls."""
        if self.shared:
            live = self._live
            replica = live[0] if live else None
            if self._waits.wanted > 1 or len(live) > 1:
                replica = self._take_shared()
            return replica if replica is not None and replica.serves else None
        while self._free:
            replica = self._free.pop()
            if replica.serves:
                return replica
        return None

    def _take_shared(self) -> Any:
        live = self._live
        if len(live) > self._waits.wanted:
            idle = [replica for replica in live if not replica.waiting]
            if len(idle) > self._waits.wanted:
                # a hanging one is no reason to remove the others
                live.remove(idle[-1])
                idle[-1].stop()
        replica = min(live, key=waiting_of, default=None)
        if replica is not None and replica.waiting:
            self._grow_shared()
        return replica

    async def wait(self, deadline_ns: int) -> Any:
        """Wait for a replica; requests are served in order of arrival.

        Raises: InferError (EXPIRED, OVERLOADED, or the reason why no replica can be made).
        """
        future = self.line_up(deadline_ns)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # handed over in the same loop turn in which its request was cancelled
                self.leave(future.result())
            raise

    def line_up(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Return a future for a replica; if it is cancelled, it may already have been given one."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(future)
        timer = None
        if deadline_ns:
            timer = self._loop.call_later(max(deadline_ns - time.monotonic_ns(), 0) / 1e9, self._expire, future)
        future.add_done_callback(lambda _: self._stepped_out(future, timer))
        self._grow()
        return future

    def _stepped_out(self, future: asyncio.Future[Any], timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        if future.cancelled() or future.exception() is not None:
            with contextlib.suppress(ValueError):
                self._waiters.remove(future)

    def leave(self, replica: Any) -> None:
        """Give a replica back. It is handed on once a hook still running in it has ended."""
        if not self.shared:
            replica.leave()

    def watch(self, now_ns: int) -> None:
        """Abandon replicas whose hooks have exceeded their limit at `now_ns`; otherwise a timer does so."""
        for replica in list(self._live):
            replica.watch(now_ns)

    def close(self) -> None:
        """End the threads of all replicas; waiting requests are rejected."""
        self._closing = True
        self._refuse(InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded"))
        for replica in self._live:
            replica.stop()
        if self._making is not None:
            self._making.stop()
        self._live, self._free = [], []

    def runs(self) -> bool:
        """Whether any of them is running a hook."""
        return any(replica.waiting for replica in self._live)

    def retire(self) -> None:
        """Close once the active requests have ended; no new ones come."""
        self._retired = True
        if not self.guests:
            self.close()

    def departed(self) -> None:
        """Handle the end of a request."""
        self.guests -= 1
        if self._retired and not self.guests:
            self.close()

    # -- called by replicas ------------------------------------------------------------------------------------

    @property
    def measures(self) -> bool:
        """Whether each call's CPU time must be reported. Threads: any."""
        return self._waits.measures or (self.holding is not None and self.holding.measures)

    @property
    def quiet(self) -> bool:
        """Whether no other call is likely to come in this turn of the loop: there is one request, or one replica."""
        return self.guests <= 1 or (self._bench is None and not self.shared)

    @property
    def few(self) -> bool:
        """Whether a thread would recently have been woken for almost each request."""
        return self._crowd <= FEW

    @property
    def several(self) -> bool:
        """Whether any of several replicas takes any call."""
        return self.shared and len(self._live) > 1

    def took(self, call: HookCall, took_ns: int) -> None:
        """Learn from a call."""
        holding = self.holding
        if holding is not None and (took_ns > LONG_NS or holding.measures):
            holding.took(call.hook, call.cpu_ns if holding.measures else 0)
        if self._waits.took(took_ns, call.cpu_ns):
            if self._bench is not None:
                self._bench.wanted = self._waits.wanted
            if self._awaited():
                self._grow_shared()

    def idle(self, replica: Any) -> None:
        """Let an idle replica take over a waiting call of another."""
        if replica in self._live:
            replica.relieve(max(self._live, key=waiting_of))

    def freed(self, replica: Any) -> None:
        """Hand a replica to the request that has waited longest."""
        if replica not in self._live or not replica.serves:
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

    def _grow_shared(self) -> None:
        """Make another equivalent replica, if it is worthwhile and the first was light enough."""
        live = self._live
        worth = self.shared and live and len(live) < self._waits.wanted
        if worth and not live[0].yields and live[0].load_bytes <= FIRST_BYTES:
            self._grow()

    def _awaited(self) -> bool:
        return any(replica.waiting > 1 for replica in self._live)

    def _grow(self) -> None:
        if self._closing or self._making is not None or len(self._live) >= max(self._limit, self._light_limit):
            return
        self._hanging = [replica for replica in self._hanging if replica.hangs]
        if len(self._hanging) >= MAX_HANGING:
            self._refuse_to_grow()
            return
        self._refusing = False
        bench = None if self._bench is None or self._bench.stopped else self._bench
        try:
            self._making = Replica(self._model, self._spec, self._loop, self, bench, constant=self._constant)
        except RuntimeError as error:  # the system's limit of threads
            if not self._live:
                self._refuse(InferError(Code.OVERLOADED, f"no thread for the hooks of '{self._model.name}': {error}"))
            return
        self._making.ready.add_done_callback(self._made)

    def _refuse_to_grow(self) -> None:
        text = f"{len(self._hanging)} hooks of model '{self._model.name}' hang past their limit"
        if not self._refusing:
            self._refusing = True
            logger.error("%s; no new replica is created until one ends", text, extra={"model": self._model.name})
        if not self._live:
            self._refuse(InferError(Code.OVERLOADED, text))

    def _made(self, ready: asyncio.Future[None]) -> None:
        replica, self._making = self._making, None
        error = ready.exception()
        if replica is None or self._closing:
            return
        if error is None:
            if self._live:
                self._weigh(replica)
            self._live.append(replica)
            if self._together and not (replica.is_async or replica.yields):
                self._bench = replica.bench
            self.freed(replica)
            if self.several:
                self.idle(replica)
                if self._awaited():
                    self._grow_shared()
            elif self._waiters:
                self._grow()
        elif self._live:
            # make do with the existing ones: a file that fails to load again is not retried at every request
            self._limit, self._light_limit = len(self._live), 0
            logger.warning("staying at %d replicas", self._limit, extra={"model": self._model.name})
        elif isinstance(error, InferError):
            # a file that has become invalid is not the client's mistake
            self._refuse(self._told(InferError(Code.NOT_READY, error.message)) if self._started else error)
        else:  # the bench has lost its last thread meanwhile
            self._grow()

    def _weigh(self, replica: Replica) -> None:
        """Stop making optional replicas if this one was heavy to load."""
        self._slow_loads = self._slow_loads + 1 if replica.load_ns > LIGHT_LOAD_NS else 0
        if self._slow_loads >= SLOW_LOADS or replica.load_bytes > LIGHT_BYTES:
            self._light_limit = 0

    def _told(self, error: InferError) -> InferError:
        """Remove the location of the user's files from a text sent to clients. The log has it in full."""
        folder = self._spec.roots[0] if self._spec.roots else self._spec.path.parent
        return InferError(error.code, error.message.replace(f"{folder}/", ""))

    def _refuse(self, error: InferError) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_exception(InferError(error.code, error.message))

    @staticmethod
    def _expire(future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(InferError(Code.EXPIRED, "Request timeout expired"))
