from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.perf.generator import reconnecting
from penstock.perf.generator.reconnecting import Reconnector
from penstock.perf.generator.recording import Recorder
from tests.perf.generator.fakes import Wires


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_PAUSE_S", 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the time in seconds, to be moved on."""
    now = [1]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0] * 1_000_000_000)
    return now


def test_a_server_that_is_unreachable_for_a_moment_is_not_dead(clock: list[int]) -> None:
    async def case() -> None:
        wires, recorder = Wires(), Recorder()
        openings = Reconnector(wires, recorder, dead_after_s=3)
        wires.refusing = True
        opening = asyncio.ensure_future(openings.reconnect(lambda reason: None))
        for clock[0] in (1, 2, 3):
            for _ in range(10):
                await asyncio.sleep(0)
        wires.refusing = False

        assert await opening is wires.opened[0]
        assert recorder.failure == ""

    asyncio.run(case())


def test_a_server_that_stays_unreachable_is_dead(clock: list[int]) -> None:
    async def case() -> None:
        wires, recorder = Wires(), Recorder()
        openings = Reconnector(wires, recorder, dead_after_s=3)
        wires.refusing = True
        opening = asyncio.ensure_future(openings.reconnect(lambda reason: None))
        for _ in range(10):
            await asyncio.sleep(0)
        clock[0] = 5

        assert await opening is None
        assert recorder.failure == "nobody listens"

    asyncio.run(case())


def test_a_server_that_closes_every_connection_unanswered_is_dead(clock: list[int]) -> None:
    recorder = Recorder()
    openings = Reconnector(Wires(), recorder, dead_after_s=3)

    for clock[0] in (1, 2, 3, 4):
        openings.on_failure("reset by peer")
        assert recorder.failure == ""
    clock[0] = 5
    openings.on_failure("reset by peer")

    assert recorder.failure == "reset by peer"


def test_a_server_that_still_answers_others_is_not_dead(clock: list[int]) -> None:
    recorder = Recorder()
    openings = Reconnector(Wires(), recorder, dead_after_s=3)

    for clock[0] in range(1, 30):
        openings.on_failure("reset by peer")
        recorder.last_answer_ns = clock[0] * 1_000_000_000

    assert recorder.failure == ""


def test_repeated_failures_delay_the_next_connection(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    recorder = Recorder()
    openings = Reconnector(Wires(), recorder, dead_after_s=3)
    openings.on_failure("reset by peer")
    asyncio.run(openings.reconnect(lambda reason: None))
    assert not pauses

    clock[0] += 1
    asyncio.run(openings.reconnect(lambda reason: None))
    assert len(pauses) == 1

    recorder.last_answer_ns = clock[0] * 1_000_000_000
    asyncio.run(openings.reconnect(lambda reason: None))
    assert len(pauses) == 1


def test_connections_are_made_without_delay_until_failures_repeat(
    clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        pauses: list[float] = []

        async def slept(seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(reconnecting, "_PAUSE_S", 0.5)
        monkeypatch.setattr(asyncio, "sleep", slept)
        openings = Reconnector(Wires(), Recorder())
        openings.on_failure("the server closed the connection")
        await openings.reconnect(lambda reason: None)
        assert pauses == []
        clock[0] = 2
        await openings.reconnect(lambda reason: None)
        assert pauses == [0.5]

    asyncio.run(case())


def test_connecting_gives_up_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_CONNECT_LIMIT_S", 0)

    class Silent(Wires):
        async def open(self, on_lost: Any) -> Any:
            await asyncio.Event().wait()

    async def case() -> None:
        with pytest.raises(ConnectionError, match="no connection within 0 s"):
            await Reconnector(Silent(), Recorder()).connect(lambda reason: None)

    asyncio.run(case())
