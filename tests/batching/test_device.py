"""Device: turns go by the cost of past runs, and every model waits for a bounded time. No clock, no threads."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends import cpus
from penstock.batching.devices.device import (
    BATCH_LIMIT_FACTOR,
    EXEMPT_NS,
    MAX_CONCURRENT_RUNS,
    MIN_BATCH_LIMIT_NS,
    Device,
    Share,
    make_device,
    run_width,
)

MS = 1_000_000


@dataclass(eq=False)
class Puppet:
    """A Waiter that only counts its turns."""

    turns: int = 0

    def grant(self) -> None:
        self.turns += 1


def asks(device: Device, share: Share) -> Puppet:
    puppet = Puppet()
    device.request_turn(share, puppet)
    return puppet


def served(device: Device, share: Share, cost_ns: int) -> None:
    """Give a Model one turn on a free device."""
    assert asks(device, share).turns == 1
    device.end_turn(share, 0, cost_ns, more=False)


class TestResizing:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 3)), max_size=40))
    def test_used_room_is_the_total_width_of_running_turns_even_after_a_resize(
        self, steps: list[tuple[int, int, int]]
    ) -> None:
        device = Device(4)
        shares = [device.join(2, 2), device.join(2, 1)]
        held: list[tuple[Share, Puppet]] = []
        for what, instances, width in steps:
            share = shares[what % 2]
            if what < 2:
                held.append((share, asks(device, share)))
            else:
                device.resize(share, instances, width)
            for each in [each for each in held if each[1].turns][:1] if what == 3 else []:
                held.remove(each)
                device.end_turn(each[0], 0, MS, more=False)
        running = [share for share, puppet in held if puppet.turns]
        assert device._used_room == sum(share.width for share in running)
        while any(puppet.turns for _, puppet in held):
            each = next(each for each in held if each[1].turns)
            held.remove(each)
            device.end_turn(each[0], 0, MS, more=False)
        assert (device._used_room, held) == (0, [])

    def test_resizing_a_share_changes_its_cost_by_width_and_keeps_its_weight(self) -> None:
        device = Device(4)
        share = device.join(1, 4, 2.0)

        device.resize(share, 3, 2)

        assert (share.cost_per_ns, share.instances) == (1.0, 3)


class TestTurnOrder:
    def test_a_device_is_contended_only_while_its_models_do_not_all_fit(self) -> None:
        device = Device(2)
        first = device.join(1, 1)
        device.join(1, 1)
        fits = device.contended
        third = device.join(1, 1)
        crowded = device.contended
        device.leave(third)

        assert (fits, crowded, device.contended) == (False, True, False)
        device.leave(first)

    def test_a_models_configured_instances_all_run_even_if_a_second_model_has_to_wait(self) -> None:
        device = Device(2)
        many = device.join(5, 1)

        alone = device.contended
        one = device.join(1, 1)
        puppets = [asks(device, many) for _ in range(5)]
        waits = asks(device, one)

        assert (alone, device.contended) == (False, True)
        assert [puppet.turns for puppet in (*puppets, waits)] == [1, 1, 1, 1, 1, 0]

    def test_wide_runs_take_more_room_on_the_device(self) -> None:
        device = Device(4)
        wide, narrow, other = device.join(1, 3), device.join(1, 1), device.join(1, 3)

        turns = [asks(device, share).turns for share in (wide, narrow, other)]

        assert turns == [1, 1, 0]

    def test_the_model_with_the_lowest_cost_so_far_goes_first(self) -> None:
        device = Device(1)
        holder, dear, cheap, third = (device.join(1, 1) for _ in range(4))
        for share in (holder, dear, cheap, third):
            device.request_turn(share, Puppet())
        device.end_turn(holder, 0, 20 * MS, more=False)
        device.end_turn(dear, 0, 9 * MS, more=False)
        dears = asks(device, dear)
        device.end_turn(cheap, 0, 1 * MS, more=False)
        cheaps = asks(device, cheap)
        device.end_turn(third, 0, 5 * MS, more=False)

        assert (dears.turns, cheaps.turns) == (0, 1)

    def test_a_model_with_many_instances_counts_as_one(self) -> None:
        device = Device(1)
        hot, other = device.join(1, 1), device.join(1, 1)
        device.request_turn(hot, Puppet())
        siblings = [asks(device, hot) for _ in range(3)]
        waits = asks(device, other)
        device.end_turn(hot, 0, MS, more=False)

        assert [puppet.turns for puppet in siblings] == [0, 0, 0]
        assert waits.turns == 1

    def test_a_model_with_lower_cost_than_all_waiting_models_keeps_its_turn(self) -> None:
        device = Device(1)
        cheap, dear = device.join(1, 1), device.join(1, 1)
        device.request_turn(dear, Puppet())
        first = asks(device, cheap)
        device.end_turn(dear, 0, 10 * MS, more=False)
        second = asks(device, dear)

        went_on = [device.end_turn(cheap, 0, 4 * MS, more=True) for _ in range(3)]

        assert first.turns == 1
        assert went_on == [True, True, False]
        assert second.turns == 1

    def test_an_idle_model_accumulates_no_credit(self) -> None:
        device = Device(1)
        busy, away = device.join(1, 1), device.join(1, 1)
        for _ in range(100):
            served(device, busy, 10 * MS)
        device.request_turn(away, Puppet())
        waits = asks(device, busy)

        assert device.end_turn(away, 0, MS, more=True) is False
        assert waits.turns == 1

    def test_a_model_that_joins_a_busy_device_starts_without_credit(self) -> None:
        device = Device(1)
        hot, other, late = (device.join(1, 1) for _ in range(3))
        waits = {share: asks(device, share) for share in (hot, other)}
        order = []
        for turn in range(20):
            if turn == 10:
                waits[late] = asks(device, late)
            running = next(share for share, puppet in waits.items() if puppet.turns)
            order.append(running)
            device.end_turn(running, 0, 10 * MS, more=False)
            waits[running] = asks(device, running)

        assert 3 <= order.count(late) <= 4

    def test_a_model_that_had_the_device_to_itself_owes_nothing(self) -> None:
        device = Device(1)
        alone = device.join(1, 1)
        served(device, alone, 3600 * 1000 * MS)
        later = device.join(1, 1)
        device.request_turn(later, Puppet())
        waits = asks(device, alone)
        device.end_turn(later, 0, MS, more=True)

        assert waits.turns == 1

    def test_the_predicted_cost_of_a_run_counts_until_its_measured_cost_is_known(self) -> None:
        device = Device(2)
        liar, honest = device.join(2, 1), device.join(2, 1)
        for share in (liar, honest):
            device.request_turn(share, Puppet())
            device.begin_batch(share, 5 * MS)
        waiting = {share: asks(device, share) for share in (honest, liar)}
        device.end_turn(liar, 5 * MS, 50 * MS, more=False)
        turns = [waiting[share].turns for share in (liar, honest)]

        assert turns == [0, 1]

    @pytest.mark.parametrize(("long_ones", "least", "most"), [(1, 150, 200), (400, 2, 2)])
    def test_a_model_that_ran_during_a_machine_stall_is_not_charged_unless_stalls_continue(
        self, long_ones: int, least: int, most: int
    ) -> None:
        device = Device(1)
        stood, other = device.join(1, 1), device.join(1, 1)
        device.request_turn(stood, Puppet())
        waits, running, turns = asks(device, other), stood, []
        for turn in range(400):
            turns.append(running)
            device.begin_batch(running, 5 * MS)
            long = running is stood and turn < long_ones
            if not device.end_turn(running, 5 * MS, 20_000 * MS if long else 5 * MS, more=True):
                assert waits.turns == 1
                waits, running = asks(device, running), other if running is stood else stood

        assert least <= turns.count(stood) <= most

    def test_a_model_with_occasional_very_slow_runs_is_charged_for_them(self) -> None:
        device = Device(1)
        uneven, other = device.join(1, 1), device.join(1, 1)
        device.request_turn(uneven, Puppet())
        waits, running, runs, took = asks(device, other), uneven, 0, {id(uneven): 0, id(other): 0}
        for turn in range(40_000):
            runs += running is uneven
            real_ns = (5000 if runs % 10 == 0 else 20) * MS if running is uneven else 30 * MS
            took[id(running)] += real_ns if turn > 20_000 else 0
            device.begin_batch(running, (20 if running is uneven else 30) * MS)
            if not device.end_turn(running, (20 if running is uneven else 30) * MS, real_ns, more=True):
                assert waits.turns == 1
                waits, running = asks(device, running), other if running is uneven else uneven

        assert 0.4 < took[id(other)] / sum(took.values()) < 0.6

    def test_a_turn_without_work_passes_to_the_next_model(self) -> None:
        device = Device(1)
        empty, other = device.join(1, 1), device.join(1, 1)
        device.request_turn(empty, Puppet())
        waits = asks(device, other)
        device.end_turn(empty, 0, 0, more=False)

        assert waits.turns == 1

    def test_a_canceled_request_for_a_turn_is_skipped_unless_already_granted(self) -> None:
        device = Device(1)
        holder, stopped, other = (device.join(1, 1) for _ in range(3))
        granted = asks(device, holder)
        canceled, waits = asks(device, stopped), asks(device, other)

        assert device.cancel_request(stopped, canceled)
        assert not device.cancel_request(holder, granted)
        device.end_turn(holder, 0, MS, more=False)
        assert (canceled.turns, waits.turns) == (0, 1)

    def test_a_narrow_request_is_granted_when_a_wide_one_ahead_of_it_is_canceled(self) -> None:
        device = Device(4)
        holder, wide, narrow = device.join(1, 2), device.join(1, 3), device.join(1, 2)
        device.request_turn(holder, Puppet())
        canceled, waits = asks(device, wide), asks(device, narrow)
        before = waits.turns
        device.cancel_request(wide, canceled)

        assert (before, waits.turns) == (0, 1)

    def test_all_waiting_requests_are_granted_when_the_device_is_no_longer_contended(self) -> None:
        device = Device(2)
        shares = [device.join(1, 1) for _ in range(3)]
        for share in shares[:2]:
            device.request_turn(share, Puppet())
        waits = asks(device, shares[2])
        device.end_turn(shares[0], 0, MS, more=False)
        device.request_turn(shares[0], late := Puppet())
        before = (waits.turns, late.turns)
        device.end_turn(shares[1], 0, MS, more=False)
        device.leave(shares[1])

        assert before == (1, 0)
        assert late.turns == 1
        assert not device.end_turn(shares[0], 0, MS, more=True)


class TestBatchLimit:
    def test_a_batch_is_unlimited_while_no_other_model_waits(self) -> None:
        device = Device(1)
        share = device.join(1, 1)
        device.request_turn(share, Puppet())

        assert device.max_batch_ns(share) == 0

    @pytest.mark.parametrize(("took", "most"), [(MS, MIN_BATCH_LIMIT_NS), (100 * MS, BATCH_LIMIT_FACTOR * 100 * MS)])
    def test_a_batch_is_limited_to_a_multiple_of_the_shortest_waiting_models_run(self, took: int, most: int) -> None:
        device = Device(1)
        holder, *others = (device.join(1, 1) for _ in range(3))
        for share, ns in zip(others, (took, 5000 * MS), strict=True):
            served(device, share, ns)
        device.request_turn(holder, Puppet())
        for share in others:
            device.request_turn(share, Puppet())

        assert device.max_batch_ns(holder) == most

    def test_waiting_instances_of_the_same_model_do_not_limit_a_batch(self) -> None:
        device = Device(1)
        share = device.join(1, 1)
        for _ in range(2):
            device.request_turn(share, Puppet())

        assert device.max_batch_ns(share) == 0


class TestBriefRuns:
    def test_brief_runs_are_exempt_from_turns_on_a_preemptive_device(self) -> None:
        device = Device(1, preemptive=True)
        share = device.join(1, 1)
        at_first = share.exempt
        served(device, share, EXEMPT_NS - 1)
        after_a_brief_one = share.exempt
        device.record_run(share, EXEMPT_NS)

        assert (at_first, after_a_brief_one, share.exempt) == (False, True, False)

    def test_brief_runs_take_turns_on_a_device_without_preemption(self) -> None:
        device = Device(1)
        share = device.join(1, 1)
        served(device, share, 1)

        assert not share.exempt


class TestWidths:
    def test_the_width_of_a_cpu_run_is_its_sessions_thread_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.batching.devices.device.usable_cpus", lambda: 8)

        widths = [
            run_width("cpu", count, threads) for count, threads in ((1, 0), (1, 3), (2, 0), (8, 1), (4, 5), (1, 99))
        ]

        assert widths == [8, 3, 5, 1, 2, 8]

    def test_two_runs_that_take_all_of_a_device_fit_it(self) -> None:
        for name in ("cpu", "cuda:0"):
            device, width = make_device(name), run_width(name, 1, 0)
            shares = [device.join(1, width) for _ in range(MAX_CONCURRENT_RUNS)]
            fits = not device.contended
            device.join(1, width)

            assert (fits, device.contended) == (True, True)
            assert len(shares) == 2
        assert cpus.usable_cpus() >= 1


@dataclass(eq=False)
class Simulated:
    """A Model with a number of Instances of one width, loaded from `comes` to `goes`.

    `costs`: the predicted and actual times of its batches, in rotation. `rest`: how long it is idle after each, 0 for
    a busy one.
    """

    instances: int
    width: int
    costs: list[tuple[int, int]]
    rest: int = 0
    comes: int = 0
    goes: int = 1 << 40
    weight: float = 1.0
    ran: int = 0
    time_used: int = 0
    asked_at: int | None = None
    others: int = 0


@dataclass(eq=False)
class Runner:
    """One of its Instances: requests a turn, runs the next batch, and requests a turn again."""

    house: House
    model: Simulated
    started: int = 0
    predicted: int = 0

    def grant(self) -> None:
        self.house.start(self)


class House:
    """A Device under a virtual clock. `waits`: the length of each wait of a Model, and the number of other Models."""

    def __init__(self, room: int, models: list[Simulated]) -> None:
        self.device = Device(room)
        self.models = models
        self.now = 0
        self.waits: list[tuple[int, int]] = []
        self._shares: dict[Simulated, Share] = {}
        self._left: Counter[Simulated] = Counter()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = iter(range(1 << 30))
        for model in models:
            self._at(model.comes, partial(self._come, model))

    def run(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.waits += [(self.now - model.asked_at, model.others) for model in self.models if model.asked_at is not None]

    def _at(self, time: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _come(self, model: Simulated) -> None:
        self._shares[model] = self.device.join(model.instances, model.width, model.weight)
        for other in self._shares:
            other.others += 1
        for _ in range(model.instances):
            self._ask(Runner(self, model))

    def _ask(self, runner: Runner) -> None:
        model = runner.model
        if self.now >= model.goes:
            self._left[model] += 1
            if self._left[model] == model.instances:
                self.device.leave(self._shares.pop(model))
            return
        if model.asked_at is None:
            model.asked_at, model.others = self.now, len(self._shares) - 1
        self.device.request_turn(self._shares[model], runner)

    def start(self, runner: Runner) -> None:
        model = runner.model
        if model.asked_at is not None:
            self.waits.append((self.now - model.asked_at, model.others))
            model.asked_at, model.others = None, len(self._shares) - 1
        runner.started = self.now
        runner.predicted, real = model.costs[model.ran % len(model.costs)]
        model.ran += 1
        self._at(self.now, partial(self._begin, runner, real))

    def _begin(self, runner: Runner, real: int) -> None:
        model = runner.model
        self.device.begin_batch(self._shares[model], runner.predicted)
        if self._shares[model].waiters and model.asked_at is None:
            model.asked_at, model.others = self.now, len(self._shares) - 1
        self._at(self.now + real, partial(self._end, runner))

    def _end(self, runner: Runner) -> None:
        model, real = runner.model, self.now - runner.started
        model.time_used += real * model.width
        more = not model.rest and self.now < model.goes
        if self.device.end_turn(self._shares[model], runner.predicted, real, more):
            self.start(runner)
        else:
            self._at(self.now + model.rest, partial(self._ask, runner))


B = 100
WEIGHTS = (0.25, 1.0, 4.0)
COSTS = st.lists(st.tuples(st.integers(0, B), st.integers(10, B)), min_size=1, max_size=4)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[int, list[Simulated]]:
    """Draw the width of the device, and Models of all kinds."""
    capacity = draw(st.integers(1, 4))
    models = []
    for _ in range(draw(st.integers(2, 6))):
        comes = draw(st.sampled_from([0, 0, 0, 300, 1000]))
        goes = comes + draw(st.sampled_from([1 << 40, 1 << 40, 300, 800]))
        width, rest = draw(st.integers(1, capacity)), draw(st.sampled_from([0, 0, 1, 30, 500]))
        models.append(Simulated(draw(st.integers(1, 3)), width, draw(COSTS), rest, comes, goes))
    return capacity, models


class TestFairness:
    @given(crowds())
    def test_every_request_for_a_turn_is_granted_within_the_bound(self, crowd: tuple[int, list[Simulated]]) -> None:
        capacity, models = crowd
        room = MAX_CONCURRENT_RUNS * capacity
        house = House(room, models)
        house.run(2000)
        most = max(model.instances for model in models)
        wide = max(model.width for model in models)

        assert house.waits
        for waited, others in house.waits:
            assert waited <= 2 * B + 2 * (3 * most + 1) * others * B * wide / room

    @given(st.lists(COSTS, min_size=2, max_size=6), st.integers(1, 3), st.integers(1, 3))
    def test_the_bound_is_about_half_as_long_if_all_models_are_equally_wide(
        self, costs: list[list[tuple[int, int]]], room: int, instances: int
    ) -> None:
        house = House(room, [Simulated(instances, 1, each) for each in costs])
        house.run(2000)

        for waited, others in house.waits:
            assert waited <= B + (3 * instances + 1) * others * B / room

    @given(st.lists(COSTS, min_size=2, max_size=6), st.integers(1, 3))
    def test_busy_models_get_equal_time_for_any_batch_costs_and_wrong_predictions(
        self, costs: list[list[tuple[int, int]]], room: int
    ) -> None:
        house = House(room, [Simulated(1, 1, each) for each in costs])
        house.run(5000)
        used = [model.time_used for model in house.models]

        if len(costs) > room:
            assert max(used) - min(used) <= 4 * B

    @given(st.lists(st.tuples(COSTS, st.sampled_from(WEIGHTS)), min_size=2, max_size=5))
    def test_busy_models_get_time_in_proportion_to_their_weights(
        self, models: list[tuple[list[tuple[int, int]], float]]
    ) -> None:
        house = House(1, [Simulated(1, 1, costs, weight=weight) for costs, weight in models])
        house.run(20_000)
        used = [model.time_used / model.weight for model in house.models]

        assert max(used) - min(used) <= 4 * B / min(WEIGHTS)

    @given(st.lists(st.tuples(COSTS, st.sampled_from(WEIGHTS)), min_size=1, max_size=4), st.integers(1, 3))
    def test_a_model_with_low_weight_waits_longer_but_for_a_bounded_time(
        self, others: list[tuple[list[tuple[int, int]], float]], instances: int
    ) -> None:
        light = Simulated(instances, 1, [(50, B)], weight=min(WEIGHTS))
        house = House(1, [light, *(Simulated(instances, 1, costs, weight=weight) for costs, weight in others)])
        house.run(5000)
        each = [instances * weight / light.weight + weight / min(WEIGHTS) + 2 * instances for _, weight in others]
        room = house.device.room

        for waited, _ in house.waits:
            assert waited <= 2 * B + 2 * B * (sum(each) + 3 * instances + 1) / room

    @given(st.integers(10, B), st.integers(10, B), st.integers(2, 4))
    def test_more_instances_do_not_get_a_model_more_time(self, price: int, other_price: int, instances: int) -> None:
        hot = Simulated(instances, 1, [(price, price)])
        others = [Simulated(1, 1, [(other_price, other_price)]) for _ in range(instances)]
        house = House(1, [hot, *others])
        house.run(10_000)

        for other in others:
            assert abs(other.time_used - hot.time_used) <= 4 * B * instances
