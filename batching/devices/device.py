"""Device: one CPU or GPU that the Instances of several models share, by what their runs cost and not by their number.

While all of them fit the device at once nothing is asked of anybody (`crowded` is False). Otherwise an Instance needs a
turn before it takes a Batch. Made by opening.py, one per device name and Engine. Why it is done so, with figures:
docs/adr/0010-sharing-a-device.md.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from penstock.backends.cpus import usable_cpus

AT_ONCE = 2
"""So many runs that take all of a device may be on it at once: what one leaves unused the other takes, and a giant run
does not stop the rest."""
LEAST_NS = 10_000_000
WAITED_FOR = 4
"""While others wait a batch may be predicted to take as long as so many runs of the one that waits with the shortest,
and `LEAST_NS` in any case."""


BRIEF_NS = 250_000_000
"""On a CPU, who runs no longer than this takes no turn: the system lets it in at once, where it would wait for runs
many times as long as its own. In turns iris did a fifth of the requests beside cnn and deep (docs/adr/0010)."""


SURPRISE = 4
"""A batch that takes more than so many times what was predicted, and `BRIEF_NS`, is charged no more than that: the
machine stood still, and who happened to run would be kept waiting for as long. That is spared from a credit."""
CREDIT_NS = 20_000_000_000
PAYS_BACK = 20
"""Of each Model, filled again by one part in so many of what it is charged: one that is very slow now and then is
charged for that, a machine that now and then is not."""


class Waiter(Protocol):
    """Who waits for a turn."""

    def grant(self) -> None:
        """Take the turn asked for. Threads: any, with the giver's lock held: it only sets something and wakes."""


class TurnGiver(Protocol):
    """Who gives Instances their turns: a Device, or where there is one the RateLimiter (rates.py).

    `share` is what its `join` has given. While it is not `crowded`, or the share is `brief`, nothing need be asked.
    A turn is asked for, granted, begun with each batch that is taken in it, and ended once.
    """

    @property
    def crowded(self) -> bool:
        """Whether an Instance must have a turn."""

    def ask(self, share: Any, waiter: Waiter) -> None:
        """Ask for a turn. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""

    def withdraw(self, share: Any, waiter: Waiter) -> bool:
        """Wait no longer. Returns: False when it has got its turn already, which must be ended."""

    def forget(self, share: Any) -> None:
        """Note that one which said in `end` that it has more to run does not come back now."""

    def most_ns(self, share: Any) -> float:
        """Tell what a batch may be predicted to take now; 0: as long as it likes."""

    def begin(self, share: Any, cost_ns: float) -> None:
        """Note that a batch runs, and what it is predicted to take."""

    def end(self, share: Any, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """End a turn. Returns: whether another one begins with it."""

    def ran(self, share: Any, real_ns: int) -> None:
        """Note what a batch has taken that ran without a turn."""


class Share:
    """A Model's part of one Device, whatever the number of its Instances there. Touched by its Device only.

    `width`: how much of the Device's room one run takes. `price`: what a nanosecond of a run costs: its width, divided
    by the Model's weight. `spent`: the Model's virtual time, which is what its runs have cost. `latest_ns`: how long
    the latest of them took. `stays`: it had more to run when its latest turn ended, and is coming back. `brief`: it
    takes no turns. `turns`: so many of its Instances have one. `credit_ns`: as CREDIT_NS has it.
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
    """Who may run next: of the Models that wait, the one whose runs have cost least (start-time fair queueing).

    No clock: it is told what runs took. A Model of twice the weight pays half for the same, so that it gets twice the
    time of one that is as hot. One that was away goes on from where the others are: it has saved nothing, and owes
    nothing. Invariants: the Device's own virtual time never falls, and nobody who waits has spent less than that and
    the dearest of the latest batches; while somebody waits, there is no room for the one that is next.

    Bound: where no batch takes, or is predicted to take, more than B, a Model that asks gets a turn within
    2 B + 2 (3 k + 1) N B w / room, for N other Models that are there meanwhile, of at most k Instances and width w. If
    all are equally wide, B + (3 k + 1) N B w / room. For when it asks it has spent at most k B w more than the Device's
    virtual time, each of the others is at most B w behind that and catches up with both, and is off by its k runs
    under way, before and after; more than half of the room is in use all the time. Where weights differ, another Model
    of weight v counts not 3 k + 1, but k v / its own + v / the least + 2 k (tests/batching/test_device.py). What a run
    takes beyond `SURPRISE` times what was predicted does not count, as far as its Model's credit goes.

    `preemptive`: the system itself interrupts long runs for short ones, as it does on a CPU (`BRIEF_NS`).
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
        """Give a Model its part of the device. `instances`: those that take turns."""
        with self._lock:
            share = Share(instances, width, width / weight, self._now)
            self._shares.append(share)
            self._recount()
            return share

    def resize(self, share: Share, instances: int, width: int) -> None:
        """Note that a Model has another number of Instances here, and how wide a run of theirs is now."""
        with self._lock:
            self._taken += share.turns * (width - share.width)
            share.price *= width / share.width
            share.instances, share.width = instances, width
            self._recount()
            self._pass_on()

    def leave(self, share: Share) -> None:
        """Take a Model's part away, when none of its Instances waits or runs any more."""
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
        """Wait no longer. Returns: False when it has got its turn already, which must be ended."""
        with self._lock:
            if waiter not in share.waiting:
                return False
            share.waiting.remove(waiter)
            self._pass_on()
            return True

    def forget(self, share: Share) -> None:
        """Note nothing: who had more to run has no place in line before it asks."""

    def most_ns(self, share: Share) -> float:
        """Tell what a batch may be predicted to take now; 0: as long as it likes, since nobody waits."""
        with self._lock:
            waiting = [other.latest_ns for other in self._shares if other.waiting and other is not share]
        return max(LEAST_NS, WAITED_FOR * min(waiting)) if waiting else 0

    def begin(self, share: Share, cost_ns: float) -> None:
        """Charge what a batch is predicted to take, before it runs."""
        with self._lock:
            share.spent += cost_ns * share.price

    def end(self, share: Share, predicted_ns: float, real_ns: float, more: bool) -> bool:
        """End a turn, and charge what the batch has taken in the place of what was predicted.

        `more`: whether the Model has more to run. Returns: whether it goes on with another turn, having spent least.
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
        """Note what a batch has taken that ran without a turn: it is not charged, the system has shared it out."""
        with self._lock:
            self._note(share, real_ns)

    def _note(self, share: Share, real_ns: float) -> None:
        share.latest_ns = real_ns
        share.brief = real_ns < self._brief_ns

    def _behind(self) -> float:
        """Tell what a Model has spent at least that was here all the time.

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
            # the first is not looked past, however little room the others take
            if self.crowded and self._taken + share.width > self.room:
                return
            self._now = max(self._now, share.spent)
            self._taken += share.width
            share.turns += 1
            share.waiting.popleft().grant()

    def _recount(self) -> None:
        widths = [share.instances * share.width for share in self._shares]
        # a user's own number of Instances is honoured
        self.room = max(self._least_room, *widths) if widths else self._least_room
        self.crowded = sum(widths) > self.room


def _charged_ns(share: Share, predicted_ns: float, real_ns: float) -> float:
    """Give what of a batch's time is charged, the rest from the credit."""
    spared_ns = min(max(real_ns - SURPRISE * predicted_ns - BRIEF_NS, 0), share.credit_ns)
    share.credit_ns = min(share.credit_ns - spared_ns + (real_ns - spared_ns) / PAYS_BACK, CREDIT_NS)
    return real_ns - spared_ns


def device_of(name: str) -> Device:
    """Make the Device of this name."""
    return Device(AT_ONCE * whole(name), preemptive=name == "cpu")


def whole(name: str) -> int:
    """Tell the width of a run that takes all of a device: so many threads of a CPU; a GPU is not counted in parts."""
    return usable_cpus() if name == "cpu" else 1


def width_of(name: str, instances: int, threads: int) -> int:
    """Tell how much of a device one run takes. `threads`: of the session, which its Instances share; 0: all.

    Each Instance brings its own thread, and the session lends the others.
    """
    cpus = whole(name)
    pool = min(threads or cpus, cpus)
    return min(cpus, -(-(instances + pool - 1) // instances))
