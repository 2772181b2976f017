"""Replicas: how many instances of a model's hook file there are, and which request holds which.

Called by `placement.py` and by each request's ReplicaLease, on the event loop.
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

from .call import HookCall
from .concurrency import ConcurrencyEstimate
from .gil_monitor import MAX_COMPUTE_NS, GilMonitor
from .plan import ReplicaPlan
from .replica import Replica
from .replica_lease import ReplicaLease
from .thread_pool import HookThreadPool

MAX_LIGHT_LOAD_NS = 100_000_000
MAX_LIGHT_BYTES = 8 << 20
"""The most time and memory that loading another instance may take for it to be light."""
MAX_SLOW_LOADS = 2
"""This many slow loads in a row are not a coincidence; a single one may be due to a stopped machine."""
MAX_SHAREABLE_BYTES = 256 << 20
"""A shared instance gets others beside it only if loading it took at most this much, which includes the libraries."""
MAX_INLINE_REQUESTS = 32
"""Up to this many concurrent requests on average, running hooks inline on the loop costs less than a thread (ADR
0023)."""
MAX_HANGING = 8
"""The most abandoned replicas with unfinished threads; beyond it, no new replica is made until one of them ends."""

logger = logging.getLogger("penstock.hooks")
pending_calls_of = attrgetter("pending_calls")


class Replicas:
    """The replicas of one model.

    Invariant: unless the plan is shared, a replica is held by at most one request, from `acquire` or `wait` to
    `release`. Another replica is made when a request has to wait, one at a time. One that hangs or dies is replaced the
    same way. A shared one gets equivalent others while its hooks wait (concurrency.py) and loading is light; these are
    removed when they are idle and its hooks no longer wait. Where the plan has replicas together, they share as many
    threads as the waiting of the hooks makes worthwhile. `active_requests` counts the requests in progress.
    `gil_monitor`, if set, receives how long each call has computed.
    """

    def __init__(self, model: Model, spec: HookSpec, plan: ReplicaPlan, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = plan.shared
        self.gil_monitor: GilMonitor | None = None
        self.active_requests = 0
        self._mean_requests = 0.0
        self._model = model
        self._spec = spec
        self._loop = loop
        self._limit = plan.replicas
        self._light_limit = plan.max_light
        self._slow_loads = 0
        self._shares_threads = plan.shares_threads
        self._is_constant = plan.is_constant
        self._pool: HookThreadPool | None = None
        self._concurrency = ConcurrencyEstimate(plan.max_light if plan.shared or plan.shares_threads else 1)
        self._max_waiting = queue_requests(model.spec.policy)
        self._live: list[Any] = []
        self._free: list[Any] = []
        self._starting: Replica | None = None
        self._hanging: list[Replica] = []
        self._is_retiring = self._hanging_reported = self._started = self._closing = False
        self._waiters: deque[asyncio.Future[Any]] = deque()

    async def start(self) -> Any:
        """Make the first replica, so that an error in the file fails the load of the model.

        Raises: InferError.
        """
        first = await self.wait(0)
        self._started = True
        return first

    def admit(self) -> ReplicaLease:
        """Admit a request, or reject it on arrival if too many are waiting. Raises: InferError (OVERLOADED)."""
        waiting = len(self._waiters)
        if self.shared:
            for replica in self._live:
                waiting += replica.pending_calls
        self._check_queue(waiting)
        self._mean_requests += (self.active_requests - self._mean_requests) / MAX_INLINE_REQUESTS
        return ReplicaLease(self, self._model)

    def _check_queue(self, waiting: int) -> None:
        if waiting >= self._max_waiting:
            text = f"{waiting} requests wait for the hooks of model '{self._model.name}', which is the limit"
            raise InferError(Code.OVERLOADED, text)

    def acquire(self) -> Any:
        """Take a replica if one is free; if they are shared, the one with the fewest waiting calls."""
        if self.shared:
            live = self._live
            replica = live[0] if live else None
            if self._concurrency.target > 1 or len(live) > 1:
                replica = self._acquire_shared()
            return replica if replica is not None and replica.is_serving else None
        while self._free:
            replica = self._free.pop()
            if replica.is_serving:
                return replica
        return None

    def _acquire_shared(self) -> Any:
        live = self._live
        if len(live) > self._concurrency.target:
            idle = [replica for replica in live if not replica.pending_calls]
            if len(idle) > self._concurrency.target:
                # a hanging one is no reason to remove the others
                live.remove(idle[-1])
                idle[-1].stop()
        replica = min(live, key=pending_calls_of, default=None)
        if replica is not None and replica.pending_calls:
            self._add_shared_replica()
        return replica

    async def wait(self, deadline_ns: int) -> Any:
        """Wait for a replica; requests are served in order of arrival.

        Raises: InferError (EXPIRED, OVERLOADED, or the reason why no replica can be made).
        """
        future = self.request_replica(deadline_ns)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                # handed over in the same loop turn in which its request was cancelled
                self.release(future.result())
            raise

    def request_replica(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Return a future for a replica; if it is cancelled, it may already have been given one."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.append(future)
        timer = None
        if deadline_ns:
            timer = self._loop.call_later(max(deadline_ns - time.monotonic_ns(), 0) / 1e9, self._expire, future)
        future.add_done_callback(lambda _: self._on_waiter_done(future, timer))
        self._add_replica()
        return future

    def _on_waiter_done(self, future: asyncio.Future[Any], timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        if future.cancelled() or future.exception() is not None:
            with contextlib.suppress(ValueError):
                self._waiters.remove(future)

    def release(self, replica: Any) -> None:
        """Give a replica back. It is handed on once a hook still running in it has ended."""
        if not self.shared:
            replica.release()

    def enforce_limits(self, now_ns: int) -> None:
        """Abandon replicas whose hooks have exceeded their limit at `now_ns`; otherwise a timer does so."""
        for replica in list(self._live):
            replica.enforce_limits(now_ns)

    def close(self) -> None:
        """End the threads of all replicas; waiting requests are rejected."""
        self._closing = True
        self._reject_waiters(InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded"))
        for replica in self._live:
            replica.stop()
        if self._starting is not None:
            self._starting.stop()
        self._live, self._free = [], []

    def is_running_hook(self) -> bool:
        """Whether any of them is running a hook."""
        return any(replica.pending_calls for replica in self._live)

    def retire(self) -> None:
        """Close once the active requests have ended; no new ones come."""
        self._is_retiring = True
        if not self.active_requests:
            self.close()

    def on_request_ended(self) -> None:
        """Handle the end of a request."""
        self.active_requests -= 1
        if self._is_retiring and not self.active_requests:
            self.close()

    # -- called by replicas ------------------------------------------------------------------------------------

    @property
    def measures_cpu(self) -> bool:
        """Whether each call's CPU time must be reported. Threads: any."""
        return self._concurrency.measures_cpu or (self.gil_monitor is not None and self.gil_monitor.measures_cpu)

    @property
    def expects_single_call(self) -> bool:
        """Whether no other call is likely to come in this turn of the loop: there is one request, or one replica."""
        return self.active_requests <= 1 or (self._pool is None and not self.shared)

    @property
    def lightly_loaded(self) -> bool:
        """Whether a thread would recently have been woken for almost each request."""
        return self._mean_requests <= MAX_INLINE_REQUESTS

    @property
    def has_equivalents(self) -> bool:
        """Whether any of several replicas takes any call."""
        return self.shared and len(self._live) > 1

    def record_call(self, call: HookCall, duration_ns: int) -> None:
        """Learn from a call."""
        gil_monitor = self.gil_monitor
        if gil_monitor is not None and (duration_ns > MAX_COMPUTE_NS or gil_monitor.measures_cpu):
            gil_monitor.record_call(call.hook, call.cpu_ns if gil_monitor.measures_cpu else 0)
        if self._concurrency.record_call(duration_ns, call.cpu_ns):
            if self._pool is not None:
                self._pool.target_threads = self._concurrency.target
            if self._has_backlog():
                self._add_shared_replica()

    def on_idle(self, replica: Any) -> None:
        """Let an idle replica take over a waiting call of another."""
        if replica in self._live:
            replica.take_over_from(max(self._live, key=pending_calls_of))

    def on_released(self, replica: Any) -> None:
        """Hand a replica to the request that has waited longest."""
        if replica not in self._live or not replica.is_serving:
            return
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(replica)
                if not self.shared:
                    return
        if not self.shared:
            self._free.append(replica)

    def on_failed(self, replica: Any) -> None:
        """Replace a replica that hangs or has died."""
        if replica.is_hanging:
            self._hanging.append(replica)
        if replica is self._starting or replica not in self._live:
            return
        self._live.remove(replica)
        if replica in self._free:
            self._free.remove(replica)
        if self._waiters or not self._live:
            self._add_replica()

    # -- growing -----------------------------------------------------------------------------------------------

    def _add_shared_replica(self) -> None:
        """Make another equivalent replica, if it is worthwhile and the first was light enough."""
        live = self._live
        is_worthwhile = self.shared and live and len(live) < self._concurrency.target
        if is_worthwhile and not live[0].yields and live[0].load_bytes <= MAX_SHAREABLE_BYTES:
            self._add_replica()

    def _has_backlog(self) -> bool:
        return any(replica.pending_calls > 1 for replica in self._live)

    def _add_replica(self) -> None:
        if self._closing or self._starting is not None or len(self._live) >= max(self._limit, self._light_limit):
            return
        self._hanging = [replica for replica in self._hanging if replica.is_hanging]
        if len(self._hanging) >= MAX_HANGING:
            self._report_hanging()
            return
        self._hanging_reported = False
        pool = None if self._pool is None or self._pool.stopped else self._pool
        try:
            self._starting = Replica(self._model, self._spec, self._loop, self, pool, is_constant=self._is_constant)
        except RuntimeError as error:  # the system's limit of threads
            if not self._live:
                text = f"cannot start a thread for the hooks of '{self._model.name}': {error}"
                self._reject_waiters(InferError(Code.OVERLOADED, text))
            return
        self._starting.ready.add_done_callback(self._on_started)

    def _report_hanging(self) -> None:
        text = f"{len(self._hanging)} hooks of model '{self._model.name}' hang past their limit"
        if not self._hanging_reported:
            self._hanging_reported = True
            logger.error("%s; no new replica is created until one ends", text, extra={"model": self._model.name})
        if not self._live:
            self._reject_waiters(InferError(Code.OVERLOADED, text))

    def _on_started(self, ready: asyncio.Future[None]) -> None:
        replica, self._starting = self._starting, None
        error = ready.exception()
        if replica is None or self._closing:
            return
        if error is None:
            if self._live:
                self._check_weight(replica)
            self._live.append(replica)
            if self._shares_threads and not (replica.is_async or replica.yields):
                self._pool = replica.pool
            self.on_released(replica)
            if self.has_equivalents:
                self.on_idle(replica)
                if self._has_backlog():
                    self._add_shared_replica()
            elif self._waiters:
                self._add_replica()
        elif self._live:
            # make do with the existing ones: a file that fails to load again is not retried at every request
            self._limit, self._light_limit = len(self._live), 0
            logger.warning("staying at %d replicas", self._limit, extra={"model": self._model.name})
        elif isinstance(error, InferError):
            # a file that has become invalid is not the client's mistake
            self._reject_waiters(
                self._without_paths(InferError(Code.NOT_READY, error.message)) if self._started else error
            )
        else:  # the pool has lost its last thread meanwhile
            self._add_replica()

    def _check_weight(self, replica: Replica) -> None:
        """Stop making optional replicas if this one was heavy to load."""
        self._slow_loads = self._slow_loads + 1 if replica.load_ns > MAX_LIGHT_LOAD_NS else 0
        if self._slow_loads >= MAX_SLOW_LOADS or replica.load_bytes > MAX_LIGHT_BYTES:
            self._light_limit = 0

    def _without_paths(self, error: InferError) -> InferError:
        """Remove the location of the user's files from a text sent to clients. The log has it in full."""
        folder = self._spec.roots[0] if self._spec.roots else self._spec.path.parent
        return InferError(error.code, error.message.replace(f"{folder}/", ""))

    def _reject_waiters(self, error: InferError) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_exception(InferError(error.code, error.message))

    @staticmethod
    def _expire(future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(InferError(Code.EXPIRED, "Request timeout expired"))
