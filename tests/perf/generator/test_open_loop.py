from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from penstock.perf.generator import open_loop, reconnecting
from penstock.perf.generator.open_loop import OpenLoop
from penstock.perf.generator.orders import Load
from penstock.perf.generator.pacing import LoadContext
from tests.perf.generator.fakes import Bell, Wires, context

Case = Callable[[Wires], Awaitable[None]]
RATE = 1e6
DUE = [0, 1000, 2000, 3000, 4000]


def run(case: Case, wires: Wires | None = None) -> None:
    asyncio.run(case(wires or Wires()))  # type: ignore[arg-type]


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started_loop(load_context: LoadContext, load: Load) -> OpenLoop:
    """Begin a schedule of long ago: all of it is due at once, on a clock that began then."""
    loop = OpenLoop(load_context)
    await loop.ready(load)
    loop.start(0)
    return loop


def test_all_due_requests_are_sent_at_once_each_on_its_own_connection() -> None:
    async def case(wires: Wires) -> None:
        loop = await started_loop(context(wires), Load(rate_per_s=RATE, requests=5))

        assert wires.requests == [b"0.0", b"0.1", b"0.2", b"0.3", b"0.4"]
        assert len({wire for wire, _ in wires.sent}) == 5
        assert loop.in_flight() == 5
        loop.close()

    run(case)


def test_latency_is_measured_from_when_the_request_was_due() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        before_ns = time.monotonic_ns()
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=5))
        for wire, _ in wires.sent:
            wires.opened[wire].answer(7_000)

        window = load_context.recorder.take()
        assert window.starts_ns.tolist() == DUE
        assert window.latencies_ns.tolist() == [7000, 6000, 5000, 4000, 3000]
        assert (window.late_ns >= before_ns - 4000).all()
        loop.close()

    run(case)


def test_without_a_free_connection_requests_wait_in_order_and_are_counted() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=5, connections=2))
        assert loop.behind_ns() > 0
        for number in (1, 1, 0, 0, 1):
            wires.opened[number].answer(9_000)

        window = load_context.recorder.take(loop.in_flight(), loop.behind_ns())
        assert [wire for wire, _ in wires.sent] == [1, 0, 1, 1, 0]
        assert wires.requests == [b"0.0", b"0.1", b"0.2", b"0.3", b"0.4"]
        assert sorted(window.starts_ns.tolist()) == DUE
        assert (window.waited_for_connection, window.behind_ns, window.in_flight) == (3, 0, 0)
        loop.close()

    run(case)


def test_connections_are_opened_as_needed_up_to_the_maximum() -> None:
    async def case(wires: Wires) -> None:
        loop = await started_loop(context(wires), Load(rate_per_s=RATE, requests=60, connections=40))
        for _ in range(60):
            await turns()

        assert (len(wires.opened), len(wires.sent)) == (40, 40)
        loop.close()

    run(case)


def test_the_most_recently_freed_connection_is_used_first() -> None:
    async def case(wires: Wires) -> None:
        loop = await started_loop(context(wires), Load(rate_per_s=RATE, requests=3))
        first, second, third = (wires.opened[wire] for wire, _ in wires.sent)
        for wire in (first, third, second):
            wire.answer()
        await loop.ready(Load(rate_per_s=RATE, requests=2))
        loop.start(0)

        assert [wire for wire, _ in wires.sent[3:]] == [second.number, third.number]
        loop.close()

    run(case)


def test_slots_of_one_connection_are_used_together() -> None:
    async def case(wires: Wires) -> None:
        loop = await started_loop(context(wires), Load(rate_per_s=RATE, requests=8, connections=2))

        assert sorted(wire for wire, _ in wires.sent) == [0, 0, 0, 0, 1, 1, 1, 1]
        loop.close()

    run(case, Wires(slots_each=4))


def test_a_lost_connection_is_replaced_and_not_used_again() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=3, connections=1))
        load_context.recorder.last_answer_ns = 1 << 62  # answers came since: no pause
        wires.opened[0].end("reset by peer")
        await turns()

        assert wires.sent == [(0, b"0.0"), (1, b"0.1")]
        assert load_context.recorder.take().errors == {"connection lost: reset by peer": 1}
        loop.close()

    run(case)


def test_an_idle_connection_closed_by_the_server_is_not_an_error() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=1))
        for wire in wires.opened[1:-1]:
            wire.end("")
        await loop.ready(Load(rate_per_s=RATE, requests=2))
        loop.start(0)

        assert load_context.recorder.take().errors == {}
        assert len(wires.sent) == 3
        loop.close()

    run(case)


def test_a_server_that_does_not_come_back_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "_PAUSE_S", 0)

    async def case(wires: Wires) -> None:
        load_context = context(wires, dead_after_s=0)
        lost = asyncio.Event()
        load_context.recorder.on_failure = lambda reason: lost.set()
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=9, connections=1))
        wires.refusing = True
        wires.opened[0].end("reset by peer")
        await lost.wait()

        assert load_context.recorder.take().failure
        loop.close()

    run(case)


def test_an_error_answer_is_counted_without_a_latency() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=2))
        wires.opened[wires.sent[0][0]].answer(7_000, "503: full")
        wires.opened[wires.sent[1][0]].answer(7_000)

        window = load_context.recorder.take()
        assert (window.errors, len(window.ends_ns), len(window.late_ns)) == ({"503: full": 1}, 1, 1)
        assert loop.in_flight() == 0
        loop.close()

    run(case)


def test_halting_waits_for_requests_in_flight_and_counts_their_answers() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=2))
        halting = asyncio.ensure_future(loop.halt())
        for wire, _ in wires.sent:
            await turns()
            assert not halting.done()
            wires.opened[wire].answer(7_000)
        await turns()

        assert halting.done()
        assert len(load_context.recorder.take().ends_ns) == 2
        loop.close()

    run(case)


def test_the_alarm_is_silent_while_nothing_can_be_sent_and_once_all_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    monkeypatch.setattr(open_loop, "alarm", lambda ring: bell)
    much_later_us = 1e12

    async def case(wires: Wires) -> None:
        loop = OpenLoop(context(wires))
        await loop.ready(Load(intervals_us=(0.0, 0.0, much_later_us), requests=3, connections=1))
        start_ns = time.monotonic_ns()
        loop.start(start_ns)
        assert (len(wires.sent), bell.messages) == (1, ["silent"])  # one more is due, and no place is free
        wires.opened[0].answer()
        assert (len(wires.sent), bell.messages[1:]) == (2, [f"set {start_ns + int(much_later_us * 1e3)}"])
        loop.close()

        bell.messages.clear()
        loop = await started_loop(context(wires), Load(rate_per_s=RATE, requests=1))
        assert bell.messages == ["silent"]
        loop.close()

    run(case)


def test_halting_sends_nothing_more_and_gives_up_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_loop, "HALT_LIMIT_S", 0)

    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = await started_loop(load_context, Load(rate_per_s=RATE, requests=9, connections=2))
        await loop.halt()

        assert (len(wires.sent), loop.in_flight(), load_context.recorder.take().errors.total()) == (2, 0, 2)
        assert all(wire.closed for wire in wires.opened)
        loop.close()

    run(case)


def test_requests_not_yet_due_wait_for_the_alarm() -> None:
    async def case(wires: Wires) -> None:
        load_context = context(wires)
        loop = OpenLoop(load_context)
        await loop.ready(Load(rate_per_s=1000, requests=3))
        loop.start(time.monotonic_ns() + 1_000_000)
        assert wires.sent == []
        while len(wires.sent) < 3:
            await turns()
        for wire, _ in wires.sent:
            wires.opened[wire].answer(time.monotonic_ns())

        assert (load_context.recorder.take().late_ns >= 0).all()
        loop.close()

    run(case)
