"""LockStep: closed-loop clients, and the two modes in which they can form batches.

By halves: while one half runs, the front end answers the other. Together: everything in flight goes in one batch, and
the device idles until all clients have sent their next request. A batch of all often takes far less than two halves:
where weights are read from memory, or on a device that few rows do not fill. Queried by Sizing, fed by the Scheduler.
"""

from __future__ import annotations

from statistics import median

from penstock.batching.request import InferRequest

from .costs import CostModel
from .lane import Lane

MIN_STEADY_BATCHES = 8
"""Clients count as in lock step once the batches at which the amount in flight stayed the same, to an eighth, outnumber
twice the other batches by this many. With independent arrivals in batches of 16, it stays the same every other time."""
CYCLES_PER_DECISION = 8
"""A mode is judged by the median of this many cycles; in each, everything in flight is served once."""
SETTLING_CYCLES = 2
"""Cycles after a change that are not counted."""
MIN_PREDICTED_GAIN = 1.15
"""Together is tried if a batch of all is predicted to do this many times the rows per second: waiting for the others to
return takes its share of that."""
MIN_MEASURED_GAIN = 1.05
"""The mode on trial is kept only if it does this many times the rows per second of the other: less is often luck."""
MAX_CYCLE_RATIO = 1.25
"""By halves, a cycle takes at most this many times its runs if the device is the bottleneck. If it is not, clients take
their time, and waiting for them gains nothing."""
MIN_SLACK_RUNS = 20
"""If requests have a target or a deadline, no batch waits longer than one part in this many of the least time that any
request had left on arrival."""
SLACK_TTL_NS = 10_000_000_000
"""That least time is forgotten after this long, when a trial is considered. If such a request comes again, all waiting
ends before it has lost anything."""
MIN_PAUSE_CYCLES, MAX_PAUSE_CYCLES = 32, 4096
"""Cycles after which the other mode is tried again: soon after a change, which luck may have caused, since shared
machines can double their speed from one moment to the next; twice as many after each trial in vain."""


class LockStep:
    """Chooses the mode by measured throughput, and says until when to wait for the others.

    `together` is tried if the learned run times predict a gain, and kept if it measured better. It waits until
    everything that was in flight when the last batch ended is back, but after that end no longer than a batch by halves
    takes: beyond that it does not pay. Whichever is kept, the other mode is retried now and then.
    Pure: told the time; the Scheduler's caller holds the model's lock. Applies only to a model with one Instance
    (`single_instance`), one Lane with waiting requests, and neither a target of its own nor configured sizes.
    """

    def __init__(self, costs: CostModel, max_rows: int) -> None:
        self._costs = costs
        self._max_rows = max_rows
        self.together = False
        self.single_instance = True
        self._min_slack_ns = 1 << 62
        self._disabled = False
        self._min_slack_seen_ns = 0
        self._steady_rows = self._steady_score = self._last_rows = 0
        self._in_flight_rows = self._max_in_flight_rows = self._last_ended_ns = self._max_wait_ns = 0
        self._lane: Lane | None = None
        # the current cycle, and the rows per batch and ns per row of those before it, of the current mode
        self._cycle_began_ns = self._cycle_rows = self._cycle_batches = 0
        self._settling_cycles = SETTLING_CYCLES
        self._rows_per_batch: list[float] = []
        self._ns_per_row: list[float] = []
        # of the other mode, when it was last used
        self._other_ns_per_row = 0.0
        self._in_trial = False
        self._cycles_since_trial = self._pause_cycles = 0

    def check_steady(self, waiting_rows: int) -> bool:
        """Tell, as a batch is closed, whether the amount in flight is steady.

        In flight are the waiting rows and, by halves, those of the last batch, which the front end is answering.
        """
        in_flight_rows = waiting_rows if self.together else waiting_rows + self._last_rows
        is_same = _is_near(in_flight_rows, self._steady_rows)
        self._steady_rows = in_flight_rows
        self._steady_score = (
            min(self._steady_score + 1, 2 * MIN_STEADY_BATCHES) if is_same else max(self._steady_score - 2, 0)
        )
        if self._steady_score >= MIN_STEADY_BATCHES:
            return True
        self.reset()
        return False

    def half_rows(self) -> int:
        """Return nearly half of what is in flight."""
        return (12 * self._steady_rows + 24) // 25

    def record_taken(self, lane: Lane, rows: int, remaining_rows: int, now_ns: int) -> None:
        """Record a batch that was closed, and the rows it left in all Lanes."""
        self._last_rows = rows
        if self.together:
            # an overlapping Instance asks again before this batch has ended, and `record_ended` may never be called
            self._last_ended_ns = now_ns + int(self._costs.predict_ns(lane.key, rows) or 0)
        if lane.fast and self.together:
            self.reset()  # the loop runs it by now, and never waits
        if self._steady_score < MIN_STEADY_BATCHES or self._disabled or not self.single_instance or lane.fast:
            return
        if lane is not self._lane or (remaining_rows if self.together else remaining_rows != lane.rows):
            self._lane = lane
            self.reset()
            return
        if self._cycle_rows and (self.together or self._cycle_rows + rows // 2 >= self._max_in_flight_rows):
            self._count_cycle(now_ns)
            if len(self._ns_per_row) == CYCLES_PER_DECISION:
                self._choose_mode(lane, now_ns)
        self._cycle_rows += rows
        self._cycle_batches += 1

    def _count_cycle(self, now_ns: int) -> None:
        """Count a finished cycle."""
        if self._settling_cycles:
            self._settling_cycles -= 1
        else:
            self._ns_per_row.append((now_ns - self._cycle_began_ns) / self._cycle_rows)
            self._rows_per_batch.append(self._cycle_rows / self._cycle_batches)
        self._cycle_began_ns, self._cycle_rows, self._cycle_batches = now_ns, 0, 0

    def _choose_mode(self, lane: Lane, now_ns: int) -> None:
        """Keep the current mode or change it."""
        ns_per_row, rows_per_batch = median(self._ns_per_row), median(self._rows_per_batch)
        self._ns_per_row.clear()
        self._rows_per_batch.clear()
        self._cycles_since_trial += CYCLES_PER_DECISION
        if self._in_trial:
            # waiting costs latency: if both do as much, do not wait
            is_better = (
                ns_per_row * MIN_MEASURED_GAIN <= self._other_ns_per_row
                if self.together
                else ns_per_row <= self._other_ns_per_row * MIN_MEASURED_GAIN
            )
            self._end_trial(is_better=is_better)
            if not is_better:
                self._switch_mode(ns_per_row)
        elif self.together:
            if (
                self._cycles_since_trial >= self._pause_cycles
                or ns_per_row > MIN_MEASURED_GAIN * self._other_ns_per_row
            ):
                self._in_trial = True
                self._switch_mode(ns_per_row)
        elif self._cycles_since_trial >= self._pause_cycles and self._is_worth_trial(
            lane, ns_per_row, max(rows_per_batch, 1), now_ns
        ):
            self._in_trial = True
            self._switch_mode(ns_per_row)
        self._max_in_flight_rows = 0

    def _end_trial(self, *, is_better: bool) -> None:
        self._pause_cycles = (
            MIN_PAUSE_CYCLES if is_better else min(max(2 * self._pause_cycles, MIN_PAUSE_CYCLES), MAX_PAUSE_CYCLES)
        )
        self._in_trial, self._cycles_since_trial = False, 0

    def _is_worth_trial(self, lane: Lane, ns_per_row: float, rows_per_batch: float, now_ns: int) -> bool:
        """Whether together may be worth a trial, given the current time per row and mean batch size.

        Up to twice the largest batch that has run is assumed to cost what that one did, as in Sizing: for a Key that
        the sweep did not run, two clients that take turns only ever produce batches of one.
        """
        rows, seen_rows = self._max_in_flight_rows, self._costs.max_seen_rows(lane.key)
        cycle_ns = ns_per_row * rows
        all_ns = self._costs.predict_ns(lane.key, min(rows, seen_rows) if rows <= 2 * seen_rows else rows) or 0.0
        # three clients form batches of one and of two: on average, two of one and a half
        floor_rows = int(rows_per_batch)
        floor_ns, ceil_ns = (self._costs.predict_ns(lane.key, each) or 0.0 for each in (floor_rows, floor_rows + 1))
        run_ns = floor_ns + (ceil_ns - floor_ns) * (rows_per_batch - floor_rows)
        runs_ns = run_ns / rows_per_batch * rows
        self._max_wait_ns = int(run_ns)
        if now_ns > self._min_slack_seen_ns + SLACK_TTL_NS:
            self._min_slack_ns = 1 << 62
        is_busy = cycle_ns < MAX_CYCLE_RATIO * runs_ns and MIN_SLACK_RUNS * run_ns < self._min_slack_ns
        is_better = MIN_PREDICTED_GAIN * all_ns < cycle_ns and MIN_MEASURED_GAIN * all_ns < runs_ns
        return rows_per_batch < rows <= self._max_rows and is_busy and is_better

    def _switch_mode(self, ns_per_row: float) -> None:
        """Switch to the other mode; `ns_per_row` is what this one achieved."""
        self._other_ns_per_row = ns_per_row
        self.together = not self.together
        self._restart_measurement()

    def _restart_measurement(self) -> None:
        self._ns_per_row.clear()
        self._rows_per_batch.clear()
        self._settling_cycles, self._cycle_rows, self._cycle_batches, self._max_in_flight_rows = (
            SETTLING_CYCLES,
            0,
            0,
            0,
        )

    def record_ended(self, rows: int, waiting_rows: int, now_ns: int, *, next_running: bool) -> None:
        """Record that a batch has ended and what waits then; with what is running, that is everything in flight."""
        self._last_ended_ns = now_ns
        self._in_flight_rows = rows + waiting_rows + (self._last_rows if next_running else 0)
        self._max_in_flight_rows = max(self._max_in_flight_rows, self._in_flight_rows)

    def due_ns(self, waiting_rows: int) -> int:
        """Return until when to wait for the others; 0 for not at all."""
        all_waiting = waiting_rows >= min(self._in_flight_rows, self._max_rows)
        return 0 if all_waiting or not self.together else self._last_ended_ns + self._max_wait_ns

    def record_slack(self, request: InferRequest) -> None:
        """Learn, on arrival, of a request with a deadline or a target; the earlier of the two counts."""
        target_ns, deadline_ns = request.target_ns, request.deadline_ns
        slack_ns = min(target_ns or deadline_ns, deadline_ns or target_ns) - request.enqueued_ns
        if slack_ns > self._min_slack_ns:
            return
        self._min_slack_ns, self._min_slack_seen_ns = slack_ns, request.enqueued_ns
        if (self.together or self._in_trial) and MIN_SLACK_RUNS * self._max_wait_ns >= slack_ns:
            self.reset()

    def disable(self) -> None:
        """Stop waiting for good."""
        self._disabled = True
        self.reset()

    def reset(self) -> None:
        """Go by halves, and start over when clients are in lock step again. A trial that ends this way was in vain."""
        if self.together and self._in_trial:
            self._end_trial(is_better=False)
        elif self.together or self._in_trial:
            self._pause_cycles = 0
        self.together = self._in_trial = False
        self._restart_measurement()


def _is_near(rows: int, reference: int) -> bool:
    return 8 * abs(rows - reference) <= rows
