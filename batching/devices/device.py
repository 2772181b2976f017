"""Device: one CPU or GPU shared by the Instances of several models, by the cost of their runs, not their number.

While all of them fit the device at once, no turns are needed (`crowded` is False). Otherwise an Instance needs a turn
before it takes a Batch. Made by opening.py, one per device name and Engine. The reasons, with figures, are in
docs/adr/0010-sharing-a-device.md.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from penstock.backends.cpus import usable_cpus

AT_ONCE = 2
"""This many runs that each use a whole device may be on it at once: one uses what the other leaves idle, and a giant
run does not stop the rest."""
LEAST_NS = 10_000_000
WAITED_FOR = 4
"""While others wait, a batch's predicted time may be this many times the shortest latest run among the waiting models,
and at least `LEAST_NS`."""


BRIEF_NS = 250_000_000
"""On a CPU, a model whose runs are shorter than this takes no turns: the system schedules it at once, where a turn
would make it wait for runs many times as long. With turns, iris served a fifth of the requests beside cnn and deep
(docs/adr/0010)."""


SURPRISE = 4
"""The time of a batch above this many times its prediction plus `BRIEF_NS` is taken from a credit rather than charged:
the machine stood still, and the model that happened to run would be kept waiting for as long."""
CREDIT_NS = 20_000_000_000
PAYS_BACK = 20
"""The credit of each Model. Every charge refills it by one part in this many, so a model that is often very slow is
charged for that, while one on a machine that now and then stands still is not."""


class Waiter(Protocol):
    """Something that waits for a turn."""

    def grant(self) -> None:
        """Accept the turn asked for. Threads: any, with the giver's lock held, so it may only set a flag and wake."""


class TurnGiver(Protocol):
    """Gives Instances their turns: a Device or, if there is one, the RateLimiter (rates.py).

    `share` is what its `join` returned. While it is not `crowded`, or the share is `brief`, no turn is needed. A turn
    is asked for, granted, begun with each batch taken in it, and ended once.
    """

    @property
    def crowded(self) -> bool:
        """Whether an Instance must have a turn."""

    def ask(self, share: Any, waiter: Waiter) -> None:
        """Ask for a turn. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""

    def withdraw(self, share: Any, waiter: Waiter) -> bool:
        """Stop waiting. Returns: False if the turn has already been granted and must be ended."""

    def forget(self, share: Any) -> None:
        """Record that a share that announced more work in `end` is not coming back now."""

    def most_ns(self, share: Any) -> float:
        """Return the longest predicted time a batch may have now; 0 for no limit."""

    def begin(self, share: Any, cost_ns: float) -> None:
        """Record that a batch runs, with its predicted time."""

    def end(self, share: Any, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """End a turn. Returns: whether another one begins with it."""

    def ran(self, share: Any, real_ns: int) -> None:
        """Record the time of a batch that ran without a turn."""


class Share:
    """A Model's part of one Device, whatever the number of its Instances there. Accessed by its Device only.

    `width`: how much of the Device's room one run takes. `price`: the cost of a nanosecond of a run: its width divided
    by the Model's weight. `spent`: the Model's virtual time, the sum of its runs' costs. `latest_ns`: how long its
    latest run took. `stays`: it had more to run when its latest turn ended, and is coming back. `brief`: it takes no
    turns. `turns`: how many of its Instances have one. `credit_ns`: see CREDIT_NS.
    """

    __slots__ = ("brief", "credit_ns", "instances", "latest_ns", "price", "spent", "stays", "turns", "waiting", "width")

    def __init__(self, instances: int, width: int, price: float, spent: float) -> None:
        self.instances = instances
        self.width = width
        self.price = price
        self.spent = spent
        self.latest_ns = 0.0
        self.turns = 0
        self.credit_ns: float = CREDIT_NS
        self.brief = False
        self.stays = False
        self.waiting: deque[Waiter] = deque()


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
    above `SURPRISE` times the prediction does not count, as far as its Model's credit goes.
    `preemptive`: the system itself interrupts long runs for short ones, as on a CPU (`BRIEF_NS`).
    Threads: all methods may be called on any. The lock of a Model may be held; none is taken under the Device's own.
    Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996; with several at once: Jin, Chase, Kaur,
    "Interposed proportional sharing for a storage service utility", SIGMETRICS 2004.
    """

    def __init__(self, room: int, *, preemptive: bool = False) -> None:
        self.crowded = False
        self._brief_ns = BRIEF_NS if preemptive else 0
        self._least_room = self.room = room
        self._taken = 0
        self._now = 0.0
        self._furthest = 0.0
        self._shares: list[Share] = []
        self._lock = threading.Lock()

    def join(self, instances: int, width: int, weight: float = 1.0) -> Share:
        """Give a Model a Share of the device. `instances`: those that take turns."""
        with self._lock:
            share = Share(instances, width, width / weight, self._now)
            self._shares.append(share)
            self._recount()
            return share

    def resize(self, share: Share, instances: int, width: int) -> None:
        """Change the number of a Model's Instances here, and the width of their runs."""
        with self._lock:
            self._taken += share.turns * (width - share.width)
            share.price *= width / share.width
            share.instances, share.width = instances, width
            self._recount()
            self._pass_on()

    def leave(self, share: Share) -> None:
        """Remove a Model's Share, when none of its Instances waits or runs any more."""
        with self._lock:
            self._shares.remove(share)
            self._recount()
            self._pass_on()

    def ask(self, share: Share, waiter: Waiter) -> None:
        """Ask for a turn. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""
        with self._lock:
            if not share.waiting:
                share.spent = max(share.spent, self._behind() if share.stays else self._now)
            share.stays = False
            share.waiting.append(waiter)
            self._pass_on()

    def withdraw(self, share: Share, waiter: Waiter) -> bool:
        """Stop waiting. Returns: False if the turn has already been granted and must be ended."""
        with self._lock:
            if waiter not in share.waiting:
                return False
            share.waiting.remove(waiter)
            self._pass_on()
            return True

    def forget(self, share: Share) -> None:
        """Do nothing: a Model with more to run has no place in the queue until it asks."""

    def most_ns(self, share: Share) -> float:
        """Return the longest predicted time a batch may have now; 0 for no limit, if nothing waits."""
        with self._lock:
            waiting = [other.latest_ns for other in self._shares if other.waiting and other is not share]
        return max(LEAST_NS, WAITED_FOR * min(waiting)) if waiting else 0

    def begin(self, share: Share, cost_ns: float) -> None:
        """Charge a batch's predicted time, before it runs."""
        with self._lock:
            share.spent += cost_ns * share.price

    def end(self, share: Share, predicted_ns: float, real_ns: float, more: bool) -> bool:
        """End a turn, and replace the charge for the predicted time by one for the real time.

        `more`: whether the Model has more to run. Returns: whether it gets another turn at once, having spent least.
        """
        with self._lock:
            if real_ns:
                real_ns = _charged_ns(share, predicted_ns, real_ns)
                self._note(share, real_ns)
            share.stays = more
            share.spent = max(share.spent + (real_ns - predicted_ns) * share.price, self._behind())
            self._furthest = max(self._furthest, share.spent)
            if more and self.crowded and self._taken <= self.room:
                first = self._first()
                if first is None or share.spent < first.spent:
                    self._now = max(self._now, share.spent)
                    return True
            self._taken -= share.width
            share.turns -= 1
            self._pass_on()
            if not self._taken:
                self._now = self._furthest
            return False

    def ran(self, share: Share, real_ns: int) -> None:
        """Record the time of a batch that ran without a turn. It is not charged: the system shared the time out."""
        with self._lock:
            self._note(share, real_ns)

    def _note(self, share: Share, real_ns: float) -> None:
        share.latest_ns = real_ns
        share.brief = real_ns < self._brief_ns

    def _behind(self) -> float:
        """Return the least that a Model which was here all the time can have spent.

        While it ran, the others may have passed it by a batch, which it may catch up with.
        """
        return self._now - max(share.latest_ns * share.price for share in self._shares)

    def _first(self) -> Share | None:
        first = None
        for share in self._shares:
            if share.waiting and (first is None or share.spent < first.spent):
                first = share
        return first

    def _pass_on(self) -> None:
        while (share := self._first()) is not None:
            # nothing goes past the first, however little room it needs
            if self.crowded and self._taken + share.width > self.room:
                return
            self._now = max(self._now, share.spent)
            self._taken += share.width
            share.turns += 1
            share.waiting.popleft().grant()

    def _recount(self) -> None:
        widths = [share.instances * share.width for share in self._shares]
        # the configured number of Instances is honored
        self.room = max(self._least_room, *widths) if widths else self._least_room
        self.crowded = sum(widths) > self.room


def _charged_ns(share: Share, predicted_ns: float, real_ns: float) -> float:
    """Return how much of a batch's time is charged; the rest is taken from the credit."""
    spared_ns = min(max(real_ns - SURPRISE * predicted_ns - BRIEF_NS, 0), share.credit_ns)
    share.credit_ns = min(share.credit_ns - spared_ns + (real_ns - spared_ns) / PAYS_BACK, CREDIT_NS)
    return real_ns - spared_ns


def device_of(name: str) -> Device:
    """Make the Device of this name."""
    return Device(AT_ONCE * whole(name), preemptive=name == "cpu")


def whole(name: str) -> int:
    """Return the width of a run that uses a whole device: the number of CPUs; a GPU counts as one."""
    return usable_cpus() if name == "cpu" else 1


def width_of(name: str, instances: int, threads: int) -> int:
    """Return how much of a device one run takes. `threads`: of the session, shared by its Instances; 0 means all.

    Each Instance brings its own thread, and the session lends the others.
    """
    cpus = whole(name)
    pool = min(threads or cpus, cpus)
    return min(cpus, -(-(instances + pool - 1) // instances))
