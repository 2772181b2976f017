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
from .runtimes import RunTimes
from .simulation import NEVER, START_NS, Result, World

READ_AT_ONCE = 1024
"""The number of sockets that libuv polls in one turn."""
READ, ENCODE = 0.45, 0.15
"""Fractions of the loop's time for a request: receive, decode and submit; encode. The rest is for sending."""
WIRE_NS = 15_000
"""The time from a client's timestamp before sending to the server's socket being readable: a loopback system call."""
WAKE_NS = 20_000
"""The time until a sleeping thread continues, if it has not been measured."""


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """The costs to the server of a request and a batch besides the run. Units: nanoseconds.

    Of the loop: `read_ns` per request (receive, decode, submit), `encode_ns` and `write_ns` per answer, `turn_ns` per
    batch (dispatch, statistics, delivery). `wire_ns`: from sent to readable. `wake_ns`: from when a sleeping loop or
    thread has something to do until it does it. `switch_ns`: how long a thread waits for the GIL before the loop must
    yield.
    """

    read_ns: int
    encode_ns: int
    write_ns: int
    turn_ns: int
    wire_ns: int
    wake_ns: int
    switch_ns: int = 500_000

    @classmethod
    def of(cls, request_ns: float, turn_ns: float = 0.0, wake_ns: float = WAKE_NS) -> FrontCosts:
        """Split what the loop spends on a request into its parts."""
        read_ns, encode_ns = READ * request_ns, ENCODE * request_ns
        parts = read_ns, encode_ns, request_ns - read_ns - encode_ns, turn_ns, WIRE_NS, wake_ns
        return cls(*(int(ns) for ns in parts))


class _Server:
    """One process: a loop, a GIL and the threads of its Instances. An event holds what is called at its time."""

    def __init__(self, world: World, costs: FrontCosts) -> None:
        self._world = world
        self._costs = costs
        self._readable_ns = [at + costs.wire_ns for at in world.at_ns]
        self._read = 0
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._made = 0
        self._todo: deque[tuple[int, Callable[[int], None]]] = deque()
        self._finished: deque[Batch] = deque()
        self._waiting: deque[tuple[int, Callable[[int], None]]] = deque()
        self._asleep = True
        self._dirty = False
        self._idle = world.instances
        self._gil_ns = START_NS
        self._alarm_at_ns = NEVER

    def run(self) -> None:
        """Run until there are no more events."""
        if self._readable_ns:
            self._at(self._readable_ns[0] + self._costs.wake_ns, self._wake_loop)
        while self._events:
            now_ns, _, call = heapq.heappop(self._events)
            call(now_ns)

    def _at(self, when_ns: int, call: Callable[[int], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (when_ns, self._made, call))

    # -- the loop ----------------------------------------------------------------------------------------------

    def _wake_loop(self, now_ns: int) -> None:
        if self._asleep:
            self._asleep = False
            self._step(max(now_ns, self._gil_ns))

    def _step(self, now_ns: int) -> None:
        """Do the next step of this turn, start another turn, or sleep. A thread that has waited enough goes first."""
        if self._gil_ns > now_ns:  # a thread has it
            self._at(self._gil_ns, self._step)
            return
        if self._waiting and self._waiting[0][0] + self._costs.switch_ns <= now_ns:
            self._waiting.popleft()[1](now_ns)
            self._at(now_ns, self._step)
            return
        if not self._todo:
            self._turn(now_ns)
        if not self._todo:
            self._sleep(now_ns)
            return
        takes_ns, call = self._todo.popleft()
        self._gil_ns = now_ns + takes_ns
        self._at(self._gil_ns, partial(self._done, call))

    def _done(self, call: Callable[[int], None], now_ns: int) -> None:
        call(now_ns)
        self._step(now_ns)

    def _turn(self, now_ns: int) -> None:
        costs, todo = self._costs, self._todo
        while self._finished:
            batch = self._finished.popleft()
            encoded = partial(self._world.delivered, batch)
            todo.append((costs.turn_ns // 2 + costs.encode_ns * len(batch.requests), encoded))
            todo.extend((costs.write_ns, partial(self._world.answer, request)) for request in batch.requests)
        if self._dirty:
            self._dirty = False
            todo.append((costs.turn_ns // 2, self._dispatch))
        last = min(self._read + READ_AT_ONCE, len(self._readable_ns))
        while self._read < last and self._readable_ns[self._read] <= now_ns:
            todo.append((costs.read_ns, partial(self._submit, self._read)))
            self._read += 1

    def _sleep(self, now_ns: int) -> None:
        self._asleep = True
        waiting, self._waiting = self._waiting, deque()
        for _, got in waiting:
            self._want_gil(got, now_ns)
        if self._read < len(self._readable_ns):
            self._at(max(self._readable_ns[self._read], now_ns) + self._costs.wake_ns, self._wake_loop)

    def _submit(self, number: int, now_ns: int) -> None:
        self._world.submit(number, now_ns)
        self._dirty = True

    def _dispatch(self, now_ns: int) -> None:
        self._world.expire(now_ns)
        if self._idle and self._world.scheduler.request_count:
            self._idle -= 1
            self._at(now_ns + self._costs.wake_ns, partial(self._want_gil, self._take))
        elif self._world.scheduler.request_count:
            self._set_alarm(now_ns)

    def _set_alarm(self, now_ns: int) -> None:
        alarm_ns = self._world.alarm_ns(now_ns, idle=self._idle > 0)
        if alarm_ns < min(self._alarm_at_ns, NEVER):
            self._alarm_at_ns = alarm_ns
            self._at(alarm_ns, self._ring)

    def _ring(self, now_ns: int) -> None:
        self._alarm_at_ns = NEVER
        self._dirty = True
        self._wake_loop(now_ns + self._costs.wake_ns)

    # -- the threads of the Instances --------------------------------------------------------------------------

    def _want_gil(self, got: Callable[[int], None], now_ns: int) -> None:
        if self._asleep:
            got(max(now_ns, self._gil_ns))
        else:
            self._waiting.append((now_ns, got))

    def _take(self, now_ns: int) -> None:
        world = self._world
        batch = world.take(now_ns)
        if batch is None:
            self._idle += 1
            if world.scheduler.request_count:
                self._set_alarm(now_ns)
            return
        if self._idle and world.scheduler.request_count:
            self._dispatch(now_ns)
        ended = partial(self._want_gil, partial(self._finish, batch))
        self._at(now_ns + world.run_ns(batch, now_ns), ended)

    def _finish(self, batch: Batch, now_ns: int) -> None:
        self._world.learn(batch, now_ns)
        self._finished.append(batch)
        if self._asleep:
            self._at(now_ns + self._costs.wake_ns, self._wake_loop)
        self._take(now_ns)


def simulate_server(
    arrivals: Arrivals, policy: BatchPolicy, truth: RunTimes, costs: FrontCosts, *, instances: int = 1, seed: int = 0
) -> Result:
    """Run arrivals through a server with a front end, until every request has ended.

    Latencies are measured from sending a request to writing its answer.
    """
    world = World(arrivals, policy, truth, instances, seed)
    _Server(world, costs).run()
    return world.result(0.0)
