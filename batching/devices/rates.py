"""RateLimiter: Instances that run only while they hold what their group says they need, by how often each has run.

One per Engine, where it was asked for (--rate-limit); it gives turns by the same protocol as a Device (device.py).
Source: Triton core, rate_limiter.cc, but for what is forgotten (`OWED`) and who may go past (`_pass_on`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import Resource

from .device import Waiter

OWED = 16
"""An Instance that has run less often than others is owed so many runs at most. In Triton it is owed all of them: one
that rested while another ran a million times then has the resources to itself for a million runs."""

Pool = tuple[str, int | None]
"""A resource, and the number of the device that it belongs to; None: it is one for all devices."""


class _State(Enum):
    AWAY = auto()
    COMING = auto()
    """It has said that it comes back, and stands in line already."""
    WAITING = auto()
    KEPT = auto()
    """What it needs is held for it, and it has not come back yet."""
    RUNNING = auto()


class Claim:
    """One Instance's: what it needs to run, and how often it has run. Touched by its RateLimiter only.

    `spent`: its runs, each counted `priority` times, and what was forgotten of those that it was owed.
    """

    __slots__ = ("brief", "needs", "priority", "spent", "state", "waiter")

    def __init__(self, needs: Mapping[Pool, int], priority: int, spent: int) -> None:
        self.brief = False
        self.needs = needs
        self.priority = max(priority, 1)
        self.spent = spent
        self.state = _State.AWAY
        self.waiter: Waiter | None = None


class RateLimiter:
    """Who may run next: of the Instances that wait, the one that has run least often, a run counting `priority` times.

    The run to come counts too: otherwise one of priority 2 is up to a run ahead of half of what one of priority 1 does.
    `stated` is how much there is of each resource, None for each device; if it says anything, there is nothing of what
    it does not mention. If it is silent there is as much as the Instance that needs most.
    Invariants: an Instance holds all that it needs or nothing; nothing is given out beyond what there is. Nobody takes
    of a Pool that one before it waits for, so that whoever needs much is not passed by those that need little; one that
    needs nothing of the kind may go past.

    Bound: where all use one Pool of which there is enough for one at a time, an Instance of priority p waits for
    2 p / q + OWED + 2 runs of each other at most, of priority q (tests/batching/test_rates.py).
    Threads: all methods may be called on any. The lock of a Model may be held; none is taken under its own.
    """

    crowded = True

    def __init__(self, stated: Mapping[Pool, int] | None = None) -> None:
        self._stated = dict(stated or {})
        self._claims: list[Claim] = []
        self._there: dict[Pool, int] = {}
        self._held: dict[Pool, int] = {}
        self._line: list[Claim] = []
        self._now = 0
        self._lock = threading.Lock()

    def join(self, device: str, resources: Iterable[Resource], priority: int) -> Claim:
        """Take in an Instance that runs on a device, and needs these resources for each run.

        Raises: InferError (INVALID: there is too little of a resource for it ever to run, or another Instance has said
        of the resource that it is shared by all devices, and this one that it is not).
        """
        number = device_number(device)
        needs = {(each.name, None if each.shared else number): each.count for each in resources if each.count}
        with self._lock:
            for pool, count in needs.items():
                self._check(pool, count, needs)
            claim = Claim(needs, priority, self._now)
            self._claims.append(claim)
            self._recount()
            self._pass_on()  # there may be more now than there was
        return claim

    def leave(self, claim: Claim) -> None:
        """Forget an Instance that neither waits nor runs any more."""
        with self._lock:
            self._claims.remove(claim)
            self._drop(claim)
            self._recount()
            self._pass_on()

    def ask(self, claim: Claim, waiter: Waiter) -> None:
        """Ask for all that it needs. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""
        with self._lock:
            claim.waiter = waiter
            if claim.state is _State.KEPT:
                claim.state = _State.RUNNING
                waiter.grant()
            elif claim.state is _State.COMING:
                claim.state = _State.WAITING
            else:
                self._stand_in_line(claim, _State.WAITING)
                self._pass_on()

    def withdraw(self, claim: Claim, waiter: Waiter) -> bool:
        """Wait no longer. Returns: False when it has got what it needs already, which must be given back by `end`."""
        with self._lock:
            if claim.state is _State.RUNNING:
                return False
            self._drop(claim)
            self._pass_on()
            return True

    def forget(self, claim: Claim) -> None:
        """Note that one which said in `end` that it has more to run does not come back now."""
        with self._lock:
            self._drop(claim)
            self._pass_on()

    def most_ns(self, claim: Claim) -> float:
        """Tell what a batch may be predicted to take: as long as it likes."""
        return 0

    def begin(self, claim: Claim, cost_ns: float) -> None:
        """Count a run."""
        with self._lock:
            claim.spent += claim.priority

    def end(self, claim: Claim, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """Give back all that it holds. Returns: whether it has got it again, having run least often.

        `more`: it comes back at once, by `ask` or `forget`, and stands in line from now on: were it to stand there only
        when its thread has come round, others of lower priority would be first.
        """
        with self._lock:
            self._drop(claim)
            if more:
                self._stand_in_line(claim, _State.COMING)
            self._pass_on()
            if claim.state is not _State.KEPT:
                return False
            claim.state = _State.RUNNING
            return True

    def ran(self, claim: Claim, real_ns: int) -> None:
        """Note nothing: nobody runs without a turn."""

    def _check(self, pool: Pool, count: int, needs: Mapping[Pool, int]) -> None:
        name, shared = pool[0], pool[1] is None
        there = self._amount(pool)
        if there is not None and there < count:
            text = f'Resource count for "{name}" is limited to {there} which will prevent scheduling of one or more'
            raise InferError(Code.INVALID, f"{text} model instances, the minimum required count is {count}")
        for known in (*self._there, *needs):
            if known[0] == name and (known[1] is None) != shared:
                text = f'Resource "{name}" is present as both global and device-specific resource in the model'
                raise InferError(Code.INVALID, f"{text} configuration.")

    def _amount(self, pool: Pool) -> int | None:
        """Give how much was stated to be there of a resource; None if nothing was stated of any."""
        if not self._stated:
            return None
        name, device = pool
        counts = [
            count
            for (known, where), count in self._stated.items()
            if known == name and (device is None or where in {None, device})
        ]
        return max(counts, default=0)

    def _recount(self) -> None:
        self._there = {}
        for claim in self._claims:
            for pool, count in claim.needs.items():
                amount = self._amount(pool)
                self._there[pool] = max(self._there.get(pool, 0), count) if amount is None else amount

    def _stand_in_line(self, claim: Claim, state: _State) -> None:
        claim.spent = max(claim.spent, self._now - OWED * claim.priority)
        claim.state = state
        self._line.append(claim)

    def _drop(self, claim: Claim) -> None:
        """Take one out of the line, or back what it holds."""
        if claim.state in {_State.COMING, _State.WAITING}:
            self._line.remove(claim)
        elif claim.state in {_State.KEPT, _State.RUNNING}:
            for pool, count in claim.needs.items():
                self._held[pool] -= count
        claim.state = _State.AWAY

    def _pass_on(self) -> None:
        """Give what there is to those that wait, in their order; nothing of what one before them is still short of."""
        waited_for: set[Pool] = set()
        for claim in sorted(self._line, key=_rank):
            if waited_for.isdisjoint(claim.needs) and self._fits(claim):
                self._give(claim)
            else:
                waited_for.update(claim.needs)

    def _fits(self, claim: Claim) -> bool:
        return all(self._held.get(pool, 0) + count <= self._there[pool] for pool, count in claim.needs.items())

    def _give(self, claim: Claim) -> None:
        self._line.remove(claim)
        self._now = max(self._now, claim.spent)
        for pool, count in claim.needs.items():
            self._held[pool] = self._held.get(pool, 0) + count
        if claim.state is _State.COMING or claim.waiter is None:
            claim.state = _State.KEPT
        else:
            claim.state = _State.RUNNING
            claim.waiter.grant()


def _rank(claim: Claim) -> tuple[int, int]:
    """Rank those in line, of equals the one of priority 1 first, then who came first."""
    return claim.spent + claim.priority, claim.priority


def device_number(device: str) -> int:
    """Give a device's number, as --rate-limit-resource has it. The CPU's is 0, like the first GPU's, as in Triton."""
    return int(device.partition(":")[2] or 0)
