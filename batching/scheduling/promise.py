"""Promise: predicts when a request arriving now would be answered, and how far to trust that.

Owned by the Scheduler, which queries it on arrival once requests have targets or deadlines. Pure, and told the time.
"""

from __future__ import annotations

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Key
from penstock.batching.running.batch import Batch

from .costs import CostModel
from .lane import Lane, urgency_ns

LATE_TEXT = "Exceeds latency target: would be answered in %s ms, the target is %s ms"
PASSED_TEXT = "Exceeds latency target: the deadline has passed"
EXPIRED_TEXT = "Request timeout expired"
"""Triton's exact text: clients and Triton's own tests compare it whole."""

QUANTILE = 0.99
"""This share of requests is answered no later than promised plus the margin."""
MAX_MARGIN_SHARE = 0.25
"""A margin takes at most this share of a target; worse predictions cannot be fixed by a margin."""
PROBE_NS = 100_000_000
"""An idle server that predicts itself too slow for a target tries one request per this interval: the prediction may be
wrong."""
SATURATED_SHARE = 0.25
"""A loop in which requests may have waited unread for this share of their target has no time to decode those that would
be late even on an idle device."""
_STEP_SHARE = 0.125
_SMOOTHING = 16


class Margin:
    """How much later than promised requests are answered: a running quantile, from 0 to a share of the target.

    Each request moves it by a step, up or down, such that the steps balance at the quantile. A step is a fraction of
    the typical distance of the prediction from the margin, so it works for microseconds and for seconds; one outlier is
    one step.
    """

    __slots__ = ("_deviation_ns", "ns")

    def __init__(self) -> None:
        self.ns = 0.0
        self._deviation_ns = 0.0

    def observe(self, late_ns: float, target_ns: float) -> None:
        """Learn that a request was answered `late_ns` after its promise; `target_ns` is the time it was given."""
        error_ns = late_ns - self.ns
        self._deviation_ns += (min(abs(error_ns), target_ns) - self._deviation_ns) / _SMOOTHING
        step_ns = self._deviation_ns * _STEP_SHARE
        self.ns += step_ns * QUANTILE if error_ns > 0 else -step_ns * (1 - QUANTILE)
        self.ns = min(max(self.ns, 0.0), target_ns * MAX_MARGIN_SHARE)


class Promises:
    """What runs, what waits, the gap between batches, and what they mean for one more request.

    Invariant: `backlog_ns` is the sum of all Lanes' `backlog_ns`. `gap_ns` is the time from the end of a batch to the
    start of the next while something waits: hand-over, the loop's turn, other models on the device. `has_levels`: not
    everything that waits in a Lane goes before a request that joins it.
    Threads: the caller holds the model's lock, except for `record_delivered`, which belongs to the event loop.
    """

    def __init__(self, lanes: dict[Key, Lane], costs: CostModel, instances: int, *, has_levels: bool = False) -> None:
        self._has_levels = has_levels
        self.backlog_ns = 0.0
        self.gap_ns = 0.0
        self.margin = Margin()
        self._lanes = lanes
        self._costs = costs
        self.instances = instances
        self._running: dict[Batch, tuple[float, float]] = {}
        self._freed_ns = 0
        self._last_probe_ns = -PROBE_NS
        self._late_error: InferError | None = None
        self._late_error_arrived_ns = 0

    def record_taken(self, batch: Batch, now_ns: int) -> None:
        """Record that a Batch was taken, with its `cost_ns`; if its Instance is running another, it follows at once."""
        self._late_error = None
        start_ns = max(now_ns, batch.device_free_ns)
        self._running[batch] = start_ns, start_ns + batch.cost_ns
        if batch.device_free_ns:
            self.gap_ns -= self.gap_ns / _SMOOTHING
            self._freed_ns = 0
        elif self._freed_ns:
            # at most four times the usual: a pause of the whole machine is not a gap between batches
            observed_ns = min(max(now_ns - self._freed_ns, 0), 4 * self.gap_ns + 1_000)
            self.gap_ns += (observed_ns - self.gap_ns) / _SMOOTHING
            self._freed_ns = 0

    def record_ended(self, batch: Batch, now_ns: int, has_waiting: bool) -> None:
        """Record that a Batch has ended; `has_waiting`: whether the next could begin."""
        self._running.pop(batch, None)
        self._freed_ns = now_ns if has_waiting else 0

    def record_delivered(self, request: InferRequest, now_ns: int) -> None:
        """Learn when a request that had a target was answered."""
        self.margin.observe(now_ns - request.promised_ns, request.target_ns - _arrived_ns(request))

    def update_backlog(self, lane: Lane) -> None:
        """Recompute how long everything that waits in a Lane will take."""
        backlog_ns = (
            (-(-lane.rows // lane.full_batch_rows) or 1) * lane.full_batch_ns
            if lane.request_count and lane.full_batch_rows
            else 0.0
        )
        self.backlog_ns += backlog_ns - lane.backlog_ns
        lane.backlog_ns = backlog_ns

    def check(self, request: InferRequest, lane: Lane) -> None:
        """Predict when a request about to join a Lane is answered, and set its `promised_ns`.

        First assumes that everything waiting goes before it; what really does is computed only if that would be too
        late.
        Raises: InferError (OVERLOADED: it would miss its target; EXPIRED: it would miss its deadline).
        """
        now_ns, target_ns, deadline_ns = request.enqueued_ns, request.target_ns, request.deadline_ns
        rows = lane.rows + request.rows
        if self._has_levels:
            rows, deadline_ns = lane.rows_ahead(request) + request.rows, lane.expiry_ns(request)
        start_ns, end_ns = self._predict(lane, rows, now_ns, self.backlog_ns - lane.backlog_ns)
        request.promised_ns = int(end_ns)
        if (not target_ns or end_ns + self.margin.ns <= target_ns) and (not deadline_ns or start_ns <= deadline_ns):
            return
        if len(self._lanes) > 1:
            start_ns, end_ns = self._predict(lane, rows, now_ns, self._ahead_ns(request, lane))
        if deadline_ns and start_ns > deadline_ns:
            raise InferError(Code.EXPIRED, EXPIRED_TEXT, _retry_after_ns(start_ns, deadline_ns))
        if not target_ns:
            return
        arrived_ns = _arrived_ns(request)
        margin_ns = min(self.margin.ns, (target_ns - arrived_ns) * MAX_MARGIN_SHARE)
        latest_ns = target_ns - margin_ns
        if start_ns <= now_ns:
            # it finds the device idle, and its batch is what waits now
            end_ns = start_ns + (self._costs.predict_ns(lane.key, lane.rows + request.rows) or 0)
            margin_ns, latest_ns = 0, _likely_target_ns(target_ns, arrived_ns, request.start_ns)
        request.promised_ns = int(end_ns)
        if end_ns > latest_ns and not (start_ns <= now_ns and not lane.request_count and self._may_probe(now_ns)):
            raise _late_error(end_ns + margin_ns, target_ns, arrived_ns)

    def late_error(self, now_ns: int, arrived_ns: int, target_ns: int, *, has_waiting: bool) -> InferError | None:
        """Return the error of a one-row request that would miss its target, `target_ns` from arrival, in every Lane.

        A request that would find the device idle is left to `check`, unless the loop is saturated. `has_waiting`:
        whether any request waits. Computed once for all requests that arrived together, until a Batch is taken: it took
        a fifth of the loop's time at twice the capacity.
        """
        if not (has_waiting or _is_saturated(now_ns, arrived_ns, target_ns)):
            return None
        if self._late_error is None or arrived_ns != self._late_error_arrived_ns:
            self._late_error, self._late_error_arrived_ns = (
                self._compute_late_error(now_ns, arrived_ns, target_ns),
                arrived_ns,
            )
        return self._late_error

    def _compute_late_error(self, now_ns: int, arrived_ns: int, target_ns: int) -> InferError | None:
        last_ns = arrived_ns + target_ns - self.margin.ns
        lanes = self._lanes.values()
        if any(
            self._predict(lane, lane.rows + 1, now_ns, self.backlog_ns - lane.backlog_ns)[1] <= last_ns
            for lane in lanes
        ):
            return None
        backlogs_ns = [self._current_backlog_ns(lane) for lane in lanes]
        earliest_ns, total_ns = float("inf"), sum(backlogs_ns)
        for lane, backlog_ns in zip(lanes, backlogs_ns, strict=True):
            start_ns, end_ns = self._predict(lane, lane.rows + 1, now_ns, total_ns - backlog_ns)
            if start_ns <= now_ns:
                end_ns = now_ns + (self._costs.predict_ns(lane.key, lane.rows + 1) or 0)
                likely_ns = _likely_target_ns(arrived_ns + target_ns, arrived_ns, now_ns)
                may_be_in_time = end_ns <= likely_ns or not _is_saturated(now_ns, arrived_ns, target_ns)
                if may_be_in_time or self._is_probe_due(now_ns):
                    return None
            earliest_ns = min(earliest_ns, end_ns)
            if earliest_ns <= last_ns:
                return None
        return _late_error(earliest_ns + self.margin.ns, arrived_ns + target_ns, arrived_ns) if lanes else None

    def _predict(self, lane: Lane, rows: int, now_ns: int, others_ns: float) -> tuple[float, float]:
        """Predict when a request starts to run and has run, after `others_ns` of work in other Lanes.

        `rows` are its own and those before it in its Lane. Its own batch is assumed to be full, as it is if the request
        has to wait. A Key that has never run is assumed to take no time.
        """
        full_rows = lane.full_batch_rows
        if not full_rows:
            start_ns = self._start_ns(now_ns, others_ns)
            return start_ns, start_ns
        batches = (rows - 1) // full_rows if lane.request_count else 0
        start_ns = self._start_ns(now_ns, others_ns + batches * lane.full_batch_ns)
        return start_ns, start_ns + lane.full_batch_p95_ns

    def _start_ns(self, now_ns: int, ahead_ns: float) -> float:
        """Predict when a batch starts that has `ahead_ns` of work before it, in addition to what is running.

        If all Instances should be free by now, they are assumed to run for as much longer as they are already late;
        meanwhile, requests with a shorter target are rejected.
        """
        running = self._running
        # below one: rounding error in a sum that should be zero
        if not running or (ahead_ns < 1 and len(running) < self.instances):
            return now_ns + ahead_ns / self.instances
        total_ns, last_ns = ahead_ns, 0.0
        for begin_ns, end_ns in running.values():
            total_ns += self.gap_ns + max(end_ns - max(begin_ns, now_ns), 0)
            last_ns = max(last_ns, end_ns)
        late_ns = now_ns - last_ns if len(running) >= self.instances and last_ns < now_ns else 0
        return now_ns + late_ns + total_ns / self.instances

    def _ahead_ns(self, request: InferRequest, lane: Lane) -> float:
        """Predict the time of the other Lanes that go before a request."""
        urgent_ns = lane.urgency_ns() if lane.request_count else urgency_ns(request)
        others = (other for other in self._lanes.values() if other is not lane and other.request_count)
        return sum(self._current_backlog_ns(other) for other in others if other.precedes(request, urgent_ns))

    def _current_backlog_ns(self, lane: Lane) -> float:
        """Predict the time of a Lane whose last batch gets no fuller than it is now.

        It may get fuller, which the margin covers. Assuming that the last batches of all Lanes are full would, with two
        Lanes, reject half of what can be served (docs/adr/0009).
        """
        if not lane.backlog_ns:
            return 0.0
        batches, rows = divmod(lane.rows, lane.full_batch_rows)
        last_ns = (self._costs.predict_ns(lane.key, rows) or 0) + self.gap_ns if rows or not batches else 0.0
        return batches * lane.full_batch_ns + min(last_ns, lane.full_batch_ns)

    def _is_probe_due(self, now_ns: int) -> bool:
        return now_ns >= self._last_probe_ns + PROBE_NS

    def _may_probe(self, now_ns: int) -> bool:
        if not self._is_probe_due(now_ns):
            return False
        self._last_probe_ns = now_ns
        return True


def _arrived_ns(request: InferRequest) -> int:
    """Return the time from which a target counts; one that only the request has counts from its acceptance."""
    arrived_ns: int = getattr(request, "arrived_ns", request.start_ns)
    return arrived_ns


def _is_saturated(now_ns: int, arrived_ns: int, target_ns: int) -> bool:
    """Whether a request read now may have waited so long that the loop has no time to spare.

    `target_ns` counts from arrival.
    """
    return now_ns - arrived_ns > SATURATED_SHARE * target_ns


def _likely_target_ns(target_ns: int, arrived_ns: int, read_ns: int) -> int:
    """Return the target of a request that has waited unread for half of the longest possible time.

    Used on an idle device. By the longest time, a loop whose turns take longer than the target would reject all that it
    reads, and be too busy rejecting to ever have shorter turns (docs/adr/0009).
    """
    return target_ns + (read_ns - arrived_ns) // 2


def _late_error(end_ns: float, target_ns: int, arrived_ns: int) -> InferError:
    """Make the error of a request that would be answered too late, with times in ms from its arrival."""
    predicted, target = (_ms(ns - arrived_ns) for ns in (end_ns, target_ns))
    # a gRPC deadline may have passed before the request arrived, or while the previous steps ran
    text = LATE_TEXT % (predicted, target) if target_ns > arrived_ns else PASSED_TEXT
    return InferError(Code.OVERLOADED, text, _retry_after_ns(end_ns, target_ns))


def _retry_after_ns(end_ns: float, due_ns: int) -> int:
    """Return after how long a retry is worthwhile."""
    return max(int(end_ns - due_ns), 1_000_000)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.0f}" if ns >= 100_000_000 else f"{ns / 1e6:.3g}"
