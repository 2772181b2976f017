"""The supervisor's next actions, decided from events: without processes or clocks."""

from __future__ import annotations

import random

import pytest

from penstock.server.supervisor.fleet import (
    DRAINING,
    ENGINE,
    ENGINE_WAIT_S,
    FRONT,
    LISTENING,
    READY,
    Fleet,
    FleetActions,
    Member,
)

WAIT_S = 1.0


class World:
    """The processes that a Fleet has requested. `now` is set by the test, not by a clock."""

    def __init__(self, fronts: int = 2) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.early: dict[int, bool] = {}
        self.paired: set[tuple[int, int]] = set()
        self.ended_on_request: set[int] = set()
        self.fleet = Fleet(fronts, FleetActions(self._start, self._pair, self._drain, self._kill, self._flush))
        self.fleet.begin()

    def _start(self, member: Member, early: bool) -> None:
        self.early[member.number] = early
        self.log.append(f"start {member.name}")

    def _pair(self, front: Member, engine: Member) -> None:
        assert (front.role, engine.role) == (FRONT, ENGINE)
        assert front.generation == engine.generation
        self.paired.add((front.number, engine.number))

    def _drain(self, member: Member) -> None:
        self.ended_on_request.add(member.number)
        self.log.append(f"drain {member.name}")

    def _flush(self, member: Member) -> None:
        if self.log[-1] != f"flush {member.name}":  # repeating it does nothing
            self.log.append(f"flush {member.name}")

    def _kill(self, member: Member) -> None:
        self.ended_on_request.add(member.number)
        self.log.append(f"kill {member.name}")

    def one(self, role: str, place: int = 0) -> Member:
        return next(each for each in self.fleet.members_of(self.fleet.generation, role) if each.index == place)

    def says(self, member: Member, state: str) -> None:
        self.fleet.on_state(member.number, state, self.now)

    def ends(self, member: Member) -> None:
        self.fleet.on_exit(member.number, self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(self.now)

    def settle_new(self) -> None:
        """Let started processes become ready, and none end."""
        for _ in range(2):
            for member in list(self.fleet.members.values()):
                self.says(member, READY)

    def settle(self) -> None:
        """Let every process do what is expected of it, until no action is left."""
        for _ in range(100):
            before = len(self.log), [each.state for each in self.fleet.members.values()]
            for member in list(self.fleet.members.values()):
                if member.number in self.ended_on_request:
                    self.ends(member)
                elif member.state != READY:
                    self.says(member, READY)
            self.passes(70.0)
            if before == (len(self.log), [each.state for each in self.fleet.members.values()]):
                return
        raise AssertionError(f"it never settles: {self.log[-20:]}")


def ready(fronts: int = 2) -> World:
    world = World(fronts)
    world.settle()
    world.log.clear()
    return world


class TestLostEngine:
    def test_a_front_end_is_rejoined_at_once_and_then_once_per_tick(self) -> None:
        """An engine that is ending closes every connection from a front end until it has ended."""
        world = ready()
        front, engine = world.one(FRONT), world.one(ENGINE)
        joined = []
        for _ in range(5):
            world.paired.clear()
            world.fleet.on_disconnect(front.number)
            joined.append(len(world.paired))
        world.passes(0.1)

        assert joined == [1, 0, 0, 0, 0]
        assert world.paired == {(front.number, engine.number)}

    def test_a_front_end_joins_only_the_new_engine_after_the_old_engine_ends(self) -> None:
        world = ready()
        front, engine = world.one(FRONT), world.one(ENGINE)
        world.fleet.on_disconnect(front.number)
        world.fleet.on_disconnect(front.number)
        world.paired.clear()
        world.ends(engine)
        world.passes(0.1)

        assert {each for each in world.paired if each[0] == front.number} == {(front.number, world.one(ENGINE).number)}


def test_the_engine_starts_first_and_front_ends_listen_early() -> None:
    world = World()

    assert world.log == ["start engine", "start front-0", "start front-1"]
    assert [world.early[each.number] for each in world.fleet.members_of(0, FRONT)] == [True, True]
    assert len(world.paired) == 2
    assert not world.fleet.has_reached(LISTENING)


def test_a_front_end_that_ends_is_replaced_by_one_that_listens_when_ready() -> None:
    world = ready()
    world.ends(world.one(FRONT, 1))

    again = world.one(FRONT, 1)
    assert world.log == ["start front-1"]
    assert world.early[again.number] is False
    assert (again.number, world.one(ENGINE).number) in world.paired
    assert world.fleet.restarts == {ENGINE: 0, FRONT: 1}


def test_an_engine_that_ends_is_replaced_and_front_ends_join_the_new_engine() -> None:
    world = ready()
    world.ends(world.one(ENGINE))

    assert world.log == ["start engine"]
    assert {(front.number, world.one(ENGINE).number) for front in world.fleet.members_of(0, FRONT)} <= world.paired


def test_a_process_that_keeps_ending_is_restarted_with_increasing_delays() -> None:
    world = ready()
    waits = []
    for _ in range(4):
        begun = world.now
        world.ends(world.one(FRONT))
        while not any(each.index == 0 for each in world.fleet.members_of(0, FRONT)):
            world.passes(0.25)
        waits.append(world.now - begun)

    assert waits == sorted(waits)
    assert waits[0] == 0.0 < waits[1] < waits[3]


def test_a_process_ended_by_a_signal_is_not_counted_as_a_failure() -> None:
    world = ready()
    for _ in range(7):
        world.fleet.on_signal(world.one(FRONT).number, world.now)
        world.ends(world.one(FRONT))

    assert world.log == ["start front-0"] * 7
    world.ends(world.one(FRONT))  # without a signal, this counts as a failure, and the next
    world.ends(world.one(FRONT))
    assert world.log == ["start front-0"] * 8


def test_an_engine_ended_by_a_signal_waits_a_limited_time_for_serving_front_ends() -> None:
    world = ready()
    world.fleet.on_signal(world.one(ENGINE).number, world.now)
    world.passes(0.9 * ENGINE_WAIT_S)
    assert world.log == []
    world.passes(0.2 * ENGINE_WAIT_S)
    world.passes(ENGINE_WAIT_S)
    assert world.log == ["drain engine"]
    world.ends(world.one(ENGINE))

    assert world.log == ["drain engine", "start engine"]


@pytest.mark.parametrize("all_end", [True, False])
def test_an_engine_ended_by_a_signal_waits_for_draining_or_replaced_front_ends(
    all_end: bool,
) -> None:
    world = ready()
    world.fleet.on_signal(world.one(ENGINE).number, world.now)
    if all_end:
        world.fleet.drain()
    else:
        world.fleet.replace()
        world.settle_new()
    world.passes(2 * ENGINE_WAIT_S)

    assert "drain front-0" in world.log
    assert "drain engine" not in world.log


def test_replacement_starts_a_new_engine_first_and_ends_the_old_processes_in_order() -> None:
    world = ready()
    old = list(world.fleet.members.values())
    assert world.fleet.replace()
    assert not world.fleet.replace()
    world.settle()

    assert world.log == [
        "start engine", "start front-0", "start front-1", "drain front-0", "drain front-1",
        "flush engine", "drain engine",
    ]  # fmt: skip
    assert not set(world.fleet.members) & {each.number for each in old}
    assert world.fleet.has_reached(READY)


def test_a_new_engine_that_fails_during_replacement_leaves_the_old_processes_serving() -> None:
    world = ready()
    world.fleet.replace()
    new = next(each for each in world.fleet.members.values() if each.generation == world.fleet.next_generation)
    world.ends(new)
    world.settle()

    assert world.log == ["start engine"]
    assert world.fleet.has_reached(READY)
    assert world.fleet.replace()
    world.settle()
    assert world.fleet.has_reached(READY)


def test_an_old_front_end_that_ends_during_replacement_is_restarted() -> None:
    world = ready()
    world.fleet.replace()
    world.ends(world.one(FRONT))

    assert world.log == ["start engine", "start front-0"]
    world.settle()
    assert world.fleet.has_reached(READY)


def test_a_drain_ends_the_front_ends_before_the_engine() -> None:
    world = ready()
    world.fleet.drain()
    assert world.log == ["drain front-0", "drain front-1", "flush engine"]
    world.ends(world.one(FRONT))
    assert "drain engine" not in world.log
    world.settle()

    assert world.log[-1] == "drain engine"
    assert world.fleet.members == {}


def test_a_drain_kills_a_front_end_that_does_not_listen_yet() -> None:
    world = World(1)
    world.fleet.drain()
    world.settle()

    assert world.log[2:] == ["kill front-0", "flush engine", "drain engine"]
    assert world.fleet.members == {}


def test_an_engine_that_ends_during_a_drain_is_not_replaced() -> None:
    world = ready()
    world.fleet.drain()
    world.ends(world.one(ENGINE))
    world.settle()

    assert "start engine" not in world.log
    assert world.fleet.members == {}


@pytest.mark.parametrize("seed", range(200))
def test_the_fleet_recovers_after_any_sequence_of_events(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.randint(1, 4))
    for _ in range(chance.randint(1, 60)):
        members = list(world.fleet.members.values())
        member = chance.choice(members) if members else None
        match chance.choice(("said", "said", "said", "ended", "time", "replace", "unlinked", "asked", "signal")):
            case "said" if member:
                world.says(member, chance.choice((LISTENING, READY)))
            case "ended" if member:
                world.ends(member)
            case "asked" if world.ended_on_request:
                world.fleet.on_exit(chance.choice(sorted(world.ended_on_request)), world.now)
            case "signal" if member:
                world.fleet.on_signal(member.number, world.now)
            case "unlinked" if member:
                world.fleet.on_disconnect(member.number)
            case "replace":
                world.fleet.replace()
            case _:
                world.passes(chance.random() * 3)
        serving = world.fleet.members_of(world.fleet.generation, ENGINE)
        assert len(serving) <= 1
        assert not any(each.state == DRAINING for each in serving)
        assert len(world.fleet.members_of(world.fleet.generation, FRONT)) <= world.fleet.fronts
    world.settle()

    fleet = world.fleet
    assert fleet.has_reached(READY)
    assert len(fleet.members) == fleet.fronts + 1
    engine = fleet.members_of(fleet.generation, ENGINE)[0]
    assert all((front.number, engine.number) in world.paired for front in fleet.members_of(fleet.generation, FRONT))
    fleet.drain()
    world.settle()
    assert fleet.members == {}
