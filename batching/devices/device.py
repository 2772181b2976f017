"""Device: one CPU or GPU shared by the Instances of several models, by the cost of their runs, not their number.

While all of them fit the device at once, no turns are needed (`contended` is False). Otherwise an Instance needs a turn
before it takes a Batch. Made by opening.py, one per device name and Engine. The reasons, with figures, are in
docs/adr/0010-sharing-a-device.md.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from penstock.backends.cpus import usable_cpus

MAX_CONCURRENT_RUNS = 2
"""This many runs that each use a whole device may be on it at once: one uses what the other leaves idle, and a giant
run does not stop the rest."""
MIN_BATCH_LIMIT_NS = 10_000_000
BATCH_LIMIT_FACTOR = 4
"""While others wait, a batch's predicted time may be this many times the shortest latest run among the waiting models,
and at least `MIN_BATCH_LIMIT_NS`."""


EXEMPT_NS = 250_000_000
"""On a CPU, a model whose runs are shorter than this takes no turns: the system schedules it at once, where a turn
would make it wait for runs many times as long. With turns, iris served a fifth of the requests beside cnn and deep
(docs/adr/0010)."""


OVERRUN_FACTOR = 4
"""The time of a batch above this many times its prediction plus `EXEMPT_NS` is taken from a credit rather than charged:
the machine stood still, and the model that happened to run would be kept waiting for as long."""
CREDIT_NS = 20_000_000_000
REFILL_DIVISOR = 20
"""The credit of each Model. Every charge refills it by one part in this many, so a model that is often very slow is
charged for that, while one on a machine that now and then stands still is not."""


class Waiter(Protocol):
    """Something that waits for a turn."""

    def grant(self) -> None:
        """Accept the turn asked for. Threads: any, with the giver's lock held, so it may only set a flag and wake."""


class TurnArbiter(Protocol):
    """Gives Instances their turns: a Device or, if there is one, the RateLimiter (rate_limiter.py).

    `share` is what its `join` returned. While it is not `contended`, or the share is `exempt`, no turn is needed. A
    turn is asked for, granted, begun with each batch taken in it, and ended once.
    """

    @property
    def contended(self) -> bool:
        """Whether an Instance must have a turn."""

    def request_turn(self, share: Any, waiter: Waiter) -> None:
        """Ask for a turn. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""

    def cancel_request(self, share: Any, waiter: Waiter) -> bool:
        """Stop waiting. Returns: False if the turn has already been granted and must be ended."""

    def release_reservation(self, share: Any) -> None:
        """Record that a share that announced more work in `end_turn` is not coming back now."""

    def max_batch_ns(self, share: Any) -> float:
        """Return the longest predicted time a batch may have now; 0 for no limit."""

    def begin_batch(self, share: Any, cost_ns: float) -> None:
        """Record that a batch runs, with its predicted time."""

    def end_turn(self, share: Any, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """End a turn. Returns: whether another one begins with it."""

    def record_run(self, share: Any, real_ns: int) -> None:
        """Record the time of a batch that ran without a turn."""


class Share:
    """A Model's part of one Device, whatever the number of its Instances there. Accessed by its Device only.

    `width`: how much of the Device's room one run takes. `cost_per_ns`: the cost of a nanosecond of a run: its width
    divided by the Model's weight. `virtual_time`: the Model's virtual time, the sum of its runs' costs. `last_run_ns`:
    how long its latest run took. `returning`: it had more to run when its latest turn ended, and is coming back.
    `exempt`: it takes no turns. `active_turns`: how many of its Instances have one. `credit_ns`: see CREDIT_NS.
    """

    __slots__ = (
        "active_turns",
        "cost_per_ns",
        "credit_ns",
        "exempt",
        "instances",
        "last_run_ns",
        "returning",
        "virtual_time",
        "waiters",
        "width",
    )

    def __init__(self, instances: int, width: int, price: float, spent: float) -> None:
        self.instances = instances
        self.width = width
        self.cost_per_ns = price
        self.virtual_time = spent
        self.last_run_ns = 0.0
        self.active_turns = 0
        self.credit_ns: float = CREDIT_NS
        self.exempt = False
        self.returning = False
        self.waiters: deque[Waiter] = deque()


class Device:
    """Decides what runs next: of the waiting Models, the one whose runs have cost least (start-time fair queueing).

    No clock: it is told what runs took. A Model of twice the weight pays half for the same run, so it gets twice the
    time of an equally busy one. A Model that was idle continues from where the others are, with neither savings nor
    debts. Invariants: the Device's own virtual time never falls, and no waiting Model has spent less than that minus
    the most expensive of the latest batches; while something waits, there is no room for the next one.
    Bound: if no batch takes, or is predicted to take, more than B, a Model that asks gets a turn within
    2 B + 2 (3 k + 1) N B w / room, for N other Models present meanwhile, of at most k Instances and width w. If all are
    equally wide, B + (3 k + 1) N B w / room. Proof sketch: when it asks, it has spent at most k B w more than the
    Device's virtual time; each of the others is at most B w behind that, catches up with both, and is off by its k
    current runs, before and after; more than half of the room is always in use. With different weights, another Model
    of weight v counts not 3 k + 1, but k v / its own + v / the least + 2 k (tests/batching/test_device.py). Run time
    above `OVERRUN_FACTOR` times the prediction does not count, as far as its Model's credit goes.
    `preemptive`: the system itself interrupts long runs for short ones, as on a CPU (`EXEMPT_NS`).
    Threads: all methods may be called on any. The lock of a Model may be held; none is taken under the Device's own.
    Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996; with several at once: Jin, Chase, Kaur,
    "Interposed proportional sharing for a storage service utility", SIGMETRICS 2004.
    """

    def __init__(self, room: int, *, preemptive: bool = False) -> None:
        self.contended = False
        self._exempt_ns = EXEMPT_NS if preemptive else 0
        self._min_room = self.room = room
        self._used_room = 0
        self._virtual_time = 0.0
        self._max_virtual_time = 0.0
        self._shares: list[Share] = []
        self._lock = threading.Lock()

    def join(self, instances: int, width: int, weight: float = 1.0) -> Share:
        """Give a Model a Share of the device. `instances`: those that take turns."""
        with self._lock:
            share = Share(instances, width, width / weight, self._virtual_time)
            self._shares.append(share)
            self._update_contention()
            return share

    def resize(self, share: Share, instances: int, width: int) -> None:
        """Change the number of a Model's Instances here, and the width of their runs."""
        with self._lock:
            self._used_room += share.active_turns * (width - share.width)
            share.cost_per_ns *= width / share.width
            share.instances, share.width = instances, width
            self._update_contention()
            self._grant_turns()

    def leave(self, share: Share) -> None:
        """Remove a Model's Share, when none of its Instances waits or runs any more."""
        with self._lock:
            self._shares.remove(share)
            self._update_contention()
            self._grant_turns()

    def request_turn(self, share: Share, waiter: Waiter) -> None:
        """Ask for a turn. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""
        with self._lock:
            if not share.waiters:
                share.virtual_time = max(
                    share.virtual_time, self._min_virtual_time() if share.returning else self._virtual_time
                )
            share.returning = False
            share.waiters.append(waiter)
            self._grant_turns()

    def cancel_request(self, share: Share, waiter: Waiter) -> bool:
        """Stop waiting. Returns: False if the turn has already been granted and must be ended."""
        with self._lock:
            if waiter not in share.waiters:
                return False
            share.waiters.remove(waiter)
            self._grant_turns()
            return True

    def release_reservation(self, share: Share) -> None:
        """Do nothing: a Model with more to run has no place in the queue until it asks."""

    def max_batch_ns(self, share: Share) -> float:
        """Return the longest predicted time a batch may have now; 0 for no limit, if nothing waits."""
        with self._lock:
            waiting = [other.last_run_ns for other in self._shares if other.waiters and other is not share]
        return max(MIN_BATCH_LIMIT_NS, BATCH_LIMIT_FACTOR * min(waiting)) if waiting else 0

    def begin_batch(self, share: Share, cost_ns: float) -> None:
        """Charge a batch's predicted time, before it runs."""
        with self._lock:
            share.virtual_time += cost_ns * share.cost_per_ns

    def end_turn(self, share: Share, predicted_ns: float, real_ns: float, more: bool) -> bool:
        """End a turn, and replace the charge for the predicted time by one for the real time.

        `more`: whether the Model has more to run. Returns: whether it gets another turn at once, having spent least.
        """
        with self._lock:
            if real_ns:
                real_ns = _charged_ns(share, predicted_ns, real_ns)
                self._record(share, real_ns)
            share.returning = more
            share.virtual_time = max(
                share.virtual_time + (real_ns - predicted_ns) * share.cost_per_ns, self._min_virtual_time()
            )
            self._max_virtual_time = max(self._max_virtual_time, share.virtual_time)
            if more and self.contended and self._used_room <= self.room:
                first = self._next_share()
                if first is None or share.virtual_time < first.virtual_time:
                    self._virtual_time = max(self._virtual_time, share.virtual_time)
                    return True
            self._used_room -= share.width
            share.active_turns -= 1
            self._grant_turns()
            if not self._used_room:
                self._virtual_time = self._max_virtual_time
            return False

    def record_run(self, share: Share, real_ns: int) -> None:
        """Record the time of a batch that ran without a turn. It is not charged: the system shared the time out."""
        with self._lock:
            self._record(share, real_ns)

    def _record(self, share: Share, real_ns: float) -> None:
        share.last_run_ns = real_ns
        share.exempt = real_ns < self._exempt_ns

    def _min_virtual_time(self) -> float:
        """Return the least that a Model which was here all the time can have spent.

        While it ran, the others may have passed it by a batch, which it may catch up with.
        """
        return self._virtual_time - max(share.last_run_ns * share.cost_per_ns for share in self._shares)

    def _next_share(self) -> Share | None:
        first = None
        for share in self._shares:
            if share.waiters and (first is None or share.virtual_time < first.virtual_time):
                first = share
        return first

    def _grant_turns(self) -> None:
        while (share := self._next_share()) is not None:
            # nothing goes past the first, however little room it needs
            if self.contended and self._used_room + share.width > self.room:
                return
            self._virtual_time = max(self._virtual_time, share.virtual_time)
            self._used_room += share.width
            share.active_turns += 1
            share.waiters.popleft().grant()

    def _update_contention(self) -> None:
        widths = [share.instances * share.width for share in self._shares]
        # the configured number of Instances is honored
        self.room = max(self._min_room, *widths) if widths else self._min_room
        self.contended = sum(widths) > self.room


def _charged_ns(share: Share, predicted_ns: float, real_ns: float) -> float:
    """Return how much of a batch's time is charged; the rest is taken from the credit."""
    waived_ns = min(max(real_ns - OVERRUN_FACTOR * predicted_ns - EXEMPT_NS, 0), share.credit_ns)
    share.credit_ns = min(share.credit_ns - waived_ns + (real_ns - waived_ns) / REFILL_DIVISOR, CREDIT_NS)
    return real_ns - waived_ns


def make_device(name: str) -> Device:
    """Make the Device of this name."""
    return Device(MAX_CONCURRENT_RUNS * device_width(name), preemptive=name == "cpu")


def device_width(name: str) -> int:
    """Return the width of a run that uses a whole device: the number of CPUs; a GPU counts as one."""
    return usable_cpus() if name == "cpu" else 1


def run_width(name: str, instances: int, threads: int) -> int:
    """Return how much of a device one run takes. `threads`: of the session, shared by its Instances; 0 means all.

    Each Instance brings its own thread, and the session lends the others.
    """
    cpus = device_width(name)
    pool = min(threads or cpus, cpus)
    return min(cpus, -(-(instances + pool - 1) // instances))
