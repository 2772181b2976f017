"""Promise: predicts when a request arriving now would be answered, and how far to trust that.

Owned by the Scheduler, which queries it on arrival once requests have targets or deadlines. Pure, and told the time.
"""

from __future__ import annotations

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch

from .costs import CostModel
from .lane import Lane, urgency_ns

LATE = "Exceeds latency target: would be answered in %s ms, the target is %s ms"
PASSED = "Exceeds latency target: the deadline has passed"
EXPIRED = "Request timeout expired"
"""Triton's exact text: clients and Triton's own tests compare it whole."""

QUANTILE = 0.99
"""This share of requests is answered no later than promised plus the margin."""
MOST = 0.25
"""A margin takes at most this share of a target; worse predictions cannot be fixed by a margin."""
PROBE_NS = 100_000_000
"""An idle server that predicts itself too slow for a target tries one request per this interval: the prediction may be
wrong."""
_GAIN = 0.125
_STEADY = 16


class Margin:
    """How much later than promised requests are answered: a running quantile, from 0 to a share of the target.

    Each request moves it by a step, up or down, such that the steps balance at the quantile. A step is a fraction of
    the typical distance of the prediction from the margin, so it works for microseconds and for seconds; one outlier is
    one step.
    """

    __slots__ = ("_spread_ns", "ns")

    def __init__(self) -> None:
        self.ns = 0.0
        self._spread_ns = 0.0

    def observe(self, late_ns: float, target_ns: float) -> None:
        """Learn that a request was answered `late_ns` after its promise; `target_ns` is the time it was given."""
        miss_ns = late_ns - self.ns
        self._spread_ns += (min(abs(miss_ns), target_ns) - self._spread_ns) / _STEADY
        step_ns = self._spread_ns * _GAIN
        self.ns += step_ns * QUANTILE if miss_ns > 0 else -step_ns * (1 - QUANTILE)
        self.ns = min(max(self.ns, 0.0), target_ns * MOST)


class Promises:
    """What runs, what waits, the gap between batches, and what they mean for one more request.

    Invariant: `work_ns` is the sum of all Lanes' `work_ns`. `between_ns` is the time from the end of a batch to the
    start of the next while something waits: hand-over, the loop's turn, other models on the device. `leveled`: not
    everything that waits in a Lane goes before a request that joins it.
    Threads: the caller holds the model's lock, except for `delivered`, which belongs to the event loop.
    """

    def __init__(self, lanes: dict[Key, Lane], costs: CostModel, instances: int, *, leveled: bool = False) -> None:
        self._leveled = leveled
        self.work_ns = 0.0
        self.between_ns = 0.0
        self.margin = Margin()
        self._lanes = lanes
        self._costs = costs
        self.instances = instances
        self._running: dict[Batch, tuple[float, float]] = {}
        self._freed_ns = 0
        self._tried_ns = -PROBE_NS
        self._late: InferError | None = None
        self._late_arrived_ns = 0

    def took(self, batch: Batch, now_ns: int) -> None:
        """Record that a Batch was taken, with its `cost_ns`; if its Instance is running another, it follows at once."""
        self._late = None
        start_ns = max(now_ns, batch.device_free_ns)
        self._running[batch] = start_ns, start_ns + batch.cost_ns
        if batch.device_free_ns:
            self.between_ns -= self.between_ns / _STEADY
            self._freed_ns = 0
        elif self._freed_ns:
            # at most four times the usual: a pause of the whole machine is not a gap between batches
            gap_ns = min(max(now_ns - self._freed_ns, 0), 4 * self.between_ns + 1_000)
            self.between_ns += (gap_ns - self.between_ns) / _STEADY
            self._freed_ns = 0

    def ended(self, batch: Batch, now_ns: int, waiting: bool) -> None:
        """Record that a Batch has ended; `waiting`: whether the next could begin."""
        self._running.pop(batch, None)
        self._freed_ns = now_ns if waiting else 0

    def delivered(self, request: InferRequest, now_ns: int) -> None:
        """Learn when a request that had a target was answered."""
        self.margin.observe(now_ns - request.promised_ns, request.target_ns - _arrived_ns(request))

    def reckon(self, lane: Lane) -> None:
        """Recompute how long everything that waits in a Lane will take."""
        work_ns = (-(-lane.rows // lane.full_rows) or 1) * lane.full_ns if lane.live and lane.full_rows else 0.0
        self.work_ns += work_ns - lane.work_ns
        lane.work_ns = work_ns

    def check(self, request: InferRequest, lane: Lane) -> None:
        """Predict when a request about to join a Lane is answered, and set its `promised_ns`.

        First assumes that everything waiting goes before it; what really does is computed only if that would be too
        late.
        Raises: InferError (OVERLOADED: it would miss its target; EXPIRED: it would miss its deadline).
        """
        now_ns, target_ns, deadline_ns = request.enqueued_ns, request.target_ns, request.deadline_ns
        rows = lane.rows + request.rows
        if self._leveled:
            rows, deadline_ns = lane.rows_before(request) + request.rows, lane.must_leave_ns(request)
        start_ns, end_ns = self._predict(lane, rows, now_ns, self.work_ns - lane.work_ns)
        request.promised_ns = int(end_ns)
        if (not target_ns or end_ns + self.margin.ns <= target_ns) and (not deadline_ns or start_ns <= deadline_ns):
            return
        if len(self._lanes) > 1:
            start_ns, end_ns = self._predict(lane, rows, now_ns, self._before_ns(request, lane))
        if deadline_ns and start_ns > deadline_ns:
            raise InferError(Code.EXPIRED, EXPIRED, _again_ns(start_ns, deadline_ns))
        if not target_ns:
            return
        arrived_ns = _arrived_ns(request)
        margin_ns = min(self.margin.ns, (target_ns - arrived_ns) * MOST)
        if start_ns <= now_ns:
            # it finds the device idle, and its batch is what waits now
            end_ns = start_ns + (self._costs.predict_ns(lane.key, lane.rows + request.rows) or 0)
            margin_ns = 0
        request.promised_ns = int(end_ns)
        if end_ns + margin_ns > target_ns and not (start_ns <= now_ns and not lane.live and self._may_try(now_ns)):
            raise _refused(end_ns + margin_ns, target_ns, arrived_ns)

    def late(self, now_ns: int, arrived_ns: int, target_ns: int) -> InferError | None:
        """Return the error of a one-row request that would miss its target, `target_ns` from arrival, in every Lane.

        A request that would find the device idle is left to `check`. Computed once for all requests that arrived
        together, until a Batch is taken: it took a fifth of the loop's time at twice the capacity.
        """
        if self._late is None or arrived_ns != self._late_arrived_ns:
            self._late, self._late_arrived_ns = self._refusal(now_ns, arrived_ns, target_ns), arrived_ns
        return self._late

    def _refusal(self, now_ns: int, arrived_ns: int, target_ns: int) -> InferError | None:
        last_ns = arrived_ns + target_ns - self.margin.ns
        lanes = self._lanes.values()
        if any(self._predict(lane, lane.rows + 1, now_ns, self.work_ns - lane.work_ns)[1] <= last_ns for lane in lanes):
            return None
        works = [self._as_it_is_ns(lane) for lane in lanes]
        soonest_ns, all_ns = float("inf"), sum(works)
        for lane, work_ns in zip(lanes, works, strict=True):
            start_ns, end_ns = self._predict(lane, lane.rows + 1, now_ns, all_ns - work_ns)
            soonest_ns = min(soonest_ns, end_ns)
            if soonest_ns <= last_ns or start_ns <= now_ns:
                return None
        return _refused(soonest_ns + self.margin.ns, arrived_ns + target_ns, arrived_ns)

    def _predict(self, lane: Lane, rows: int, now_ns: int, others_ns: float) -> tuple[float, float]:
        """Predict when a request starts to run and has run, after `others_ns` of work in other Lanes.

        `rows` are its own and those before it in its Lane. Its own batch is assumed to be full, as it is if the request
        has to wait. A Key that has never run is assumed to take no time.
        """
        full_rows = lane.full_rows
        if not full_rows:
            start_ns = self._start_ns(now_ns, others_ns)
            return start_ns, start_ns
        batches = (rows - 1) // full_rows if lane.live else 0
        start_ns = self._start_ns(now_ns, others_ns + batches * lane.full_ns)
        return start_ns, start_ns + lane.full_p95_ns

    def _start_ns(self, now_ns: int, ahead_ns: float) -> float:
        """Predict when a batch starts that has `ahead_ns` of work before it, in addition to what is running.

        If all Instances should be free by now, they are assumed to run for as much longer as they are already late;
        meanwhile, requests with a shorter target are rejected.
        """
        running = self._running
        # below one: rounding error in a sum that should be zero
        if not running or (ahead_ns < 1 and len(running) < self.instances):
            return now_ns + ahead_ns / self.instances
        left_ns, last_ns = ahead_ns, 0.0
        for begin_ns, end_ns in running.values():
            left_ns += self.between_ns + max(end_ns - max(begin_ns, now_ns), 0)
            last_ns = max(last_ns, end_ns)
        late_ns = now_ns - last_ns if len(running) >= self.instances and last_ns < now_ns else 0
        return now_ns + late_ns + left_ns / self.instances

    def _before_ns(self, request: InferRequest, lane: Lane) -> float:
        """Predict the time of the other Lanes that go before a request."""
        urgent_ns = lane.urgency_ns() if lane.live else urgency_ns(request)
        others = (other for other in self._lanes.values() if other is not lane and other.live)
        return sum(self._as_it_is_ns(other) for other in others if other.goes_before(request, urgent_ns))

    def _as_it_is_ns(self, lane: Lane) -> float:
        """Predict the time of a Lane whose last batch gets no fuller than it is now.

        It may get fuller, which the margin covers. Assuming that the last batches of all Lanes are full would, with two
        Lanes, reject half of what can be served (docs/adr/0009).
        """
        if not lane.work_ns:
            return 0.0
        batches, rows = divmod(lane.rows, lane.full_rows)
        last_ns = (self._costs.predict_ns(lane.key, rows) or 0) + self.between_ns if rows or not batches else 0.0
        return batches * lane.full_ns + min(last_ns, lane.full_ns)

    def _may_try(self, now_ns: int) -> bool:
        if now_ns < self._tried_ns + PROBE_NS:
            return False
        self._tried_ns = now_ns
        return True


def _arrived_ns(request: InferRequest) -> int:
    """Return the time from which a target counts; one that only the request has counts from its acceptance."""
    arrived_ns: int = getattr(request, "arrived_ns", request.start_ns)
    return arrived_ns


def _refused(will_ns: float, wanted_ns: int, from_ns: int) -> InferError:
    """Make the error of a request that would be answered too late, with times in ms from its arrival."""
    will, wanted = (_ms(ns - from_ns) for ns in (will_ns, wanted_ns))
    # a gRPC deadline may have passed before the request arrived, or while the previous steps ran
    text = LATE % (will, wanted) if wanted_ns > from_ns else PASSED
    return InferError(Code.OVERLOADED, text, _again_ns(will_ns, wanted_ns))


def _again_ns(will_ns: float, wanted_ns: int) -> int:
    """Return after how long a retry is worthwhile."""
    return max(int(will_ns - wanted_ns), 1_000_000)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.0f}" if ns >= 100_000_000 else f"{ns / 1e6:.3g}"
