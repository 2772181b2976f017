from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.perf.generator import serial_loop
from penstock.perf.generator.orders import Load
from penstock.perf.generator.pacing import LoadContext
from penstock.perf.generator.serial_loop import SerialLoop
from tests.perf.generator.fakes import Bell, Numbered, Wires, context

RATE = 1e6


def run(case: Callable[[Wires], Awaitable[None]]) -> None:
    asyncio.run(case(Wires()))  # type: ignore[arg-type]


async def started_loop(load_context: LoadContext, load: Load) -> SerialLoop:
    """Begin a schedule of long ago: all of it is due at once."""
    loop = SerialLoop(load_context)
    await loop.ready(load)
    loop.start(0)
    return loop


def load(requests: int) -> Load:
    return Load(rate_per_s=RATE, requests=requests, sequences=2)


def test_a_sequence_has_one_request_in_flight_and_its_others_wait() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, load(5))
        assert wires.sent == [(0, b"0.0"), (1, b"1.0")]
        assert loop.behind_ns() > 0
        for _ in range(3):
            wires.opened[0].answer(9_000)

        window = load_context.recorder.take()
        assert wires.requests == [b"0.0", b"1.0", b"0.1", b"0.2"]
        assert window.starts_ns.tolist() == [0, 2000, 4000]
        assert (window.waited_for_connection, loop.in_flight()) == (2, 1)
        loop.close()

    run(case)


def test_a_lost_request_is_an_error_and_the_sequence_continues() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, load(3))
        load_context.recorder.last_answer_ns = 1 << 62  # answers came since: no pause
        wires.opened[0].end("reset by peer")
        for _ in range(8):
            await asyncio.sleep(0)

        assert wires.sent[2:] == [(2, b"0.1")]
        assert load_context.recorder.take().errors == {"connection lost: reset by peer": 1}
        loop.close()

    run(case)


def test_an_error_answer_is_counted_and_the_sequence_continues() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, load(3))
        wires.opened[0].answer(9_000, "503: full")
        wires.opened[0].answer(9_000)

        window = load_context.recorder.take()
        assert (wires.requests[2:], window.errors, window.starts_ns.tolist()) == ([b"0.1"], {"503: full": 1}, [2000])
        assert len(window.late_ns) == 1
        loop.close()

    run(case)


def test_the_alarm_is_silent_once_all_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    monkeypatch.setattr(serial_loop, "alarm", lambda ring: bell)

    async def case(wires: Wires) -> None:
        loop = await started_loop(context(wires), load(2))
        assert bell.messages == ["silent"]
        loop.close()

    run(case)


def test_halting_drops_waiting_requests_and_ends_the_sequences() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires, Numbered(sequences=True))
        loop = await started_loop(load_context, load(6))
        halting = asyncio.ensure_future(loop.halt())
        for _ in range(2):
            for wire in wires.opened:
                await asyncio.sleep(0)
                wire.answer()
            for _ in range(8):
                await asyncio.sleep(0)
        await halting

        assert wires.requests == [b"0.0", b"1.0", b"0.end", b"1.end"]
        assert (len(load_context.recorder.take().ends_ns), loop.in_flight()) == (2, 0)
        loop.close()

    run(case)


def test_halting_gives_up_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial_loop, "HALT_LIMIT_S", 0)

    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, load(2))
        await loop.halt()

        assert (load_context.recorder.take().errors.total(), loop.in_flight()) == (2, 0)
        assert all(wire.closed for wire in wires.opened)
        loop.close()

    run(case)
