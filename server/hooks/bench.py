"""Bench: the threads that run the calls of one or more replicas. Made by `replicas.py`, used by `replica.py`."""

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

from .call import HookCall, log
from .seat import Seat

if TYPE_CHECKING:
    from .replica import Replica

SLOW_NS = 50_000_000
"""From this run time a call keeps its thread to itself, if replicas share threads."""
_RETRY_NS = 100_000_000
"""The interval between checks of a hook that has been or is to be abandoned."""


class Bench:
    """Threads that take calls from one queue, in order.

    Invariants: every call put is settled by its replica on the event loop, or handed back. At most one call per replica
    is put at a time, unless the replica has the bench to itself; then there is one thread. A thread whose hook exceeds
    its limit is abandoned, together with the replica of that hook and no other; a new thread takes its place. Calls put
    during one turn of the loop begin at the end of the turn: woken earlier, the threads would only wait for the
    interpreter. `wanted` is how many threads there should be while that many calls wait; if `stopped`, threads end.
    Threads: the event loop's, except for what `_run` calls. An `async` hook runs on an asyncio loop that its thread
    keeps running, so that its tasks survive between calls.
    """

    def __init__(self, model: str, version: str, loop: asyncio.AbstractEventLoop) -> None:
        self.wanted = 1
        self._model = model
        self._name = f"hooks-{model}/{version}"
        self._loop = loop
        self._line: deque[HookCall] = deque()
        self._done: deque[HookCall] = deque()
        self._replicas: list[Replica] = []
        self._seats: list[Seat] = []
        self._lost: list[Seat] = []
        self._open = self._due_ns = 0
        self._lock = threading.Lock()
        self._ringing = self._woken = self.stopped = False
        self._timer: asyncio.TimerHandle | None = None

    # -- on the event loop -------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Whether a call is waiting for a running one to end. Threads: any."""
        return bool(self._line)

    def join(self, replica: Replica) -> None:
        """Start running the calls of a replica."""
        self._replicas.append(replica)
        if self._timer is not None and len(self._replicas) == 2:
            self._timer.cancel()  # it was set for a single replica, behind which nothing waits
            self._look_in(min(SLOW_NS, replica.limit_ns))
        if not self._seats:
            self._seat()

    def _seat(self) -> None:
        """Add a thread; if none can be started, the others continue. Raises: RuntimeError if there are no others."""
        seat = Seat(self._run, self._name)
        try:
            with self._lock:  # which the thread takes before it ends
                seat.thread.start()
                self._open += 1
        except RuntimeError:
            if not self._seats:
                raise
        else:
            self._seats.append(seat)

    def put(self, call: HookCall, *, at_once: bool) -> None:
        """Run a call; `at_once`: no other call is coming in this turn of the loop."""
        self._line.append(call)
        if at_once:
            self._ring()
        elif not self._ringing:
            self._ringing = True
            self._loop.call_soon(self._ring_all)
        if self._timer is None:
            replica: Replica = call.replica
            self._look_in(min(SLOW_NS, replica.limit_ns) if len(self._replicas) > 1 else replica.limit_ns)

    def _ring_all(self) -> None:
        self._ringing = False
        self._ring()

    def _ring(self) -> None:
        count = len(self._line)
        for seat in tuple(self._seats):
            if not count:
                return
            if seat.asleep:
                seat.ring()
                count -= 1
        while count > 0 and len(self._seats) < min(self.wanted, len(self._replicas)):
            self._seat()
            count -= 1

    def leave(self, replica: Replica) -> None:
        """Stop running calls of a replica; after the last replica, the threads end when their calls are done."""
        if replica in self._replicas:
            if len(self._replicas) == 1:
                self._stop()
            else:
                self._replicas.remove(replica)
                self._line.append(replica.ending())
                self._ring()

    def _stop(self) -> None:
        self.stopped = True
        for seat in tuple(self._seats):
            seat.ring()
        if self._timer is not None and not self._lost:  # a hook that spins must still be ended
            self._timer.cancel()

    def take_one(self) -> HookCall | None:
        """Take the call that has waited longest, if any."""
        return self._line.popleft() if self._line else None

    def take_back(self, replica: Replica) -> list[HookCall]:
        """Take back the calls of a replica that have not begun."""
        back = []
        for call in [each for each in tuple(self._line) if each.replica is replica]:
            with contextlib.suppress(ValueError):  # a thread may take it first
                self._line.remove(call)
                back.append(call)
        return back

    def _drain(self) -> None:
        # cleared first: a call that ends meanwhile schedules another turn
        self._woken = False
        done = self._done
        while done:
            call = done.popleft()
            call.replica.settle(call)
        if not self.stopped:
            for seat in tuple(self._seats):
                if seat.ended and seat in self._seats:
                    self._seats.remove(seat)
                    self._ended(seat)

    def _ended(self, seat: Seat) -> None:
        """Continue without a thread that user code has ended."""
        replica = seat.running.replica if seat.running is not None else self._replicas[0]
        running, seat.running = seat.running, None
        self._forsake(replica)
        replica.died(running)

    def _forsake(self, replica: Replica) -> None:
        self._replicas.remove(replica)
        if not self._replicas:
            self._stop()
        elif not self._seats:
            try:
                self._seat()
            except RuntimeError:
                others, self._replicas = self._replicas, []
                self._stop()
                for each in others:  # their calls are handed back, and rejected if no replica can be made
                    each.died(None)
                    each.shut()

    def _look(self) -> None:
        """Check the running hooks. One timer for any number of calls, which fires at intervals."""
        self._timer = None
        now_ns = time.monotonic_ns()
        for seat in self._seats:
            seat.looked((now_ns - self._due_ns) / 1e9)
        left_ns = self.watch(now_ns)
        if left_ns and self._timer is None:
            self._look_in(left_ns)

    def _look_in(self, after_ns: int) -> None:
        self._due_ns = time.monotonic_ns() + after_ns
        self._timer = self._loop.call_later(after_ns / 1e9, self._look)

    def watch(self, now_ns: int) -> int:
        """Abandon the hooks that have exceeded their limit at `now_ns`.

        Returns: in how many nanoseconds to check again; 0 means not before the next call.
        """
        self._drain()
        waits = [self._watch(seat, now_ns) for seat in tuple(self._seats)]
        self._lost = [seat for seat in self._lost if not seat.interrupted()]
        if self._lost:
            waits.append(_RETRY_NS)
        return min(filter(None, waits), default=0)

    def _watch(self, seat: Seat, now_ns: int) -> int:
        running = seat.running
        if self.stopped or not any(replica.waiting for replica in self._replicas):
            return 0
        shared = len(self._replicas) > 1
        if running is None:
            return SLOW_NS if shared else self._replicas[0].limit_ns
        limit_ns, since_ns = running.replica.limit_of(running), running.since_ns
        left_ns: int = since_ns + limit_ns - now_ns
        if left_ns <= 0:
            left_ns = math.ceil(seat.doubt.extra_s(since_ns, -left_ns / 1e9, limit_ns / 1e9) * 1e9)
        if left_ns > 0:
            if shared and now_ns - since_ns > SLOW_NS:
                self._make_way(seat)
            return min(left_ns, SLOW_NS) if shared else left_ns
        with seat.lock:
            if seat.running is not running:
                return _RETRY_NS
            seat.guilty = running.replica
        with self._lock:
            self._open -= 1
        self._seats.remove(seat)
        self._lost.append(seat)
        self._forsake(seat.guilty)
        seat.guilty.abandoned(running, seat, limit_ns)
        if seat.nudge is not None:
            seat.nudge()
        self._ring()
        return 0

    def _make_way(self, seat: Seat) -> None:
        """Let another thread run what waits behind a slow call."""
        seat.slow = True
        if self._line and all(each.slow for each in self._seats):
            self._seat()

    # -- on the threads ----------------------------------------------------------------------------------------

    def _run(self, seat: Seat) -> None:
        stays = False
        try:
            stays = self._serve(seat)
        except BaseException as error:  # noqa: BLE001 - a user's task may raise SystemExit
            if seat.guilty is None:
                log("the thread of the hooks ended", {"model": self._model}, error)
        finally:
            seat.nudge = None
            for replica in self._abandoned_with(seat):
                replica.shut()
            seat.ended = not stays
            self.wake()

    def _abandoned_with(self, seat: Seat) -> Sequence[Replica]:
        """Return the replicas of which nothing runs once a thread has ended."""
        with seat.lock:
            if seat.guilty is not None:
                return (seat.guilty,)
        with self._lock:
            self._open -= 1
            return () if self._open else tuple(self._replicas)

    def _serve(self, seat: Seat) -> bool:
        """Run calls. Returns: whether the bench continues without this thread."""
        while (call := self._next(seat)) is not None:
            replica: Replica = call.replica
            if seat.begin(call):
                try:
                    call.result = call.made(replica.bound, call.invoke(replica.bound))
                except BaseException as error:  # noqa: BLE001 - sys.exit in a hook must only affect its own request
                    replica.refuse(call, error, kept=seat.guilty is None)
            if not self._end(seat, call):
                return False
            if replica.is_async:
                with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                    runner.run(self._serve_async(seat))
                return False
            del call  # otherwise its value would be kept until the next call
        return not self.stopped

    def _next(self, seat: Seat) -> HookCall | None:
        line = self._line
        while True:
            try:
                return line.popleft()
            except IndexError:
                if self.stopped or (len(self._seats) > 1 and self._is_spare(seat)):
                    return None
            seat.asleep = True
            if not line and not self.stopped:  # a call put before that wakes no thread
                seat.bell.get()
            seat.asleep = False

    def _is_spare(self, seat: Seat) -> bool:
        with self._lock:
            if sum(not each.slow for each in self._seats) <= self.wanted or seat not in self._seats:
                return False
            self._seats.remove(seat)
            return True

    async def _serve_async(self, seat: Seat) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.current_task()

        def nudge() -> None:
            wake = task.cancel if seat.guilty is not None and task is not None else arrived.set
            with contextlib.suppress(RuntimeError):  # that loop has just been closed
                loop.call_soon_threadsafe(wake)

        seat.nudge = nudge
        while True:
            arrived.clear()
            seat.asleep = True
            try:
                call = self._line.popleft()
            except IndexError:
                if self.stopped:
                    return
                await arrived.wait()
                continue
            replica: Replica = call.replica
            if seat.begin(call):
                try:
                    result = call.invoke(replica.bound)
                    made = await result if inspect.isawaitable(result) else result
                    call.result = call.made(replica.bound, made)
                except BaseException as error:  # noqa: BLE001 - as in _serve
                    replica.refuse(call, error, kept=seat.guilty is None)
            if not self._end(seat, call) or (task is not None and task.cancelling()):
                # abandoned; or a user's task has ended the loop, which cancels all others on exit
                return
            del call
            result = made = None

    def _end(self, seat: Seat, call: HookCall) -> bool:
        """Report a finished call; False if the thread has been abandoned and must end."""
        if not seat.end(call):
            return False
        self._done.append(call)
        self.wake()
        return True

    def wake(self) -> None:
        """Schedule the settling of finished calls."""
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # the loop is closed, and nobody waits
                self.stopped = True
