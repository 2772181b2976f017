"""RateLimiter: Instances run only while they hold the resources that their group needs, ordered by their run counts.

One per Engine, if enabled (--rate-limit); it gives turns by the same protocol as a Device (device.py).
Source: Triton core, rate_limiter.cc, except for what is forgotten (`OWED`) and what may go past (`_pass_on`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import Resource

from .device import Waiter

OWED = 16
"""An Instance that has run less often than others is owed at most this many runs. In Triton it is owed all of them: one
that was idle while another ran a million times then has the resources to itself for a million runs."""

Pool = tuple[str, int | None]
"""A resource and the number of its device; None if it is shared by all devices."""


class _State(Enum):
    AWAY = auto()
    COMING = auto()
    """It announced that it comes back, and is already in line."""
    WAITING = auto()
    KEPT = auto()
    """Its resources are held for it, and it has not come back yet."""
    RUNNING = auto()


class Claim:
    """One Instance's entry: the resources it needs to run, and its run count. Accessed by its RateLimiter only.

    `spent`: its runs, each counted `priority` times, plus the owed runs that were forgotten.
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
    """Decides what runs next: of the waiting Instances, the one that has run least, counting runs `priority` times.

    The coming run counts too: otherwise an Instance of priority 2 is up to a run ahead of half of what one of priority
    1 does. `stated` is the amount of each resource; a None device means on each device. If it is not empty, resources
    that it does not name do not exist; otherwise there is as much of each as the Instance that needs most requires.
    Invariants: an Instance holds everything it needs or nothing; no more is given out than there is. Nothing is taken
    from a Pool that an earlier Instance waits for, so those with small needs do not pass one with large needs; an
    Instance that needs none of those Pools may go past.
    Bound: if all use one Pool with enough for one at a time, an Instance of priority p waits for at most
    2 p / q + OWED + 2 runs of each other Instance, of priority q (tests/batching/test_rates.py).
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
        """Register an Instance that runs on a device and needs these resources for each run.

        Raises: InferError (INVALID: there is too little of a resource for it ever to run, or it and another Instance
        disagree on whether a resource is shared by all devices).
        """
        number = device_number(device)
        needs = {(each.name, None if each.shared else number): each.count for each in resources if each.count}
        with self._lock:
            for pool, count in needs.items():
                self._check(pool, count, needs)
            claim = Claim(needs, priority, self._now)
            self._claims.append(claim)
            self._recount()
            self._pass_on()  # this Instance may have raised the amounts
        return claim

    def leave(self, claim: Claim) -> None:
        """Remove an Instance that neither waits nor runs any more."""
        with self._lock:
            self._claims.remove(claim)
            self._drop(claim)
            self._recount()
            self._pass_on()

    def ask(self, claim: Claim, waiter: Waiter) -> None:
        """Ask for all it needs. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""
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
        """Stop waiting. Returns: False if the resources have already been granted; `end` must return them."""
        with self._lock:
            if claim.state is _State.RUNNING:
                return False
            self._drop(claim)
            self._pass_on()
            return True

    def forget(self, claim: Claim) -> None:
        """Record that an Instance that announced more work in `end` is not coming back now."""
        with self._lock:
            self._drop(claim)
            self._pass_on()

    def most_ns(self, claim: Claim) -> float:
        """Return the longest predicted time a batch may have: no limit."""
        return 0

    def begin(self, claim: Claim, cost_ns: float) -> None:
        """Count a run."""
        with self._lock:
            claim.spent += claim.priority

    def end(self, claim: Claim, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """Return everything it holds. Returns: whether it gets it again at once, having run least often.

        `more`: it comes back at once, by `ask` or `forget`, and is in line from now on: if it joined only when its
        thread comes round, others of lower priority would be first.
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
        """Do nothing: nothing runs without a turn."""

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
        """Return the configured amount of a resource; None if no amounts are configured."""
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
        """Remove an Instance from the line, or take back what it holds."""
        if claim.state in {_State.COMING, _State.WAITING}:
            self._line.remove(claim)
        elif claim.state in {_State.KEPT, _State.RUNNING}:
            for pool, count in claim.needs.items():
                self._held[pool] -= count
        claim.state = _State.AWAY

    def _pass_on(self) -> None:
        """Grant free resources to the waiting Instances in order, but none that an earlier one still needs."""
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
    """Order the line; of equals, the lower priority number comes first, then the earlier arrival."""
    return claim.spent + claim.priority, claim.priority


def device_number(device: str) -> int:
    """Return a device's number, as in --rate-limit-resource. The CPU's is 0, like the first GPU's, as in Triton."""
    return int(device.partition(":")[2] or 0)
