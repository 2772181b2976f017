"""The front end in virtual time: what the event loop, the GIL and the hand-overs to threads add to the simulation.

The loop is one serial station. Each of its turns delivers finished batches, wakes an Instance for what the previous
turn read, and then reads all requests that have reached the sockets by then. Threads and the loop take turns with the
GIL: a thread that wants it while the loop works gets it when the loop has nothing left to do, or once it has waited for
the switch interval. The model's run itself needs neither. Costs come from a calibration (reality.py). Lanes that the
loop runs itself (models faster than 250 us) are not modeled: all batches run on threads here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock.batching.running.batch import Batch
from penstock.batching.spec import BatchPolicy

from .arrivals import Arrivals
from .run_times import RunTimes
from .simulation import NEVER, START_NS, Result, SimulatedModel

MAX_READS_PER_TURN = 1024
"""The number of sockets that libuv polls in one turn."""
READ_FRACTION, ENCODE_FRACTION = 0.45, 0.15
"""Fractions of the loop's time for a request: receive, decode and submit; encode. The rest is for sending."""
WIRE_NS = 15_000
"""The time from a client's timestamp before sending to the server's socket being readable: a loopback system call."""
WAKE_NS = 20_000
"""The time until a sleeping thread continues, if it has not been measured."""


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """The costs to the server of a request and a batch besides the run. Units: nanoseconds.

    Of the loop: `read_ns` per request (receive, decode, submit), `encode_ns` and `write_ns` per answer, `batch_ns` per
    batch (dispatch, statistics, delivery). `wire_ns`: from sent to readable. `wake_ns`: from when a sleeping loop or
    thread has something to do until it does it. `switch_ns`: how long a thread waits for the GIL before the loop must
    yield.
    """

    read_ns: int
    encode_ns: int
    write_ns: int
    batch_ns: int
    wire_ns: int
    wake_ns: int
    switch_ns: int = 500_000

    @classmethod
    def split(cls, request_ns: float, turn_ns: float = 0.0, wake_ns: float = WAKE_NS) -> FrontCosts:
        """Split what the loop spends on a request into its parts."""
        read_ns, encode_ns = READ_FRACTION * request_ns, ENCODE_FRACTION * request_ns
        parts = read_ns, encode_ns, request_ns - read_ns - encode_ns, turn_ns, WIRE_NS, wake_ns
        return cls(*(int(ns) for ns in parts))


class _Server:
    """One process: a loop, a GIL and the threads of its Instances. An event holds what is called at its time."""

    def __init__(self, model: SimulatedModel, costs: FrontCosts) -> None:
        self._model = model
        self._costs = costs
        self._readable_ns = [at_ns + costs.wire_ns for at_ns in model.at_ns]
        self._read_count = 0
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._event_count = 0
        self._tasks: deque[tuple[int, Callable[[int], None]]] = deque()
        self._finished_batches: deque[Batch] = deque()
        self._gil_waiters: deque[tuple[int, Callable[[int], None]]] = deque()
        self._sleeping = True
        self._dispatch_pending = False
        self._idle_instances = model.instances
        self._gil_free_ns = START_NS
        self._alarm_at_ns = NEVER

    def run(self) -> None:
        """Run until there are no more events."""
        if self._readable_ns:
            self._schedule(self._readable_ns[0] + self._costs.wake_ns, self._wake_loop)
        while self._events:
            now_ns, _, callback = heapq.heappop(self._events)
            callback(now_ns)

    def _schedule(self, when_ns: int, callback: Callable[[int], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (when_ns, self._event_count, callback))

    # -- the loop ----------------------------------------------------------------------------------------------

    def _wake_loop(self, now_ns: int) -> None:
        if self._sleeping:
            self._sleeping = False
            self._step(max(now_ns, self._gil_free_ns))

    def _step(self, now_ns: int) -> None:
        """Do the next step of this turn, start another turn, or sleep. A thread that has waited enough goes first."""
        if self._gil_free_ns > now_ns:  # a thread has it
            self._schedule(self._gil_free_ns, self._step)
            return
        if self._gil_waiters and self._gil_waiters[0][0] + self._costs.switch_ns <= now_ns:
            self._gil_waiters.popleft()[1](now_ns)
            self._schedule(now_ns, self._step)
            return
        if not self._tasks:
            self._begin_turn(now_ns)
        if not self._tasks:
            self._sleep(now_ns)
            return
        cost_ns, callback = self._tasks.popleft()
        self._gil_free_ns = now_ns + cost_ns
        self._schedule(self._gil_free_ns, partial(self._complete_task, callback))

    def _complete_task(self, callback: Callable[[int], None], now_ns: int) -> None:
        callback(now_ns)
        self._step(now_ns)

    def _begin_turn(self, now_ns: int) -> None:
        costs, todo = self._costs, self._tasks
        while self._finished_batches:
            batch = self._finished_batches.popleft()
            deliver = partial(self._model.record_delivered, batch)
            todo.append((costs.batch_ns // 2 + costs.encode_ns * len(batch.requests), deliver))
            todo.extend((costs.write_ns, partial(self._model.record_answered, request)) for request in batch.requests)
        if self._dispatch_pending:
            self._dispatch_pending = False
            todo.append((costs.batch_ns // 2, self._dispatch))
        last = min(self._read_count + MAX_READS_PER_TURN, len(self._readable_ns))
        while self._read_count < last and self._readable_ns[self._read_count] <= now_ns:
            todo.append((costs.read_ns, partial(self._submit, self._read_count)))
            self._read_count += 1

    def _sleep(self, now_ns: int) -> None:
        self._sleeping = True
        waiting, self._gil_waiters = self._gil_waiters, deque()
        for _, on_acquired in waiting:
            self._request_gil(on_acquired, now_ns)
        if self._read_count < len(self._readable_ns):
            self._schedule(max(self._readable_ns[self._read_count], now_ns) + self._costs.wake_ns, self._wake_loop)

    def _submit(self, number: int, now_ns: int) -> None:
        self._model.submit(number, now_ns)
        self._dispatch_pending = True

    def _dispatch(self, now_ns: int) -> None:
        self._model.expire(now_ns)
        if self._idle_instances and self._model.scheduler.request_count:
            self._idle_instances -= 1
            self._schedule(now_ns + self._costs.wake_ns, partial(self._request_gil, self._take_batch))
        elif self._model.scheduler.request_count:
            self._set_alarm(now_ns)

    def _set_alarm(self, now_ns: int) -> None:
        alarm_ns = self._model.next_alarm_ns(now_ns, idle=self._idle_instances > 0)
        if alarm_ns < min(self._alarm_at_ns, NEVER):
            self._alarm_at_ns = alarm_ns
            self._schedule(alarm_ns, self._fire_alarm)

    def _fire_alarm(self, now_ns: int) -> None:
        self._alarm_at_ns = NEVER
        self._dispatch_pending = True
        self._wake_loop(now_ns + self._costs.wake_ns)

    # -- the threads of the Instances --------------------------------------------------------------------------

    def _request_gil(self, on_acquired: Callable[[int], None], now_ns: int) -> None:
        if self._sleeping:
            on_acquired(max(now_ns, self._gil_free_ns))
        else:
            self._gil_waiters.append((now_ns, on_acquired))

    def _take_batch(self, now_ns: int) -> None:
        model = self._model
        batch = model.take(now_ns)
        if batch is None:
            self._idle_instances += 1
            if model.scheduler.request_count:
                self._set_alarm(now_ns)
            return
        if self._idle_instances and model.scheduler.request_count:
            self._dispatch(now_ns)
        on_run_ended = partial(self._request_gil, partial(self._finish_batch, batch))
        self._schedule(now_ns + model.run_ns(batch, now_ns), on_run_ended)

    def _finish_batch(self, batch: Batch, now_ns: int) -> None:
        self._model.record_run(batch, now_ns)
        self._finished_batches.append(batch)
        if self._sleeping:
            self._schedule(now_ns + self._costs.wake_ns, self._wake_loop)
        self._take_batch(now_ns)


def simulate_server(
    arrivals: Arrivals,
    policy: BatchPolicy,
    run_times: RunTimes,
    costs: FrontCosts,
    *,
    instances: int = 1,
    seed: int = 0,
) -> Result:
    """Run arrivals through a server with a front end, until every request has ended.

    Latencies are measured from sending a request to writing its answer.
    """
    model = SimulatedModel(arrivals, policy, run_times, instances, seed)
    _Server(model, costs).run()
    return model.result(0.0)
