"""LockStep: closed-loop clients, and the two ways in which they can form batches.

By halves: while one half runs, the front end answers the other. Together: everything in flight goes in one batch, and
the device idles until all clients have sent their next request. A batch of all often takes far less than two halves:
where weights are read from memory, or on a device that few rows do not fill. Queried by Sizing, fed by the Scheduler.
"""

from __future__ import annotations

from statistics import median

from penstock.batching.request import InferRequest

from .costs import CostModel
from .lane import Lane

IN_STEP = 8
"""Clients count as in lock step once the batches at which the amount in flight stayed the same, to an eighth, outnumber
twice the other batches by this many. With independent arrivals in batches of 16, it stays the same every other time."""
CYCLES = 8
"""A way is judged by the median of this many cycles; in each, everything in flight is served once."""
SETTLED = 2
"""Cycles after a change that are not counted."""
PROMISE = 1.15
"""Together is tried if a batch of all is predicted to do this many times the rows per second: waiting for the others to
return takes its share of that."""
GAIN = 1.05
"""The way on trial is kept only if it does this many times the rows per second of the other: less is often luck."""
BUSY = 1.25
"""By halves, a cycle takes at most this many times its runs if the device is the bottleneck. If it is not, clients take
their time, and waiting for them gains nothing."""
SPARED = 20
"""If requests have a target or a deadline, no batch waits longer than one part in this many of the least time that any
request had left on arrival."""
FORGET_NS = 10_000_000_000
"""That least time is forgotten after this long, when a trial is considered. If such a request comes again, all waiting
ends before it has lost anything."""
FIRST_PAUSE, MOST_PAUSE = 32, 4096
"""Cycles after which the other way is tried again: soon after a change, which luck may have caused, since shared
machines can double their speed from one moment to the next; twice as many after each trial in vain."""


class LockStep:
    """Chooses the way by measured throughput, and says until when to wait for the others.

    `together` is tried if the learned run times predict a gain, and kept if it measured better. It waits until
    everything that was in flight when the last batch ended is back, but after that end no longer than a batch by halves
    takes: beyond that it does not pay. Whichever is kept, the other way is retried now and then.
    Pure: told the time; the Scheduler's caller holds the model's lock. Applies only to a model with one Instance
    (`alone`), one Lane with waiting requests, and neither a target of its own nor configured sizes.
    """

    def __init__(self, costs: CostModel, max_rows: int) -> None:
        self._costs = costs
        self._max_rows = max_rows
        self.together = False
        self.alone = True
        self._spared_ns = 1 << 62
        self._forbidden = False
        self._spared_at_ns = 0
        self._in_flight = self._same = self._last_rows = 0
        self._all_rows = self._most_rows = self._ended_ns = self._worth_ns = 0
        self._lane: Lane | None = None
        # the current cycle, and the rows per batch and ns per row of those before it, of the current way
        self._began_ns = self._rows = self._batches = 0
        self._unsettled = SETTLED
        self._sizes: list[float] = []
        self._paces: list[float] = []
        # of the other way, when it was last used
        self._other_pace = 0.0
        self._trial = False
        self._waited = self._pause = 0

    def seen(self, waiting_rows: int) -> bool:
        """Tell, as a batch is closed, whether the amount in flight is steady.

        In flight are the waiting rows and, by halves, those of the last batch, which the front end is answering.
        """
        in_flight = waiting_rows if self.together else waiting_rows + self._last_rows
        same = _near(in_flight, self._in_flight)
        self._in_flight = in_flight
        self._same = min(self._same + 1, 2 * IN_STEP) if same else max(self._same - 2, 0)
        if self._same >= IN_STEP:
            return True
        self.leave()
        return False

    def half_rows(self) -> int:
        """Return nearly half of what is in flight."""
        return (12 * self._in_flight + 24) // 25

    def took(self, lane: Lane, rows: int, left_rows: int, now_ns: int) -> None:
        """Record a batch that was closed, and the rows it left in all Lanes."""
        self._last_rows = rows
        if self.together:
            # an overlapping Instance asks again before this batch has ended, and `ended` may never be called
            self._ended_ns = now_ns + int(self._costs.predict_ns(lane.key, rows) or 0)
        if lane.fast and self.together:
            self.leave()  # the loop runs it by now, and never waits
        if self._same < IN_STEP or self._forbidden or not self.alone or lane.fast:
            return
        if lane is not self._lane or (left_rows if self.together else left_rows != lane.rows):
            self._lane = lane
            self.leave()
            return
        if self._rows and (self.together or self._rows + rows // 2 >= self._most_rows):
            self._count(now_ns)
            if len(self._paces) == CYCLES:
                self._decide(lane, now_ns)
        self._rows += rows
        self._batches += 1

    def _count(self, now_ns: int) -> None:
        """Count a finished cycle."""
        if self._unsettled:
            self._unsettled -= 1
        else:
            self._paces.append((now_ns - self._began_ns) / self._rows)
            self._sizes.append(self._rows / self._batches)
        self._began_ns, self._rows, self._batches = now_ns, 0, 0

    def _decide(self, lane: Lane, now_ns: int) -> None:
        """Keep the current way or change it."""
        pace, size = median(self._paces), median(self._sizes)
        self._paces.clear()
        self._sizes.clear()
        self._waited += CYCLES
        if self._trial:
            # waiting costs latency: if both do as much, do not wait
            better = pace * GAIN <= self._other_pace if self.together else pace <= self._other_pace * GAIN
            self._tried(better=better)
            if not better:
                self._change(pace)
        elif self.together:
            if self._waited >= self._pause or pace > GAIN * self._other_pace:
                self._trial = True
                self._change(pace)
        elif self._waited >= self._pause and self._may_gain(lane, pace, max(size, 1), now_ns):
            self._trial = True
            self._change(pace)
        self._most_rows = 0

    def _tried(self, *, better: bool) -> None:
        self._pause = FIRST_PAUSE if better else min(max(2 * self._pause, FIRST_PAUSE), MOST_PAUSE)
        self._trial, self._waited = False, 0

    def _may_gain(self, lane: Lane, pace: float, size: float, now_ns: int) -> bool:
        """Whether together may be worth a trial, given the current time per row and mean batch size.

        Up to twice the largest batch that has run is assumed to cost what that one did, as in Sizing: for a Key that
        the sweep did not run, two clients that take turns only ever produce batches of one.
        """
        rows, seen_rows = self._most_rows, self._costs.seen_rows(lane.key)
        cycle_ns = pace * rows
        all_ns = self._costs.predict_ns(lane.key, min(rows, seen_rows) if rows <= 2 * seen_rows else rows) or 0.0
        # three clients form batches of one and of two: on average, two of one and a half
        less = int(size)
        less_ns, more_ns = (self._costs.predict_ns(lane.key, each) or 0.0 for each in (less, less + 1))
        run_ns = less_ns + (more_ns - less_ns) * (size - less)
        runs_ns = run_ns / size * rows
        self._worth_ns = int(run_ns)
        if now_ns > self._spared_at_ns + FORGET_NS:
            self._spared_ns = 1 << 62
        busy = cycle_ns < BUSY * runs_ns and SPARED * run_ns < self._spared_ns
        better = PROMISE * all_ns < cycle_ns and GAIN * all_ns < runs_ns
        return size < rows <= self._max_rows and busy and better

    def _change(self, pace: float) -> None:
        """Switch to the other way; `pace` is what this one achieved."""
        self._other_pace = pace
        self.together = not self.together
        self._begin()

    def _begin(self) -> None:
        self._paces.clear()
        self._sizes.clear()
        self._unsettled, self._rows, self._batches, self._most_rows = SETTLED, 0, 0, 0

    def ended(self, rows: int, waiting_rows: int, now_ns: int, *, followed: bool) -> None:
        """Record that a batch has ended and what waits then; with what is running, that is everything in flight."""
        self._ended_ns = now_ns
        self._all_rows = rows + waiting_rows + (self._last_rows if followed else 0)
        self._most_rows = max(self._most_rows, self._all_rows)

    def due_ns(self, waiting_rows: int) -> int:
        """Return until when to wait for the others; 0 for not at all."""
        all_there = waiting_rows >= min(self._all_rows, self._max_rows)
        return 0 if all_there or not self.together else self._ended_ns + self._worth_ns

    def spare(self, request: InferRequest) -> None:
        """Learn, on arrival, of a request with a deadline or a target; the earlier of the two counts."""
        target_ns, deadline_ns = request.target_ns, request.deadline_ns
        left_ns = min(target_ns or deadline_ns, deadline_ns or target_ns) - request.enqueued_ns
        if left_ns > self._spared_ns:
            return
        self._spared_ns, self._spared_at_ns = left_ns, request.enqueued_ns
        if (self.together or self._trial) and SPARED * self._worth_ns >= left_ns:
            self.leave()

    def forbid(self) -> None:
        """Stop waiting for good."""
        self._forbidden = True
        self.leave()

    def leave(self) -> None:
        """Go by halves, and start over when clients are in lock step again. A trial that ends this way was in vain."""
        if self.together and self._trial:
            self._tried(better=False)
        elif self.together or self._trial:
            self._pause = 0
        self.together = self._trial = False
        self._begin()


def _near(rows: int, others: int) -> bool:
    return 8 * abs(rows - others) <= rows
