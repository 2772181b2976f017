"""RateLimiter: which Instance runs next, by resources and by past runs. No threads unless noted, no clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.batching.devices.rate_limiter import MAX_OWED_RUNS, Claim, RateLimiter, device_number
from penstock.batching.spec import Resource


@dataclass(eq=False)
class Puppet:
    """A Waiter that only counts its turns."""

    turns: int = 0

    def grant(self) -> None:
        self.turns += 1


def needs(**counts: int) -> tuple[Resource, ...]:
    return tuple(Resource(name, count) for name, count in counts.items())


def joins(limiter: RateLimiter, priority: int = 1, device: str = "cpu", **counts: int) -> Claim:
    return limiter.join(device, needs(**counts), priority)


def asks(limiter: RateLimiter, claim: Claim) -> Puppet:
    puppet = Puppet()
    limiter.request_turn(claim, puppet)
    return puppet


def runs(limiter: RateLimiter, claim: Claim) -> None:
    """Run an Instance once, on free resources."""
    assert asks(limiter, claim).turns == 1
    limiter.begin_batch(claim, 0)
    limiter.end_turn(claim, 0, 0, more=False)


def order(limiter: RateLimiter, claims: Mapping[str, Claim], count: int) -> str:
    """Return the order of runs, one at a time, when every Instance always has more work."""
    puppets = {name: asks(limiter, claim) for name, claim in claims.items()}
    ran = ""
    for _ in range(count):
        (name,) = (name for name, puppet in puppets.items() if puppet.turns)
        ran += name
        puppets[name].turns = 0
        limiter.begin_batch(claims[name], 0)
        if limiter.end_turn(claims[name], 0, 0, more=True):
            puppets[name].turns = 1
        else:
            limiter.request_turn(claims[name], puppets[name])
    return ran


class TestResources:
    def test_a_resource_without_a_limit_has_as_many_units_as_the_largest_need(self) -> None:
        limiter = RateLimiter()
        big, *small = (joins(limiter, R1=count) for count in (4, 2, 2, 1))
        turns = [asks(limiter, claim).turns for claim in small]

        assert turns == [1, 1, 0]
        assert asks(limiter, big).turns == 0

    def test_an_instance_holds_all_of_its_resources_or_none(self) -> None:
        limiter = RateLimiter()
        holder, both, other = joins(limiter, R1=1), joins(limiter, R1=1, R2=1), joins(limiter, R2=1)
        asks(limiter, holder)
        waits = asks(limiter, both)
        limiter.cancel_request(both, waits)

        assert waits.turns == 0
        assert asks(limiter, other).turns == 1

    def test_each_device_has_its_own_resources(self) -> None:
        limiter = RateLimiter()
        turns = [asks(limiter, joins(limiter, device=device, R1=1)).turns for device in ("cuda:0", "cuda:1", "cuda:1")]

        assert turns == [1, 1, 0]

    def test_a_global_resource_is_shared_by_all_devices(self) -> None:
        limiter = RateLimiter()
        shared = (Resource("R1", 1, shared=True),)
        turns = [asks(limiter, limiter.join(device, shared, 1)).turns for device in ("cuda:0", "cuda:1")]

        assert turns == [1, 0]

    def test_the_cpu_has_the_device_number_of_the_first_gpu(self) -> None:
        assert [device_number(device) for device in ("cpu", "cuda:0", "cuda:12")] == [0, 0, 12]

    @pytest.mark.parametrize(
        ("stated", "limit"),
        [
            ({("R1", None): 3}, 3),
            ({("R1", 10): 10, ("R2", None): 2}, 0),
            ({("R2", None): 9}, 0),
            ({("R1", 0): 2, ("R1", None): 1}, 2),
        ],
    )
    def test_a_resource_limit_below_an_instances_need_is_refused_in_tritons_words(
        self, stated: dict[tuple[str, int | None], int], limit: int
    ) -> None:
        limiter = RateLimiter(stated)
        text = (
            f'Resource count for "R1" is limited to {limit} which will prevent scheduling of one or more model '
            "instances, the minimum required count is 4"
        )
        with pytest.raises(InferError, match=f"^{re.escape(text)}$") as refused:
            joins(limiter, R1=4)

        assert refused.value.code is Code.INVALID

    def test_a_device_specific_limit_overrides_a_general_one_if_it_is_larger(self) -> None:
        limiter = RateLimiter({("R1", None): 1, ("R1", 1): 2})
        turns = [asks(limiter, joins(limiter, device=device, R1=1)).turns for device in ["cuda:0"] * 2 + ["cuda:1"] * 3]

        assert turns == [1, 0, 1, 1, 0]

    def test_a_global_resource_has_its_configured_limit_on_every_device(self) -> None:
        limiter = RateLimiter({("R1", 7): 2})
        shared = (Resource("R1", 1, shared=True),)

        assert [asks(limiter, limiter.join("cpu", shared, 1)).turns for _ in range(3)] == [1, 1, 0]

    @pytest.mark.parametrize("first_shared", [True, False])
    def test_a_resource_is_either_global_or_device_specific_for_all_models(self, first_shared: bool) -> None:
        limiter = RateLimiter()
        first = limiter.join("cpu", (Resource("R2", 1, first_shared),), 1)
        text = 'Resource "R2" is present as both global and device-specific resource in the model configuration.'
        with pytest.raises(InferError, match=f"^{re.escape(text)}$"):
            limiter.join("cpu", (Resource("R2", 1, not first_shared),), 1)
        limiter.leave(first)

        limiter.join("cpu", (Resource("R2", 1, not first_shared),), 1)

    def test_one_instance_cannot_need_a_resource_both_globally_and_per_device(self) -> None:
        with pytest.raises(InferError, match="both global and device-specific"):
            RateLimiter().join("cpu", (Resource("R", 1), Resource("R", 1, shared=True)), 1)

    def test_a_refused_instance_leaves_nothing_behind(self) -> None:
        limiter = RateLimiter({("R1", None): 2})
        with pytest.raises(InferError, match="limited to 2"):
            joins(limiter, R1=4)

        assert [asks(limiter, joins(limiter, R1=1)).turns for _ in range(3)] == [1, 1, 0]

    def test_resources_added_by_the_largest_need_are_removed_with_its_instance(self) -> None:
        limiter = RateLimiter()
        big, *small = (joins(limiter, R1=count) for count in (4, 2, 2, 2))
        limiter.leave(big)

        assert [asks(limiter, claim).turns for claim in small] == [1, 0, 0]

    def test_resources_added_by_a_larger_need_go_to_waiting_instances(self) -> None:
        limiter = RateLimiter()
        small = [joins(limiter, R1=1) for _ in range(3)]
        puppets = [asks(limiter, claim) for claim in small]
        before = [puppet.turns for puppet in puppets]
        joins(limiter, R1=2)

        assert before == [1, 0, 0]
        assert [puppet.turns for puppet in puppets] == [1, 1, 0]

    def test_an_instance_without_resources_never_waits(self) -> None:
        limiter = RateLimiter()
        holder = joins(limiter, R1=1)
        asks(limiter, holder)
        asks(limiter, joins(limiter, R1=1))

        assert asks(limiter, joins(limiter)).turns == 1


class TestTurnOrder:
    @pytest.mark.parametrize(
        ("priorities", "expected"),
        [
            ({"a": 1, "b": 1}, "abababababab"),
            ({"a": 1, "b": 2}, "aabaabaabaab"),
            ({"a": 0, "b": 2}, "aabaabaabaab"),
            ({"a": 1, "b": 2, "c": 3}, "aabacabaabca"),
        ],
    )
    def test_priority_2_has_half_the_runs_of_priority_1(self, priorities: dict[str, int], expected: str) -> None:
        limiter = RateLimiter()
        claims = {name: joins(limiter, priority, R1=1) for name, priority in priorities.items()}

        assert order(limiter, claims, 12) == expected

    def test_the_instance_with_the_fewest_runs_goes_first(self) -> None:
        limiter = RateLimiter()
        often, seldom, holder = (joins(limiter, R1=1) for _ in range(3))
        for _ in range(3):
            runs(limiter, often)
        asks(limiter, holder)
        waits = {claim: asks(limiter, claim) for claim in (often, seldom)}
        limiter.end_turn(holder, 0, 0, more=False)

        assert [waits[claim].turns for claim in (often, seldom)] == [0, 1]

    def test_an_instance_with_more_work_is_considered_before_its_thread_asks_again(self) -> None:
        limiter = RateLimiter()
        high, low = joins(limiter, R1=1), joins(limiter, 10, R1=1)
        runs(limiter, low)
        asks(limiter, high)
        waits = asks(limiter, low)
        limiter.begin_batch(high, 0)

        goes_on = limiter.end_turn(high, 0, 0, more=True)

        assert (goes_on, waits.turns) == (True, 0)

    def test_a_freed_resource_is_reserved_for_an_instance_with_more_work(self) -> None:
        limiter = RateLimiter()
        first, second = joins(limiter, R1=1), joins(limiter, R1=1)
        asks(limiter, first)
        asks(limiter, second)
        limiter.begin_batch(first, 0)
        assert not limiter.end_turn(first, 0, 0, more=True)
        limiter.begin_batch(second, 0)
        assert not limiter.end_turn(second, 0, 0, more=True)

        assert asks(limiter, first).turns == 1

    def test_a_released_reservation_goes_to_a_waiting_instance(self) -> None:
        limiter = RateLimiter()
        first, second, third = (joins(limiter, R1=1) for _ in range(3))
        asks(limiter, first)
        waits = [asks(limiter, claim) for claim in (second, third)]
        limiter.begin_batch(first, 0)
        limiter.end_turn(first, 0, 0, more=True)
        for claim in (second, third):
            limiter.begin_batch(claim, 0)
            limiter.end_turn(claim, 0, 0, more=False)
        last = asks(limiter, second)
        before = last.turns
        limiter.release_reservation(first)

        assert [puppet.turns for puppet in waits] == [1, 1]
        assert (before, last.turns) == (0, 1)

    def test_an_instance_that_needs_many_resources_is_not_overtaken_by_smaller_ones(self) -> None:
        limiter = RateLimiter()
        holder, big, small = joins(limiter, R1=1), joins(limiter, R1=2), joins(limiter, 2, R1=1)
        runs(limiter, small)
        asks(limiter, holder)
        asks(limiter, big)

        assert asks(limiter, small).turns == 0

    def test_an_instance_that_needs_other_resources_may_overtake(self) -> None:
        limiter = RateLimiter()
        holder, first, other = joins(limiter, R1=1), joins(limiter, R1=1), joins(limiter, 5, R2=1)
        runs(limiter, other)
        asks(limiter, holder)
        asks(limiter, first)

        assert asks(limiter, other).turns == 1

    def test_a_canceled_request_for_a_turn_lets_the_next_instance_run(self) -> None:
        limiter = RateLimiter()
        holder, big, small = joins(limiter, R1=1), joins(limiter, R1=2), joins(limiter, 2, R1=1)
        runs(limiter, small)
        granted = asks(limiter, holder)
        canceled, waits = asks(limiter, big), asks(limiter, small)

        assert limiter.cancel_request(big, canceled)
        assert not limiter.cancel_request(holder, granted)
        assert (canceled.turns, waits.turns) == (0, 1)

    def test_a_turn_without_work_does_not_count_as_a_run(self) -> None:
        limiter = RateLimiter()
        first, second, holder = (joins(limiter, R1=1) for _ in range(3))
        asks(limiter, first)
        limiter.end_turn(first, 0, 0, more=False)
        asks(limiter, holder)
        waits = [asks(limiter, claim) for claim in (first, second)]
        limiter.end_turn(holder, 0, 0, more=False)

        assert [puppet.turns for puppet in waits] == [1, 0]

    def test_an_instance_that_was_idle_is_owed_a_bounded_number_of_runs(self) -> None:
        limiter = RateLimiter()
        busy, rested = joins(limiter, R1=1), joins(limiter, 2, R1=1)
        for _ in range(1000):
            runs(limiter, busy)

        assert 0 < order(limiter, {"b": busy, "r": rested}, 100)[1:].index("b") <= MAX_OWED_RUNS + 1

    def test_a_new_instance_is_owed_no_runs(self) -> None:
        limiter = RateLimiter()
        busy = joins(limiter, R1=1)
        for _ in range(1000):
            runs(limiter, busy)
        new = joins(limiter, R1=1)

        assert order(limiter, {"b": busy, "n": new}, 6)[2:] in {"bnbn", "nbnb"}


NAMES = ("A", "B", "C")
THERE = 3
Group = tuple[dict[str, int], int]
GROUPS = st.tuples(st.dictionaries(st.sampled_from(NAMES), st.integers(0, THERE), max_size=3), st.integers(0, 4))


class Instance:
    """An Instance that acts at random: requests and cancels turns, runs, continues or not, and is unloaded."""

    def __init__(self, limiter: RateLimiter, group: Group) -> None:
        self.counts, priority = group
        self.state = "away"
        self._limiter = limiter
        self._claim = limiter.join("cpu", needs(**self.counts), priority)
        self._puppet = Puppet()

    def look(self) -> None:
        """Notice that a turn was granted."""
        if self._puppet.turns:
            self.state, self._puppet.turns = "runs", 0

    def ask(self) -> None:
        self.state = "waits"
        self._limiter.request_turn(self._claim, self._puppet)

    def leave(self) -> None:
        self._limiter.leave(self._claim)

    def withdraw(self) -> None:
        self.state = "away" if self._limiter.cancel_request(self._claim, self._puppet) else "runs"

    def forget(self) -> None:
        self._limiter.release_reservation(self._claim)
        self.state = "away"

    def end(self, *, ran: bool, more: bool) -> None:
        if ran:
            self._limiter.begin_batch(self._claim, 0)
        goes_on = self._limiter.end_turn(self._claim, 0, 0, more)
        self.state = "runs" if goes_on else "coming" if more else "away"

    def step(self, *, one: bool, other: bool) -> None:
        """Do something that is possible now."""
        if self.state == "runs":
            self.end(ran=one, more=other)
        elif self.state == "waits":
            self.withdraw()
        elif one or self.state == "away":
            self.ask()
        else:
            self.forget()


class TestInvariants:
    @given(st.lists(GROUPS, min_size=1, max_size=6), st.data())
    def test_resources_are_never_exceeded_and_every_instance_gets_its_turn(
        self, groups: list[Group], data: st.DataObject
    ) -> None:
        limiter = RateLimiter({(name, None): THERE for name in NAMES})
        everyone = [Instance(limiter, group) for group in groups]
        steps = st.tuples(st.integers(0, len(groups) - 1), st.booleans(), st.booleans(), st.none() | GROUPS)
        for number, one, other, group in data.draw(st.lists(steps, max_size=40)):
            if group is not None and everyone[number].state == "away":
                everyone[number].leave()
                everyone[number] = Instance(limiter, group)
            everyone[number].step(one=one, other=other)
            held: Counter[str] = Counter()
            for each in everyone:
                each.look()
                if each.state == "runs":
                    held.update(each.counts)
            assert all(held[name] <= THERE for name in NAMES)
        self._finish(everyone)

    @staticmethod
    def _finish(everyone: list[Instance]) -> None:
        """Let all waiting Instances run without new ones: none may be left."""
        for each in everyone:
            if each.state == "coming":
                each.ask()
        for _ in everyone:
            for each in everyone:
                each.look()
                if each.state == "runs":
                    each.end(ran=True, more=False)

        assert {each.state for each in everyone} == {"away"}

    @given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 0, 1, 5, 60])), min_size=2, max_size=6))
    def test_no_instance_waits_for_more_runs_than_the_bound(self, kinds: list[tuple[int, int]]) -> None:
        """One Instance runs at a time, and is idle for a number of steps after each run, 0 for a busy one."""
        limiter = RateLimiter()
        claims = [joins(limiter, priority, R1=1) for priority, _ in kinds]
        puppets = [asks(limiter, claim) for claim in claims]
        waited = [Counter[int]() for _ in claims]
        rests: dict[int, int] = {}
        for _ in range(200):
            running = next((number for number, puppet in enumerate(puppets) if puppet.turns), None)
            if running is not None:
                puppets[running].turns = 0
                for number in range(len(claims)):
                    waited[number][running] += number != running and number not in rests
                limiter.begin_batch(claims[running], 0)
                waited[running].clear()
                rest = kinds[running][1]
                if limiter.end_turn(claims[running], 0, 0, more=not rest):
                    puppets[running].turns = 1
                elif rest:
                    rests[running] = rest
                else:
                    limiter.request_turn(claims[running], puppets[running])
            for number in list(rests):
                rests[number] -= 1
                if rests[number] <= 0:
                    del rests[number]
                    limiter.request_turn(claims[number], puppets[number])
            for number, others in enumerate(waited):
                for other, count in others.items():
                    assert count <= 2 * kinds[number][0] / kinds[other][0] + MAX_OWED_RUNS + 2

    @given(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    def test_busy_instances_run_in_proportion_to_their_priorities(self, priorities: list[int]) -> None:
        limiter = RateLimiter()
        claims = {str(number): joins(limiter, priority, R1=1) for number, priority in enumerate(priorities)}
        ran = Counter(order(limiter, claims, 200))

        scaled = [ran[name] * claim.priority for name, claim in claims.items()]
        assert max(scaled) - min(scaled) <= max(priorities)
