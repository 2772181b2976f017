"""HookThreadPool: the threads that run the calls of replicas. Made by `replicas.py`, used by `replica.py`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .call import HookCall, log_warning
from .pool_thread import PoolThread

if TYPE_CHECKING:
    from .replica import Replica

SLOW_NS = 50_000_000
"""From this run time a call keeps its thread to itself, if replicas share threads."""
_RECHECK_NS = 100_000_000
"""The interval between checks of a hook that has been or is to be abandoned."""


class HookThreadPool:
    """Threads that take calls from one queue, in order.

    Invariants: every call put is settled by its replica on the event loop, or handed back. At most one call per replica
    is put at a time, unless the replica has the pool to itself; then there is one thread. A thread whose hook exceeds
    its limit is abandoned, together with the replica of that hook and no other; a new thread takes its place. Calls put
    during one turn of the loop begin at the end of the turn: woken earlier, the threads would only wait for the
    interpreter. `target_threads` is how many there should be while that many calls wait; if `stopped`, threads end.
    Threads: the event loop's, except for what `_run` calls. An `async` hook runs on an asyncio loop that its thread
    keeps running, so that its tasks survive between calls.
    """

    def __init__(self, model: str, version: str, loop: asyncio.AbstractEventLoop) -> None:
        self.target_threads = 1
        self._model = model
        self._thread_name = f"hooks-{model}/{version}"
        self._loop = loop
        self._queue: deque[HookCall] = deque()
        self._finished: deque[HookCall] = deque()
        self._replicas: list[Replica] = []
        self._threads: list[PoolThread] = []
        self._abandoned: list[PoolThread] = []
        self._thread_count = self._check_due_ns = 0
        self._lock = threading.Lock()
        self._wake_scheduled = self._settle_scheduled = self.stopped = False
        self._timer: asyncio.TimerHandle | None = None

    # -- on the event loop -------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether a call is waiting for a running one to end. Threads: any."""
        return bool(self._queue)

    def add(self, replica: Replica) -> None:
        """Start running the calls of a replica."""
        self._replicas.append(replica)
        if self._timer is not None and len(self._replicas) == 2:
            self._timer.cancel()  # it was set for a single replica, behind which nothing waits
            self._schedule_check(min(SLOW_NS, replica.limit_ns))
        if not self._threads:
            self._add_thread()

    def _add_thread(self) -> None:
        """Add a thread; if none can be started, the others continue. Raises: RuntimeError if there are no others."""
        thread = PoolThread(self._run, self._thread_name)
        try:
            with self._lock:  # which the thread takes before it ends
                thread.thread.start()
                self._thread_count += 1
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def enqueue(self, call: HookCall, *, wake_now: bool) -> None:
        """Run a call; `wake_now`: no other call is coming in this turn of the loop."""
        self._queue.append(call)
        if wake_now:
            self._wake_idle()
        elif not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._wake_at_turn_end)
        if self._timer is None:
            replica: Replica = call.replica
            self._schedule_check(min(SLOW_NS, replica.limit_ns) if len(self._replicas) > 1 else replica.limit_ns)

    def _wake_at_turn_end(self) -> None:
        self._wake_scheduled = False
        self._wake_idle()

    def _wake_idle(self) -> None:
        count = len(self._queue)
        for thread in tuple(self._threads):
            if not count:
                return
            if thread.is_idle:
                thread.wake()
                count -= 1
        while count > 0 and len(self._threads) < min(self.target_threads, len(self._replicas)):
            self._add_thread()
            count -= 1

    def remove(self, replica: Replica) -> None:
        """Stop running calls of a replica; after the last replica, the threads end when their calls are done."""
        if replica in self._replicas:
            if len(self._replicas) == 1:
                self._stop()
            else:
                self._replicas.remove(replica)
                self._queue.append(replica.make_end_call())
                self._wake_idle()

    def _stop(self) -> None:
        self.stopped = True
        for thread in tuple(self._threads):
            thread.wake()
        if self._timer is not None and not self._abandoned:  # a hook that spins must still be ended
            self._timer.cancel()

    def pop_oldest(self) -> HookCall | None:
        """Take the call that has waited longest, if any."""
        return self._queue.popleft() if self._queue else None

    def withdraw(self, replica: Replica) -> list[HookCall]:
        """Take back the calls of a replica that have not begun."""
        withdrawn = []
        for call in [each for each in tuple(self._queue) if each.replica is replica]:
            with contextlib.suppress(ValueError):  # a thread may take it first
                self._queue.remove(call)
                withdrawn.append(call)
        return withdrawn

    def _settle_finished(self) -> None:
        # cleared first: a call that ends meanwhile schedules another turn
        self._settle_scheduled = False
        done = self._finished
        while done:
            call = done.popleft()
            call.replica.settle(call)
        if not self.stopped:
            for thread in tuple(self._threads):
                if thread.has_ended and thread in self._threads:
                    self._threads.remove(thread)
                    self._on_thread_ended(thread)

    def _on_thread_ended(self, thread: PoolThread) -> None:
        """Continue without a thread that user code has ended."""
        replica = thread.running_call.replica if thread.running_call is not None else self._replicas[0]
        running, thread.running_call = thread.running_call, None
        self._detach(replica)
        replica.on_thread_died(running)

    def _detach(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        if not self._replicas:
            self._stop()
        elif not self._threads:
            try:
                self._add_thread()
            except RuntimeError:
                remaining, self._replicas = self._replicas, []
                self._stop()
                for each in remaining:  # their calls are handed back, and rejected if no replica can be made
                    each.on_thread_died(None)
                    each.close_instance()

    def _check(self) -> None:
        """Check the running hooks. One timer for any number of calls, which fires at intervals."""
        self._timer = None
        now_ns = time.monotonic_ns()
        for thread in self._threads:
            thread.record_check((now_ns - self._check_due_ns) / 1e9)
        remaining_ns = self.enforce_limits(now_ns)
        if remaining_ns and self._timer is None:
            self._schedule_check(remaining_ns)

    def _schedule_check(self, after_ns: int) -> None:
        self._check_due_ns = time.monotonic_ns() + after_ns
        self._timer = self._loop.call_later(after_ns / 1e9, self._check)

    def enforce_limits(self, now_ns: int) -> int:
        """Abandon the hooks that have exceeded their limit at `now_ns`.

        Returns: in how many nanoseconds to check again; 0 means not before the next call.
        """
        self._settle_finished()
        delays_ns = [self._enforce_limit(thread, now_ns) for thread in tuple(self._threads)]
        self._abandoned = [thread for thread in self._abandoned if not thread.try_interrupt()]
        if self._abandoned:
            delays_ns.append(_RECHECK_NS)
        return min(filter(None, delays_ns), default=0)

    def _enforce_limit(self, thread: PoolThread, now_ns: int) -> int:
        running = thread.running_call
        if self.stopped or not any(replica.pending_calls for replica in self._replicas):
            return 0
        shared = len(self._replicas) > 1
        if running is None:
            return SLOW_NS if shared else self._replicas[0].limit_ns
        limit_ns, limit_start_ns = running.replica.limit_of(running), running.limit_start_ns
        remaining_ns: int = limit_start_ns + limit_ns - now_ns
        if remaining_ns <= 0:
            remaining_ns = math.ceil(thread.doubt.extra_s(limit_start_ns, -remaining_ns / 1e9, limit_ns / 1e9) * 1e9)
        if remaining_ns > 0:
            if shared and now_ns - limit_start_ns > SLOW_NS:
                self._mark_slow(thread)
            return min(remaining_ns, SLOW_NS) if shared else remaining_ns
        with thread.lock:
            if thread.running_call is not running:
                return _RECHECK_NS
            thread.abandoned_replica = running.replica
        with self._lock:
            self._thread_count -= 1
        self._threads.remove(thread)
        self._abandoned.append(thread)
        self._detach(thread.abandoned_replica)
        thread.abandoned_replica.abandon(running, thread, limit_ns)
        if thread.wake_loop is not None:
            thread.wake_loop()
        self._wake_idle()
        return 0

    def _mark_slow(self, thread: PoolThread) -> None:
        """Let another thread run what waits behind a slow call."""
        thread.is_slow = True
        if self._queue and all(each.is_slow for each in self._threads):
            self._add_thread()

    # -- on the threads ----------------------------------------------------------------------------------------

    def _run(self, thread: PoolThread) -> None:
        pool_continues = False
        try:
            pool_continues = self._serve_calls(thread)
        except BaseException as error:  # noqa: BLE001 - a user's task may raise SystemExit
            if thread.abandoned_replica is None:
                log_warning("the thread of the hooks ended", {"model": self._model}, error)
        finally:
            thread.wake_loop = None
            for replica in self._finished_replicas(thread):
                replica.close_instance()
            thread.has_ended = not pool_continues
            self.schedule_settling()

    def _finished_replicas(self, thread: PoolThread) -> Sequence[Replica]:
        """Return the replicas of which nothing runs once a thread has ended."""
        with thread.lock:
            if thread.abandoned_replica is not None:
                return (thread.abandoned_replica,)
        with self._lock:
            self._thread_count -= 1
            return () if self._thread_count else tuple(self._replicas)

    def _serve_calls(self, thread: PoolThread) -> bool:
        """Run calls. Returns: whether the pool continues without this thread."""
        while (call := self._next_call(thread)) is not None:
            replica: Replica = call.replica
            if thread.begin(call):
                try:
                    call.result = call.convert_result(replica.bound, call.invoke(replica.bound))
                except BaseException as error:  # noqa: BLE001 - sys.exit in a hook must only affect its own request
                    replica.set_error(call, error, should_log=thread.abandoned_replica is None)
            if not self._finish(thread, call):
                return False
            if replica.is_async:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                    runner.run(self._serve_async_calls(thread))
                return False
            del call  # otherwise its value would be kept until the next call
        return not self.stopped

    def _next_call(self, thread: PoolThread) -> HookCall | None:
        queue = self._queue
        while True:
            try:
                return queue.popleft()
            except IndexError:
                if self.stopped or (len(self._threads) > 1 and self._retire_if_spare(thread)):
                    return None
            thread.is_idle = True
            if not queue and not self.stopped:  # a call put before that wakes no thread
                thread.wake_queue.get()
            thread.is_idle = False

    def _retire_if_spare(self, thread: PoolThread) -> bool:
        with self._lock:
            if sum(not each.is_slow for each in self._threads) <= self.target_threads or thread not in self._threads:
                return False
            self._threads.remove(thread)
            return True

    async def _serve_async_calls(self, thread: PoolThread) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.current_task()

        def wake_thread_loop() -> None:
            callback = task.cancel if thread.abandoned_replica is not None and task is not None else arrived.set
            with contextlib.suppress(RuntimeError):  # that loop has just been closed
                loop.call_soon_threadsafe(callback)

        thread.wake_loop = wake_thread_loop
        while True:
            arrived.clear()
            thread.is_idle = True
            try:
                call = self._queue.popleft()
            except IndexError:
                if self.stopped:
                    return
                await arrived.wait()
                continue
            replica: Replica = call.replica
            if thread.begin(call):
                try:
                    result = call.invoke(replica.bound)
                    converted = await result if inspect.isawaitable(result) else result
                    call.result = call.convert_result(replica.bound, converted)
                except BaseException as error:  # noqa: BLE001 - as in _serve_calls
                    replica.set_error(call, error, should_log=thread.abandoned_replica is None)
            if not self._finish(thread, call) or (task is not None and task.cancelling()):
                # abandoned; or a user's task has ended the loop, which cancels all others on exit
                return
            del call
            result = converted = None

    def _finish(self, thread: PoolThread, call: HookCall) -> bool:
        """Report a finished call; False if the thread has been abandoned and must end."""
        if not thread.end(call):
            return False
        self._finished.append(call)
        self.schedule_settling()
        return True

    def schedule_settling(self) -> None:
        """Schedule the settling of finished calls."""
        if not self._settle_scheduled:
            self._settle_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._settle_finished)
            except RuntimeError:
                # the loop is closed, and nobody waits
                self.stopped = True
