"""RateLimiter: Instances run only while they hold the resources that their group needs, ordered by their run counts.

One per Engine, if enabled (--rate-limit); it gives turns by the same protocol as a Device (device.py).
Source: Triton core, rate_limiter.cc, except for what is forgotten (`MAX_OWED_RUNS`) and what may go past
(`_grant_turns`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import Resource

from .device import Waiter

MAX_OWED_RUNS = 16
"""An Instance that has run less often than others is owed at most this many runs. In Triton it is owed all of them: one
that was idle while another ran a million times then has the resources to itself for a million runs."""

Pool = tuple[str, int | None]
"""A resource and the number of its device; None if it is shared by all devices."""


class _State(Enum):
    IDLE = auto()
    RETURNING = auto()
    """It announced that it comes back, and is already in line."""
    WAITING = auto()
    RESERVED = auto()
    """Its resources are held for it, and it has not come back yet."""
    RUNNING = auto()


class Claim:
    """One Instance's entry: the resources it needs to run, and its run count. Accessed by its RateLimiter only.

    `weighted_runs`: its runs, each counted `priority` times, plus the owed runs that were forgotten.
    """

    __slots__ = ("exempt", "needs", "priority", "state", "waiter", "weighted_runs")

    def __init__(self, needs: Mapping[Pool, int], priority: int, spent: int) -> None:
        self.exempt = False
        self.needs = needs
        self.priority = max(priority, 1)
        self.weighted_runs = spent
        self.state = _State.IDLE
        self.waiter: Waiter | None = None


class RateLimiter:
    """Decides what runs next: of the waiting Instances, the one that has run least, counting runs `priority` times.

    The coming run counts too: otherwise an Instance of priority 2 is up to a run ahead of half of what one of priority
    1 does. `configured` is the amount of each resource; a None device means on each device. If it is not empty,
    resources that it does not name do not exist; otherwise there is as much of each as the Instance that needs most
    requires.
    Invariants: an Instance holds everything it needs or nothing; no more is given out than there is. Nothing is taken
    from a Pool that an earlier Instance waits for, so those with small needs do not pass one with large needs; an
    Instance that needs none of those Pools may go past.
    Bound: if all use one Pool with enough for one at a time, an Instance of priority p waits for at most
    2 p / q + MAX_OWED_RUNS + 2 runs of each other Instance, of priority q (tests/batching/test_rate_limiter.py).
    Threads: all methods may be called on any. The lock of a Model may be held; none is taken under its own.
    """

    contended = True

    def __init__(self, configured: Mapping[Pool, int] | None = None) -> None:
        self._configured = dict(configured or {})
        self._claims: list[Claim] = []
        self._available: dict[Pool, int] = {}
        self._in_use: dict[Pool, int] = {}
        self._queue: list[Claim] = []
        self._virtual_time = 0
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
                self._check_resource(pool, count, needs)
            claim = Claim(needs, priority, self._virtual_time)
            self._claims.append(claim)
            self._update_available()
            self._grant_turns()  # this Instance may have raised the amounts
        return claim

    def leave(self, claim: Claim) -> None:
        """Remove an Instance that neither waits nor runs any more."""
        with self._lock:
            self._claims.remove(claim)
            self._remove(claim)
            self._update_available()
            self._grant_turns()

    def request_turn(self, claim: Claim, waiter: Waiter) -> None:
        """Ask for all it needs. `waiter.grant` is called once, maybe before this returns, unless it withdraws."""
        with self._lock:
            claim.waiter = waiter
            if claim.state is _State.RESERVED:
                claim.state = _State.RUNNING
                waiter.grant()
            elif claim.state is _State.RETURNING:
                claim.state = _State.WAITING
            else:
                self._enqueue(claim, _State.WAITING)
                self._grant_turns()

    def cancel_request(self, claim: Claim, waiter: Waiter) -> bool:
        """Stop waiting. Returns: False if the resources have already been granted; `end_turn` must return them."""
        with self._lock:
            if claim.state is _State.RUNNING:
                return False
            self._remove(claim)
            self._grant_turns()
            return True

    def release_reservation(self, claim: Claim) -> None:
        """Record that an Instance that announced more work in `end_turn` is not coming back now."""
        with self._lock:
            self._remove(claim)
            self._grant_turns()

    def max_batch_ns(self, claim: Claim) -> float:
        """Return the longest predicted time a batch may have: no limit."""
        return 0

    def begin_batch(self, claim: Claim, cost_ns: float) -> None:
        """Count a run."""
        with self._lock:
            claim.weighted_runs += claim.priority

    def end_turn(self, claim: Claim, predicted_ns: float, real_ns: int, more: bool) -> bool:
        """Return everything it holds. Returns: whether it gets it again at once, having run least often.

        `more`: it comes back at once, by `request_turn` or `release_reservation`, and is in line from now on: if it
        joined only when its thread comes round, others of lower priority would be first.
        """
        with self._lock:
            self._remove(claim)
            if more:
                self._enqueue(claim, _State.RETURNING)
            self._grant_turns()
            if claim.state is not _State.RESERVED:
                return False
            claim.state = _State.RUNNING
            return True

    def record_run(self, claim: Claim, real_ns: int) -> None:
        """Do nothing: nothing runs without a turn."""

    def _check_resource(self, pool: Pool, count: int, needs: Mapping[Pool, int]) -> None:
        name, shared = pool[0], pool[1] is None
        available = self._configured_amount(pool)
        if available is not None and available < count:
            text = f'Resource count for "{name}" is limited to {available} which will prevent scheduling of one or more'
            raise InferError(Code.INVALID, f"{text} model instances, the minimum required count is {count}")
        for known in (*self._available, *needs):
            if known[0] == name and (known[1] is None) != shared:
                text = f'Resource "{name}" is present as both global and device-specific resource in the model'
                raise InferError(Code.INVALID, f"{text} configuration.")

    def _configured_amount(self, pool: Pool) -> int | None:
        """Return the configured amount of a resource; None if no amounts are configured."""
        if not self._configured:
            return None
        name, device = pool
        counts = [
            count
            for (other_name, other_device), count in self._configured.items()
            if other_name == name and (device is None or other_device in {None, device})
        ]
        return max(counts, default=0)

    def _update_available(self) -> None:
        self._available = {}
        for claim in self._claims:
            for pool, count in claim.needs.items():
                amount = self._configured_amount(pool)
                self._available[pool] = max(self._available.get(pool, 0), count) if amount is None else amount

    def _enqueue(self, claim: Claim, state: _State) -> None:
        claim.weighted_runs = max(claim.weighted_runs, self._virtual_time - MAX_OWED_RUNS * claim.priority)
        claim.state = state
        self._queue.append(claim)

    def _remove(self, claim: Claim) -> None:
        """Remove an Instance from the line, or take back what it holds."""
        if claim.state in {_State.RETURNING, _State.WAITING}:
            self._queue.remove(claim)
        elif claim.state in {_State.RESERVED, _State.RUNNING}:
            for pool, count in claim.needs.items():
                self._in_use[pool] -= count
        claim.state = _State.IDLE

    def _grant_turns(self) -> None:
        """Grant free resources to the waiting Instances in order, but none that an earlier one still needs."""
        blocked_pools: set[Pool] = set()
        for claim in sorted(self._queue, key=_rank):
            if blocked_pools.isdisjoint(claim.needs) and self._fits(claim):
                self._grant(claim)
            else:
                blocked_pools.update(claim.needs)

    def _fits(self, claim: Claim) -> bool:
        return all(self._in_use.get(pool, 0) + count <= self._available[pool] for pool, count in claim.needs.items())

    def _grant(self, claim: Claim) -> None:
        self._queue.remove(claim)
        self._virtual_time = max(self._virtual_time, claim.weighted_runs)
        for pool, count in claim.needs.items():
            self._in_use[pool] = self._in_use.get(pool, 0) + count
        if claim.state is _State.RETURNING or claim.waiter is None:
            claim.state = _State.RESERVED
        else:
            claim.state = _State.RUNNING
            claim.waiter.grant()


def _rank(claim: Claim) -> tuple[int, int]:
    """Order the line; of equals, the lower priority number comes first, then the earlier arrival."""
    return claim.weighted_runs + claim.priority, claim.priority


def device_number(device: str) -> int:
    """Return a device's number, as in --rate-limit-resource. The CPU's is 0, like the first GPU's, as in Triton."""
    return int(device.partition(":")[2] or 0)
