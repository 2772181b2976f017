"""Closed-loop clients in two alternating batches, or all in one batch, whichever has the higher throughput."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.scheduling.costs import CostModel
from penstock.batching.scheduling.scheduler import Scheduler
from penstock.batching.spec import BatchPolicy

MS = 1_000_000
START_NS = 1_000 * MS
KEY: Any = ((4,),)
OTHER: Any = ((5,),)
RunNs = Callable[[int], float]


def from_memory(rows: int) -> float:
    """Measured run time of a memory-bound model: 32 rows take hardly more than 16."""
    return (2.4 + 0.065 * rows) * MS


def even(rows: int) -> float:
    """Run time of a model in proportion to its rows."""
    return (0.2 + 0.2 * rows) * MS


@dataclass
class World:
    """Clients, one Instance, and a front end that answers and reads one request after another, in virtual time.

    `think_ns`: the time before a client sends its next request. `time_attribute`: which time of each request is set,
    10 s away. `swept`: the sizes that ran before the first client arrived. `batches`: the rows of each.
    `held_ns`: how long the Instance was idle while requests waited, and `longest_ns` the longest of those times.
    """

    run_ns: RunNs
    clients: int
    front_ns: float = 20_000
    think_ns: Callable[[int], float] = lambda client: 0.0
    rows: int = 1
    again: bool = True
    keys: tuple[Any, ...] = (KEY,)
    policy: BatchPolicy = field(default_factory=lambda: BatchPolicy(max_batch_rows=64))
    instances: int = 1
    time_attribute: str = ""
    swept: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)

    def __post_init__(self) -> None:
        self.now_ns = START_NS
        self.batches: list[int] = []
        self.held_ns = self.longest_ns = 0
        self.served = 0
        self.ends_ns = START_NS
        costs = CostModel()
        self.scheduler = Scheduler(self.policy, costs, instances=self.instances)
        for key in self.keys:
            for rows in self.swept:
                for _ in range(3):
                    self.scheduler.learn(key, rows, int(self.run_ns(rows)), START_NS)
        self._events: list[tuple[float, int, Any]] = [(START_NS + i, i, i) for i in range(self.clients)]
        self._number = self.clients
        self._running: Batch | None = None
        self._front_free_ns = self._idle_ns = 0.0
        self._leaving: set[int] = set()

    def request(self, client: int) -> InferRequest:
        """Make a client's next request."""
        key = self.keys[self._number % len(self.keys)]
        request = InferRequest(cast(Any, None), [], self.rows, key, (), cast(Any, None))
        request.context, request.enqueued_ns = client, int(self.now_ns)
        if self.time_attribute:
            setattr(request, self.time_attribute, request.enqueued_ns + 10_000 * MS)
        return request

    def leave(self, clients: int) -> None:
        """Have a number of clients send no further requests."""
        self._leaving = set(range(clients))

    def go_on(self, ms: float) -> float:
        """Let time pass. Returns: the requests answered per second."""
        until_ns, before = self.now_ns + ms * MS, self.served
        while self._events and self._events[0][0] <= until_ns:
            at_ns, _, what = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, int(at_ns))
            self._happen(what)
            self._look()
        self.now_ns = int(until_ns)
        return (self.served - before) / ms * 1000

    def _happen(self, what: Any) -> None:
        if isinstance(what, Batch):
            self.scheduler.record_ended(what, self.now_ns)
            self.scheduler.learn(what.key, what.rows, self.now_ns - what.exec_start_ns, self.now_ns)
            self._running, self._idle_ns = None, self.now_ns
            for request in what.requests:
                self._answer(request.context)
        elif what is not None and what not in self._leaving:
            self.scheduler.add(self.request(what))

    def _answer(self, client: int) -> None:
        self.served += 1
        if not self.again:
            return
        self._front_free_ns = max(self._front_free_ns, self.now_ns) + self.front_ns
        self.come(self._front_free_ns + self.think_ns(client), client)

    def come(self, at_ns: float, what: Any) -> None:
        """Schedule a client's request, the end of a Batch, or, for None, only a look at the queue."""
        self._number += 1
        heapq.heappush(self._events, (at_ns, self._number, what))

    def _look(self) -> None:
        if self._running is not None:
            return
        batch = self.scheduler.take(self.now_ns)
        if batch is None:
            if self.scheduler.request_count:
                due_ns = self.scheduler.due_ns(self.now_ns)
                assert due_ns > self.now_ns
                self.come(due_ns, None)
            return
        held_ns = self.now_ns - max(int(self._idle_ns), min(request.enqueued_ns for request in batch.requests))
        self.held_ns += held_ns
        self.longest_ns = max(self.longest_ns, held_ns)
        self._running = batch
        self.batches.append(batch.rows)
        self.come(self.now_ns + self.run_ns(batch.rows), batch)


def by_halves(world: World) -> World:
    """Make the same World without waiting for clients."""
    world.scheduler.sizing.lockstep.disable()
    return world


@pytest.mark.parametrize("clients", [2, 3, 4, 5, 7, 16, 32, 64])
def test_clients_in_lock_step_share_a_batch_if_doubling_it_hardly_takes_longer(clients: int) -> None:
    world = World(from_memory, clients)
    world.go_on(1000)
    together = world.go_on(1000)
    assert world.batches[-1] == clients
    assert together > 1.1 * by_halves(World(from_memory, clients)).go_on(1000)


@pytest.mark.parametrize("clients", [2, 3])
def test_a_few_clients_share_one_batch_even_if_no_batch_of_that_size_has_run(clients: int) -> None:
    world = World(from_memory, clients, swept=())
    world.go_on(1000)
    assert world.batches[-1] == clients


def test_no_client_is_waited_for_if_twice_the_rows_take_twice_as_long() -> None:
    world = World(even, 32)
    world.go_on(2000)
    assert world.held_ns == 0


def test_a_shared_batch_is_abandoned_if_the_front_end_takes_longer_than_the_batch_saves() -> None:
    world, halved_world = World(from_memory, 32, front_ns=90_000), by_halves(World(from_memory, 32, front_ns=90_000))
    world.go_on(1000)
    assert world.go_on(4000) > 0.97 * halved_world.go_on(4000)
    world.held_ns = 0
    world.go_on(10_000)
    assert world.held_ns < 200 * MS


def test_a_client_that_does_not_return_is_waited_for_only_once() -> None:
    world = World(from_memory, 32)
    world.go_on(1000)
    world.leave(4)
    world.held_ns = world.longest_ns = 0
    world.go_on(20)
    assert world.batches[-1] == 28
    assert world.longest_ns <= from_memory(16)


def test_clients_share_one_batch_again_after_their_number_doubles() -> None:
    world = World(from_memory, 16)
    world.go_on(1000)
    for client in range(16, 32):
        world.come(world.now_ns, client)
    world.go_on(500)
    assert world.batches[-1] == 32


def test_clients_with_two_shapes_are_waited_for_at_most_once() -> None:
    world = World(from_memory, 32, keys=(KEY, OTHER))
    world.go_on(1000)
    assert world.held_ns < 5 * MS


def test_no_client_is_waited_for_with_two_instances() -> None:
    world = World(from_memory, 32, instances=2)
    world.go_on(1000)
    assert world.held_ns == 0


def test_a_single_client_never_has_to_wait() -> None:
    world = World(from_memory, 1, rows=8)
    world.go_on(2000)
    assert world.held_ns == 0


def test_more_clients_than_a_batch_holds_are_not_waited_for() -> None:
    world = World(from_memory, 32, policy=BatchPolicy(max_batch_rows=16))
    world.go_on(1000)
    assert world.held_ns == 0


def test_clients_with_long_think_times_are_not_waited_for() -> None:
    world = World(from_memory, 4, think_ns=lambda client: 20.0 * MS)
    world.go_on(3000)
    assert world.held_ns == 0


@pytest.mark.parametrize("attribute", ["deadline_ns", "target_ns"])
def test_a_request_with_little_time_left_ends_all_waiting(attribute: str) -> None:
    world = World(from_memory, 16)
    world.go_on(1000)
    request = world.request(99)
    setattr(request, attribute, world.now_ns + 50 * MS)
    world.scheduler.add(request)
    world.held_ns = 0
    world.go_on(500)
    assert world.held_ns == 0


@pytest.mark.parametrize("attribute", ["deadline_ns", "target_ns"])
def test_clients_with_distant_timeouts_share_one_batch(attribute: str) -> None:
    world = World(from_memory, 16, time_attribute=attribute)
    world.go_on(1000)
    assert set(world.batches[-20:]) == {16}


def test_a_stopping_server_waits_for_no_client() -> None:
    world = World(from_memory, 16)
    world.go_on(1000)
    assert world.scheduler.sizing.may_hold
    world.scheduler.expedite(world.now_ns, end_idle=False)
    world.held_ns = 0
    world.go_on(500)
    assert world.held_ns == 0


def test_one_slow_client_does_not_make_the_others_slower_than_alternating_batches() -> None:
    def think_ns(client: int) -> float:
        return 12.0 * MS if client == 0 else 0.0

    world, halved_world = (
        World(from_memory, 32, think_ns=think_ns),
        by_halves(World(from_memory, 32, think_ns=think_ns)),
    )
    world.go_on(1000)
    halved_world.go_on(1000)
    assert world.go_on(2000) > 0.97 * halved_world.go_on(2000)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("run_ns", [from_memory, even])
def test_open_loop_requests_are_hardly_ever_delayed(run_ns: RunNs, share: float) -> None:
    luck, world = random.Random(3), World(run_ns, 0, again=False)
    at_ns, mean_ns = float(START_NS), run_ns(64) / 64 / share
    for _ in range(6000):
        at_ns += luck.expovariate(1 / mean_ns)
        world.come(at_ns, 7)
    world.go_on((at_ns - START_NS) / MS)
    assert world.held_ns < 0.01 * (at_ns - START_NS)


@settings(max_examples=12, deadline=None)
@given(
    clients=st.integers(1, 70), rows=st.integers(1, 5), front_us=st.integers(1, 200), base=st.floats(0, 5),
    slope=st.floats(0.01, 0.5), thinks=st.lists(st.integers(0, 20), min_size=1, max_size=5), keys=st.integers(1, 2),
    attribute=st.sampled_from(["", "deadline_ns", "target_ns"]),
)  # fmt: skip
def test_waiting_costs_almost_no_throughput_for_any_clients_and_each_is_answered(
    clients: int, rows: int, front_us: int, base: float, slope: float, thinks: list[int], keys: int, attribute: str
) -> None:
    def run_ns(count: int) -> float:
        return (base + slope * count) * MS

    def world() -> World:
        return World(
            run_ns, clients, front_us * 1000.0, lambda client: thinks[client % len(thinks)] * MS / 2, rows,
            keys=(KEY, OTHER)[:keys], time_attribute=attribute,
        )  # fmt: skip

    with_step, without = world(), by_halves(world())
    ours, halved_count = with_step.go_on(1500), without.go_on(1500)
    assert ours > 0.9 * halved_count - 20
    assert with_step.longest_ns <= 2.6 * run_ns(64) + clients * front_us * 1000


def test_a_client_that_arrives_during_a_shared_run_waits_for_the_others_to_return() -> None:
    world = World(from_memory, 16)
    world.go_on(1000)
    scheduler = world.scheduler
    while not (scheduler.request_count == 0 and world.batches[-1] == 16):
        world.go_on(0.1)
    scheduler.add(world.request(16))
    assert scheduler.next_lane(world.now_ns) is None
    assert world.now_ns < scheduler.due_ns(world.now_ns) < world.now_ns + 3 * from_memory(16)


@pytest.mark.parametrize("pattern", [[0], [0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]])
def test_requests_without_rows_are_taken_one_after_another_without_error(pattern: list[int]) -> None:
    world = World(from_memory, 0)
    scheduler = world.scheduler
    for number in range(400):
        request = world.request(0)
        request.rows = pattern[number % len(pattern)]
        scheduler.add(request)
        batch = scheduler.take(world.now_ns)
        assert batch is not None
        world.now_ns += int(from_memory(batch.rows))
        scheduler.record_ended(batch, world.now_ns)


def test_a_client_whose_request_would_not_fit_in_the_batch_is_not_waited_for() -> None:
    world = World(from_memory, 60)
    world.go_on(1000)
    assert world.scheduler.sizing.lockstep.together
    for client in range(100, 106):
        world.come(world.now_ns + MS / 2, client)
    world.go_on(1)
    world.leave(1)
    world.longest_ns = 0
    world.go_on(100)
    assert world.longest_ns < 64 * 20_000


def test_a_model_that_now_runs_on_the_loop_waits_for_no_client() -> None:
    world = World(from_memory, 16)
    world.go_on(1000)
    assert world.scheduler.sizing.lockstep.together
    world.scheduler.sizing.fast_ns = 1 << 62
    world.go_on(1000)
    assert not world.scheduler.sizing.lockstep.together


def test_an_unsuccessful_trial_is_not_repeated_constantly() -> None:
    def run_ns(rows: int) -> float:
        return (1.59 + 0.093 * rows) * MS

    world, halved_world = World(run_ns, 48, front_ns=187_000), by_halves(World(run_ns, 48, front_ns=187_000))
    world.go_on(4000)
    halved_world.go_on(1000)
    assert world.go_on(1000) > 0.97 * halved_world.go_on(1000)


def test_clients_in_lock_step_with_a_timeout_alternate_in_two_batches() -> None:
    world = World(even, 32, time_attribute="deadline_ns")
    world.go_on(500)
    assert set(world.batches[-20:]) == {16}


@pytest.mark.parametrize("attribute", ["deadline_ns", "target_ns"])
def test_requests_with_little_time_are_not_held_after_a_trial_of_alternating_batches(attribute: str) -> None:
    world = World(from_memory, 16)
    step = world.scheduler.sizing.lockstep
    world.go_on(1000)
    while step.together:
        world.go_on(1)
    request = world.request(99)
    request.target_ns = world.now_ns + 10_000 * MS
    setattr(request, attribute, world.now_ns + 30 * MS)
    world.scheduler.add(request)
    world.held_ns = 0
    world.go_on(500)
    assert world.held_ns == 0


def test_a_request_with_little_time_stops_preventing_shared_batches_later() -> None:
    world = World(from_memory, 16)
    request = world.request(99)
    request.deadline_ns = world.now_ns + 30 * MS
    world.scheduler.add(request)
    world.go_on(1000)
    before = world.held_ns
    world.go_on(15_000)
    assert before == 0
    assert world.scheduler.sizing.lockstep.together
