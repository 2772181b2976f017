"""Sizing: how many rows a batch may have, and until when it is held open. Used by the Scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy

from .costs import CostModel
from .lane import Lane
from .lockstep import LockStep
from .memory_cap import MemoryCap
from .promise import Promises

PROBE_ABOVE_EVERY = 128
"""One in this many of the batches that would be cut grows past the size where time per row was seen to rise, to at most
twice that size."""
PROBE_BELOW_EVERY = 16
"""One in this many batches has half its usual size, if hardly any batch of about that size has run. Under a load that
always fills batches, smaller ones never run by themselves: for a Key that the sweep did not run, 64 rows at 300 rows/s
would be all that is ever seen of a model that does 400 in batches of 8."""
TIGHT_TARGET_FACTOR = 1.25
"""Under a tight target, a batch may take this much longer than one row."""
MAX_P95_FACTOR = 1.15
"""A p95 above the mean by more than this factor is an outlier of a size that seldom runs; occasional slow runs are left
to the margin. Without it, one run of 10 ms in 500 caused 9% to be rejected at 80% of the knee, with it 1%
(docs/adr/0009)."""
UNKNOWN_NS = 1 << 61
"""The assumed run time of a Key that never ran: too long for the loop, unless the model is pinned to it."""
FAST_NS = {"auto": 250_000, "thread": 0, "loop": 1 << 62}
"""A batch that runs in less time than this is run by the event loop itself, by `executor` setting: beside a busy loop,
a hand-over to a thread and back plus GIL contention cost 100 to 150 us of CPU
(docs/adr/0002-pull-scheduling-two-executors.md)."""
FAST_MULTI_INSTANCE_NS = 100_000
"""The same if several Instances could run at once, which the loop cannot."""
FAST_HYSTERESIS = 2
"""A model run by the loop is handed to threads only above this many times the limit: beside a busy loop, the same run
takes that much longer on a thread by the clock, since it waits for the GIL, and a model that left at the first slow
moment would not come back."""


class Sizing:
    """How many rows a batch of each Lane may hold, configured or learned.

    If preferred sizes or a delay are configured, they mean what they mean in Triton: a preferred size goes at once and
    alone, any other size waits for the delay, and what has waited that long goes with everything that fits. If requests
    are held for a test (`hold_requests`), sizes are Triton's too. Otherwise sizes are learned, and nothing waits except
    for clients in lock step, which `lockstep` tracks.
    The number of rows (`limit`) comes from the first of these that applies: preferred sizes, the target, a configured
    cap, clients in lock step, everything that fits. It is reduced to what memory held lately and to what the turn's
    time allows, and, if nothing was configured, to what does the most rows per second (`_efficient_rows`).
    Pure: told the time; the Scheduler's caller holds the model's lock. `use_lockstep`: the model has neither
    sequences nor levels.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        costs: CostModel,
        promises: Promises,
        fast_ns: int = 0,
        *,
        use_lockstep: bool = True,
    ) -> None:
        self._costs = costs
        self._promises = promises
        self._max_rows = policy.max_batch_rows or 1
        self._batched = bool(policy.max_batch_rows)
        self._cap_rows = policy.cap_rows or 0
        self._preferred_sizes = frozenset(policy.preferred_rows)
        self._allowed_rows = sorted(policy.allowed_rows)
        self._is_configured = bool(policy.preferred_rows or policy.max_queue_delay_us or policy.hold_requests)
        self._cut_count = self._sized_count = 0
        self._max_run_ns = 0.0
        self.delay_ns = policy.max_queue_delay_us * 1000
        self._has_delay = self.delay_ns > 0
        self.target_ns = policy.latency_target_us * 1000
        # with a target, a batch was promised to hold everything it may: cut, a ResNet-50 on an H200 at 95% of its knee
        # serves 90% within 10 ms; filled up, 95% (perf/simulator/simulation.py)
        is_capped = bool(self._cap_rows and not self._allowed_rows)
        self._never_cut = not self._batched or self._is_configured or is_capped or self.target_ns > 0
        self.fast_ns = fast_ns
        self.memory_cap = MemoryCap()
        self.lockstep = LockStep(costs, self._max_rows)
        self.lockstep.single_instance = promises.instances == 1
        if not use_lockstep or self.target_ns:
            self.lockstep.disable()

    def limit(self, lane: Lane, waiting_rows: int, now_ns: int, max_run_ns: float, max_unknown_rows: int = 0) -> int:
        """Return how many rows a batch of this Lane may have now; `waiting_rows` wait in all Lanes.

        `max_run_ns`: the longest predicted run allowed; 0 for no limit. `max_unknown_rows`: the most rows of a Key
        without predictions; 0 for any number.
        """
        self._max_run_ns = max_run_ns
        limit = self._desired_rows(lane, waiting_rows, now_ns)
        if self.memory_cap.rows:
            limit = min(limit, self.memory_cap.limit(now_ns) or limit)
        if max_run_ns:
            limit = min(limit, self._costs.rows_within(lane.key, max_run_ns) or max_unknown_rows or limit)
        return limit if self._never_cut or self.lockstep.together else self._efficient_rows(lane, limit)

    def _desired_rows(self, lane: Lane, waiting_rows: int, now_ns: int) -> int:
        """Return how many rows a batch of this Lane should have now.

        As a rule everything that waits, so that no request waits for another run. Clients in lock step would then all
        go at once and the model would idle while they are answered: so nearly half of everything in flight goes, of
        whatever Keys, to form two batches that take turns; or all, if that measured better. With a target, a batch
        holds what the target allows.
        """
        if not self._batched:
            return 0
        if self._preferred_sizes:
            return self._preferred_rows(lane, now_ns)
        if self.target_ns and lane.full_batch_rows:
            return lane.full_batch_rows
        if self._cap_rows:
            return min(self._cap_rows, self._max_rows)
        if self._is_configured:
            return self._max_rows
        if not self.lockstep.check_steady(waiting_rows) or self.lockstep.together:
            return self._max_rows
        limit = max(self._costs.knee_rows(lane.key), self.lockstep.half_rows())
        if self._allowed_rows:
            # rows that would be padding might as well be real
            limit = next((size for size in self._allowed_rows if size >= limit), limit)
        return min(limit, self._max_rows)

    def _efficient_rows(self, lane: Lane, limit: int) -> int:
        """Return the size up to `limit` that does the most rows per second; now and then another size, to learn.

        Of 70 rows 64 go, and the others with those that come meanwhile, if 96 take half as long again as 64; of 7 rows
        all go, if 8 take as long as 6.
        """
        rows = min(lane.rows, limit)
        best = self._costs.best_rows(lane.key, rows)
        self._sized_count += 1
        # not if the size was promised: a request that counts on it would expire
        if not self._sized_count % PROBE_BELOW_EVERY and not lane.full_batch_ns:
            untried = self._costs.untried_rows(lane.key, best)
            if untried:
                return untried
        if best >= rows:
            return limit
        self._cut_count += 1
        return best if self._cut_count % PROBE_ABOVE_EVERY else min(2 * best, limit)

    @property
    def may_hold(self) -> bool:
        """Whether a batch may be held open now."""
        return self._has_delay or self.lockstep.together

    def expedite(self) -> None:
        """Stop holding batches open."""
        self._has_delay = False
        self.lockstep.disable()

    def resize(self, instances: int, fast_ns: int) -> None:
        """Adapt to another number of Instances; see `Scheduler.resize`."""
        self.fast_ns = self.fast_ns and fast_ns
        self.lockstep.single_instance = instances == 1
        self.lockstep.reset()

    def max_batch_rows(self, lane: Lane | None) -> int:
        """Return the most rows that a batch of this Lane ever has, or of any Lane if None; at least 1."""
        max_rows = min(max(self._preferred_sizes, default=0) or self._cap_rows or self._max_rows, self._max_rows)
        if lane is not None and not self._is_configured:
            learned = lane.full_batch_rows if self.target_ns else self._costs.efficient_rows(lane.key)
            max_rows = min(max_rows, learned or max_rows)
        return min(max_rows, self.memory_cap.rows or max_rows)

    def _preferred_rows(self, lane: Lane, now_ns: int) -> int:
        prefix = self._find_prefix(lane, now_ns)
        head = lane.head()
        is_overdue = self.delay_ns and head is not None and self._hold_until_ns(lane, head) <= now_ns
        return prefix.preferred_rows if prefix.preferred_rows and not is_overdue else prefix.fitting_rows

    def _find_prefix(self, lane: Lane, now_ns: int) -> QueuePrefix:
        max_rows = min(self._cap_rows or self._max_rows, self._max_rows)
        return find_prefix((request.rows for request in lane.ordered_requests(now_ns)), self._preferred_sizes, max_rows)

    def due_ns(self, lane: Lane, head: InferRequest, now_ns: int) -> int:
        """When a Lane's batch is closed at the latest: its delay is over, or its oldest would miss its target.

        A deadline closes nothing: with both a delay and a shorter timeout configured, requests expire, as in Triton.
        """
        if not self.delay_ns:
            return self.lockstep.due_ns(lane.rows)
        hold_until_ns = self._hold_until_ns(lane, head)
        if hold_until_ns <= now_ns:
            return hold_until_ns
        if not self._preferred_sizes:
            return 0 if lane.rows >= min(self._cap_rows or self._max_rows, self._max_rows) else hold_until_ns
        prefix = self._find_prefix(lane, now_ns)
        return 0 if prefix.preferred_rows or prefix.complete else hold_until_ns

    def _hold_until_ns(self, lane: Lane, head: InferRequest) -> int:
        due_ns = head.enqueued_ns + self.delay_ns
        if not head.target_ns:
            return due_ns
        run_ns = self._costs.p95_ns(lane.key, lane.rows + 1)
        return 0 if run_ns is None else min(due_ns, int(head.target_ns - run_ns - self._promises.margin.ns))

    def update_lane(self, lane: Lane, *, with_promises: bool) -> None:
        """Update a Lane from the run times learned so far."""
        knee_rows = self._costs.knee_rows(lane.key)
        predicted_ns = self._costs.predict_ns(lane.key, knee_rows)
        fast_ns = FAST_HYSTERESIS * self.fast_ns if lane.fast else self.fast_ns
        # a thread does the interpreter's work per request too, and the loop would wait for it there
        run_ns = UNKNOWN_NS if predicted_ns is None else max(predicted_ns - lane.handling_ns_per_row * knee_rows, 0)
        lane.fast = run_ns < fast_ns
        if with_promises:
            self._update_full_batch(lane)
            self._promises.update_backlog(lane)

    def _update_full_batch(self, lane: Lane) -> None:
        """Compute how many rows a full batch holds and how long it takes.

        With a target it is the largest batch that can run twice within it: one may have begun just before a request
        came, the next is its own. If even one row takes longer than that, it is the largest that takes hardly longer
        than one row. Up to twice the largest batch that has run is assumed to cost what that one did: otherwise
        requests of a new Key would be rejected before it can show that more rows do not take proportionally longer.
        """
        costs, key, promises = self._costs, lane.key, self._promises
        one_ns = costs.predict_ns(key, 1)
        if one_ns is None:
            return
        rows = (
            max(self._preferred_sizes)
            if self._preferred_sizes
            else self._cap_rows or costs.efficient_rows(key) or self._max_rows
        )
        rows = min(rows, self._max_rows, self.memory_cap.rows or rows)
        if self._max_run_ns:
            rows = min(rows, costs.rows_within(key, self._max_run_ns))
        known_rows = min(rows, costs.max_seen_rows(key) or rows)
        if self.target_ns:
            half_ns = (self.target_ns - promises.margin.ns) / 2 - promises.gap_ns
            known_rows = min(known_rows, costs.rows_within(key, max(half_ns, TIGHT_TARGET_FACTOR * one_ns)))
        rows = min(rows, 2 * known_rows if known_rows == costs.max_seen_rows(key) else known_rows)
        run_ns, p95_ns = costs.predict_ns(key, known_rows) or 0.0, costs.p95_ns(key, known_rows) or 0.0
        lane.full_batch_rows = rows
        lane.full_batch_ns = run_ns + promises.gap_ns
        lane.full_batch_p95_ns = min(p95_ns, MAX_P95_FACTOR * run_ns)


def fast_ns(executor: str, instances: int) -> int:
    """Return the run time below which the event loop runs a batch, given the number of Instances."""
    return FAST_MULTI_INSTANCE_NS if executor == "auto" and instances > 1 else FAST_NS[executor]


class QueuePrefix(NamedTuple):
    """How far a walk along a queue has come.

    `preferred_rows` is the longest prefix of a preferred size or, if there is none, everything before the request that
    would exceed the largest of them; 0 for none. `fitting_rows` is everything that fits one batch. `complete`: it
    cannot grow any more, or need not.
    """

    preferred_rows: int
    fitting_rows: int
    complete: bool


def find_prefix(waiting_rows: Iterable[int], sizes: Collection[int], max_rows: int) -> QueuePrefix:
    """Walk along the rows of the waiting requests, in the order in which they are served.

    `sizes` are the preferred ones. Units: rows; a request without rows counts as one, so that a walk ends.
    Source: Triton core, DynamicBatchScheduler::GetDynamicBatch.
    """
    largest = max(sizes)
    preferred_rows = fitting_rows = 0
    for rows in waiting_rows:
        new_rows = fitting_rows + (rows or 1)
        if fitting_rows:
            if new_rows > largest and not preferred_rows:
                preferred_rows = fitting_rows
            if new_rows > max_rows:
                return QueuePrefix(preferred_rows, fitting_rows, complete=True)
        fitting_rows = new_rows
        if fitting_rows in sizes:
            preferred_rows = fitting_rows
    return QueuePrefix(preferred_rows, fitting_rows, complete=fitting_rows >= largest)
