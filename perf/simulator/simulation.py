"""Simulation: a server's actual Scheduler, Lane and CostModel under a virtual clock. No server, thread or sleep.

Requests are real InferRequests without tensors. A device is a RunTimes (run_times.py): the truth, which the CostModel
has to learn. The front end is not modeled here: a request is submitted as it arrives and answered as its batch ends
(front_end.py adds the cost of decoding, loop turns and threads). About 5 us of CPU per simulated request.

    from penstock.batching.spec import BatchPolicy
    from penstock.perf.simulator.arrivals import SHAPELESS, Kind, poisson
    from penstock.perf.simulator.run_times import linear
    from penstock.perf.simulator.simulation import REFUSED, simulate

    truth = linear(500_000, 50_000, noise=0.1)             # 0.5 ms a batch and 0.05 ms a row
    _, knee_per_s = truth.best(SHAPELESS, 64)              # its capacity in rows/s
    load = poisson(0.8 * knee_per_s, 10, [Kind(target_ns=20_000_000)], seed=1)
    result = simulate(load, BatchPolicy(max_batch_rows=64, latency_target_us=20_000), truth, seed=1)
    print(result.quantile_ms(0.5, 0.99), result.goodput_per_s(20_000_000), result.count(REFUSED), result.rows_per_batch)

A Kind's `target_ns` and `deadline_ns`, and the policy's target, are set on requests as the Engine does. The Scheduler
is called as Model, Engine and Dispatcher call it: late_error, add, take, due_ns, nearest_deadline_ns, record_ended,
learn, record_delivered. If it keeps requests although an Instance is idle and names no time to be called again, that is
an error.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.loading.warmup import RUNS_PER_SIZE
from penstock.batching.request import InferRequest, Sink
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy

from .arrivals import Arrivals, Ints
from .run_times import RunTimes

if TYPE_CHECKING:
    from penstock.batching.model import Model

SERVED, REFUSED, EXPIRED = 1, 2, 3
"""How a request has ended; 0: it has not."""
NEVER = 1 << 62
START_NS = 1_000_000_000
"""The virtual clock does not start at 0, which means "none" to the Scheduler."""
_NO_MODEL = cast("Model", None)
_NO_SINK = cast(Sink, None)


@dataclass(frozen=True, slots=True)
class Result:
    """The results of every request, in order of arrival, and of every batch.

    Units: nanoseconds from the start of the arrivals; `start_ns` (taken for a batch) and `end_ns` are -1 for a request
    that never got so far. `mean_queue_length`: requests in the queue, averaged over time. `cost_model`: the CostModel.
    """

    arrivals: Arrivals
    outcomes: Ints
    start_ns: Ints
    end_ns: Ints
    batch_rows: Ints
    batch_ns: Ints
    instances: int
    mean_queue_length: float
    cost_model: CostModel

    def count(self, outcome: int) -> int:
        """Count the requests that ended this way."""
        return int((self.outcomes == outcome).sum())

    @property
    def latency_ns(self) -> Ints:
        """From scheduled arrival to answer, for those served."""
        served = self.outcomes == SERVED
        latency: Ints = self.end_ns[served] - self.arrivals.at_ns[served]
        return latency

    def quantile_ms(self, *quantiles: float) -> list[float]:
        """Return quantiles of the latency; infinite if nothing was served."""
        latency = self.latency_ns
        return (np.quantile(latency, quantiles) / 1e6).tolist() if len(latency) else [np.inf] * len(quantiles)

    @property
    def span_s(self) -> float:
        """From the start to the last answer, or to the end of the arrivals."""
        return max(float(self.end_ns.max(initial=0)) / 1e9, self.arrivals.seconds)

    def goodput_per_s(self, within_ns: float = NEVER) -> float:
        """Return the rows served within `within_ns` of their arrival, per second."""
        in_time = (self.outcomes == SERVED) & (self.end_ns - self.arrivals.at_ns <= within_ns)
        return float(self.arrivals.rows[in_time].sum()) / self.span_s

    @property
    def rows_per_batch(self) -> float:
        return float(self.batch_rows.mean()) if len(self.batch_rows) else 0.0

    @property
    def utilization(self) -> float:
        """The fraction of time that an Instance ran."""
        return float(self.batch_ns.sum()) / 1e9 / self.span_s / self.instances


class SimulatedModel:
    """One model in virtual time: its Scheduler, the truth about its device, and the results of its requests.

    The methods are what the server does with requests and batches; the simulation decides when they are called
    (`simulate` here, the front end in front_end.py). Units: times are of the virtual clock.
    """

    def __init__(self, arrivals: Arrivals, policy: BatchPolicy, run_times: RunTimes, instances: int, seed: int) -> None:
        self.arrivals = arrivals
        self.instances = instances
        self.at_ns: list[int] = (arrivals.at_ns + START_NS).tolist()
        self._cost_model = CostModel(policy.allowed_rows)
        self.scheduler = Scheduler(policy, self._cost_model, instances=instances)
        self._allowed_rows = sorted(policy.allowed_rows)
        self._draw_ns = run_times.sampler(seed)
        self._kinds = [arrivals.kinds[kind_index] for kind_index in arrivals.kind_indexes.tolist()]
        self.outcomes = [0] * len(arrivals)
        self._start_ns = [-1] * len(arrivals)
        self._end_ns = [-1] * len(arrivals)
        self._batches: list[tuple[int, int]] = []
        if len({kind.key for kind in arrivals.kinds}) == 1:
            self._warm_up(policy, run_times)

    def _warm_up(self, policy: BatchPolicy, run_times: RunTimes) -> None:
        """Teach run times as the sweep does before a model is ready. With several shapes, the sweep would know none."""
        key, max_rows = self.arrivals.kinds[0].key, policy.max_batch_rows or 1
        for rows in self._allowed_rows or [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]:
            for _ in range(RUNS_PER_SIZE - 1):
                self.scheduler.learn(key, rows, self._draw_ns(key, rows, 0), START_NS)

    def padded_rows(self, rows: int) -> int:
        """Return the size at which a batch of `rows` rows runs."""
        return next((size for size in self._allowed_rows if size >= rows), rows)

    def submit(self, number: int, now_ns: int) -> None:
        """Submit one of the arrivals."""
        kind, scheduler = self._kinds[number], self.scheduler
        if scheduler.target_ns and scheduler.late_error(now_ns, now_ns):
            self._record_outcome(number, REFUSED, now_ns)
            return
        request = InferRequest(_NO_MODEL, [], kind.rows, kind.key, (), _NO_SINK)
        request.context = number
        request.start_ns = request.enqueued_ns = now_ns
        if kind.target_ns:
            request.target_ns = now_ns + kind.target_ns
        if scheduler.target_ns and not 0 < kind.target_ns < scheduler.target_ns:
            request.target_ns = now_ns + scheduler.target_ns
        if kind.deadline_ns:
            request.deadline_ns = now_ns + kind.deadline_ns
        try:
            scheduler.add(request)
        except InferError as error:
            self._record_outcome(number, EXPIRED if error.code is Code.EXPIRED else REFUSED, now_ns)

    def take(self, now_ns: int) -> Batch | None:
        """Take a Batch for an idle Instance."""
        batch = self.scheduler.take(now_ns)
        if self.scheduler.expired:
            expired, self.scheduler.expired = self.scheduler.expired, []
            for request in expired:
                self._record_outcome(request.context, EXPIRED, now_ns)
        if batch is not None:
            for request in batch.requests:
                self._start_ns[request.context] = now_ns
        return batch

    def run_ns(self, batch: Batch, now_ns: int) -> int:
        """Draw the run time of a Batch."""
        return self._draw_ns(batch.key, self.padded_rows(batch.rows), now_ns)

    def record_run(self, batch: Batch, now_ns: int) -> None:
        """Report to the Scheduler that a Batch has ended."""
        ns = now_ns - batch.exec_start_ns
        self._batches.append((batch.rows, ns))
        self.scheduler.record_ended(batch, now_ns)
        self.scheduler.learn(batch.key, batch.rows, ns, now_ns)

    def record_answered(self, request: InferRequest, now_ns: int) -> None:
        """Record that a request is answered."""
        self._record_outcome(request.context, SERVED, now_ns)

    def record_delivered(self, batch: Batch, now_ns: int) -> None:
        """Report to the Scheduler that all of a Batch is answered."""
        if batch.requests[0].target_ns:
            self.scheduler.record_delivered(batch.requests[0], now_ns)

    def _record_outcome(self, number: int, outcome: int, now_ns: int) -> None:
        if self.outcomes[number]:
            raise RuntimeError(f"request {number} ends twice")
        self.outcomes[number] = outcome
        self._end_ns[number] = now_ns

    def next_alarm_ns(self, now_ns: int, *, idle: bool) -> int:
        """Return when the Scheduler must be called again if nothing happens before; NEVER if it need not be."""
        nearest_ns = self.scheduler.nearest_deadline_ns() or NEVER
        due_ns = self.scheduler.due_ns(now_ns) if idle else 0
        return max(min(nearest_ns, due_ns or NEVER), now_ns + 1)

    def expire(self, now_ns: int) -> None:
        """Remove requests whose deadline has passed, as the alarm does."""
        nearest_ns = self.scheduler.nearest_deadline_ns()
        if nearest_ns and nearest_ns <= now_ns:
            for request in self.scheduler.expire(now_ns):
                self._record_outcome(request.context, EXPIRED, now_ns)

    def result(self, mean_queue_length: float) -> Result:
        """Summarize. Raises: RuntimeError if a request has not ended."""
        if unfinished := self.outcomes.count(0):
            raise RuntimeError(
                f"{unfinished} requests never end: the scheduler keeps them and names no time to ask again"
            )
        batches = np.array(self._batches, np.int64).reshape(-1, 2)
        start_ns, end_ns = (np.array(times, np.int64) for times in (self._start_ns, self._end_ns))
        return Result(
            self.arrivals, np.array(self.outcomes, np.int64), _since(start_ns), _since(end_ns), batches[:, 0],
            batches[:, 1], self.instances, mean_queue_length, self._cost_model,
        )  # fmt: skip


def _since(times_ns: Ints) -> Ints:
    return np.where(times_ns < 0, -1, times_ns - START_NS)


def simulate(
    arrivals: Arrivals, policy: BatchPolicy, run_times: RunTimes, *, instances: int = 1, seed: int = 0
) -> Result:
    """Run arrivals through a Scheduler with Instances on identical devices, until every request has ended."""
    model = SimulatedModel(arrivals, policy, run_times, instances, seed)
    scheduler, at_ns = model.scheduler, model.at_ns
    running: list[tuple[int, int, Batch]] = []
    count, next_arrival, batch_number, idle = len(at_ns), 0, 0, instances
    previous_ns, alarm_ns, queue_time_ns = START_NS, NEVER, 0
    while next_arrival < count or running or scheduler.request_count:
        now_ns = min(
            at_ns[next_arrival] if next_arrival < count else NEVER, running[0][0] if running else NEVER, alarm_ns
        )
        if now_ns == NEVER:
            break
        queue_time_ns += scheduler.request_count * (now_ns - previous_ns)
        previous_ns = now_ns
        model.expire(now_ns)
        while running and running[0][0] <= now_ns:
            _, _, batch = heapq.heappop(running)
            model.record_run(batch, now_ns)
            for request in batch.requests:
                model.record_answered(request, now_ns)
            model.record_delivered(batch, now_ns)
            idle += 1
        while next_arrival < count and at_ns[next_arrival] <= now_ns:
            model.submit(next_arrival, now_ns)
            next_arrival += 1
        while idle and scheduler.request_count:
            batch_taken = model.take(now_ns)
            if batch_taken is None:
                break
            batch_number += 1
            heapq.heappush(running, (now_ns + model.run_ns(batch_taken, now_ns), batch_number, batch_taken))
            idle -= 1
        alarm_ns = model.next_alarm_ns(now_ns, idle=idle > 0) if scheduler.request_count else NEVER
    return model.result(queue_time_ns / max(previous_ns - START_NS, 1))
