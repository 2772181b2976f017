from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.perf.generator import closed_loop, reconnecting
from penstock.perf.generator.closed_loop import ClosedLoop
from penstock.perf.generator.orders import Load, Part
from tests.perf.generator.fakes import Numbered, Wires, context

Case = Callable[[Wires], Awaitable[None]]


def run(case: Case, wires: Wires | None = None) -> None:
    asyncio.run(case(wires or Wires()))  # type: ignore[arg-type]


async def turns(count: int = 8) -> None:
    """Let what the loop has to do be done."""
    for _ in range(count):
        await asyncio.sleep(0)


async def going(loop: ClosedLoop, load: Load) -> None:
    await loop.ready(load)
    loop.start(0)


def test_a_slot_sends_its_next_request_when_its_last_is_answered() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        await going(ClosedLoop(load_context), Load(concurrency=2))
        wires.opened[0].answer(100)
        wires.opened[0].answer(250)

        assert wires.requests == [b"0.0", b"1.0", b"0.1", b"0.2"]
        window = load_context.recorder.take()
        assert window.ends_ns.tolist() == [100, 250]
        assert window.starts_ns.tolist()[1] == 100

    run(case)


def test_an_error_answer_is_counted_without_a_latency() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        await going(ClosedLoop(load_context), Load(concurrency=1))
        wires.opened[0].answer(5, "503: busy")

        window = load_context.recorder.take()
        assert (window.errors, len(window.ends_ns)) == ({"503: busy": 1}, 0)
        assert wires.requests == [b"0.0", b"0.1"]

    run(case)


def test_a_higher_level_keeps_existing_connections_and_streams() -> None:
    async def case(wires: Wires) -> None:
        loop = ClosedLoop(context(wires))
        await going(loop, Load(concurrency=2))
        await going(loop, Load(concurrency=3))
        wires.opened[1].answer()

        assert wires.sent == [(0, b"0.0"), (1, b"1.0"), (2, b"2.0"), (1, b"1.1")]

    run(case)


def test_slots_above_a_lower_level_finish_stop_and_resume_at_a_higher_level() -> None:
    async def case(wires: Wires) -> None:
        loop = ClosedLoop(context(wires))
        await going(loop, Load(concurrency=2))
        await going(loop, Load(concurrency=1))
        wires.opened[1].answer()
        assert loop.in_flight() == 1
        await going(loop, Load(concurrency=2))

        assert wires.sent == [(0, b"0.0"), (1, b"1.0"), (1, b"1.1")]

    run(case)


def test_a_process_has_the_same_slots_at_every_level() -> None:
    async def case(wires: Wires) -> None:
        loop = ClosedLoop(context(wires, part=Part(1, 3)))
        await going(loop, Load(concurrency=3))
        await going(loop, Load(concurrency=8))

        assert wires.requests == [b"1.0", b"4.0", b"7.0"]

    run(case)


def test_slots_share_a_connection_that_carries_several_requests() -> None:
    async def case(wires: Wires) -> None:
        await going(ClosedLoop(context(wires)), Load(concurrency=5))

        assert [wire for wire, _ in wires.sent] == [0, 0, 1, 1, 2]

    run(case, Wires(slots_each=2))


def test_halting_waits_for_requests_in_flight() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = ClosedLoop(load_context)
        await going(loop, Load(concurrency=2))
        halting = asyncio.ensure_future(loop.halt())
        await turns()
        wires.opened[0].answer()
        await turns()
        assert not halting.done()
        wires.opened[1].answer()
        await halting

        assert (len(wires.sent), len(load_context.recorder.take().ends_ns), loop.in_flight()) == (2, 2, 0)

    run(case)


def test_halting_gives_up_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "HALT_LIMIT_S", 0)

    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = ClosedLoop(load_context)
        await going(loop, Load(concurrency=2))
        await loop.halt()

        assert (load_context.recorder.take().errors.total(), loop.in_flight()) == (2, 0)
        assert [wire.closed for wire in wires.opened] == [True, True]
        await going(loop, Load(concurrency=1))
        assert wires.sent[-1] == (2, b"0.1")

    run(case)


def test_stopping_a_slot_ends_its_sequence_without_recording_the_end() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires, Numbered(sequences=True))
        loop = ClosedLoop(load_context)
        await going(loop, Load(concurrency=1))
        loop.stop()
        wires.opened[0].answer()
        assert (wires.requests, loop.in_flight()) == ([b"0.0", b"0.end"], 1)
        wires.opened[0].answer()

        assert (loop.in_flight(), len(load_context.recorder.take().ends_ns)) == (0, 1)

    run(case)


@pytest.mark.parametrize(("number", "own"), [(0, 4), (1, 3), (2, 0)])
def test_a_number_of_requests_is_divided_among_processes_with_slots(number: int, own: int) -> None:
    async def case(wires: Wires) -> None:
        loop = ClosedLoop(context(wires, part=Part(number, 3)))
        await going(loop, Load(concurrency=2, requests=7))
        while loop.in_flight():
            wires.opened[0].answer()

        assert len(wires.sent) == own

    run(case)


def test_a_lost_request_is_an_error_and_its_slot_reconnects() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        await going(ClosedLoop(load_context), Load(concurrency=1))
        wires.opened[0].answer(1)
        wires.opened[0].end("reset by peer")
        load_context.recorder.last_answer_ns = 1 << 62  # answers came since: no pause
        await turns()

        assert wires.sent == [(0, b"0.0"), (0, b"0.1"), (1, b"0.2")]
        assert load_context.recorder.take().errors == {"connection lost: reset by peer": 1}

    run(case)


def test_an_orderly_close_by_the_server_is_not_an_error() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        await going(ClosedLoop(load_context), Load(concurrency=1))
        wires.opened[0].on_lost("")
        wires.opened[0].answer(9)
        await turns()

        window = load_context.recorder.take()
        assert (wires.sent, window.errors, window.ends_ns.tolist()) == ([(0, b"0.0"), (1, b"0.1")], {}, [9])

    run(case)


def test_a_server_that_does_not_come_back_ends_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnecting, "_PAUSE_S", 0)

    async def case(wires: Wires) -> None:
        load_context = context(wires, dead_after_s=0)
        loop = ClosedLoop(load_context)
        load_context.recorder.on_failure = lambda reason: loop.stop()
        await going(loop, Load(concurrency=2))
        wires.refusing = True
        for wire in wires.opened:
            wire.end("reset by peer")
        await loop.halt()

        window = load_context.recorder.take()
        assert (window.failure, loop.in_flight()) == ("reset by peer", 0)
        assert window.failed_ns > 0

    run(case)


def test_an_unreachable_server_is_an_error_at_once() -> None:
    async def case(wires: Wires) -> None:
        wires.refusing = True
        with pytest.raises(OSError, match="nobody listens"):
            await ClosedLoop(context(wires)).ready(Load(concurrency=1))

    run(case)
