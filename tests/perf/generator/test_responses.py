"""What a good answer over a stream was made of, from the slots of each pacing to the window."""

from __future__ import annotations

import asyncio

import pytest

from penstock.perf.generator import open_loop as opening
from penstock.perf.generator import serial_loop
from penstock.perf.generator.closed_loop import ClosedLoop
from penstock.perf.generator.orders import Load
from penstock.perf.generator.pacing import EndingSlot, LoadContext, Pacing
from penstock.perf.generator.serial_loop import SerialLoop
from tests.perf.generator.fakes import Bell, Wires, context

RATE = Load(rate_per_s=1e6, requests=2)
PACINGS = [
    (ClosedLoop, Load(concurrency=1)),
    (opening.OpenLoop, RATE),
    (SerialLoop, Load(rate_per_s=1e6, requests=2, sequences=1)),
]


@pytest.mark.parametrize(("pacing", "load"), PACINGS, ids=["closed", "open", "serial"])
def test_responses_are_recorded_with_their_request(
    pacing: type[ClosedLoop | opening.OpenLoop | SerialLoop], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "alarm", lambda ring: Bell())
    monkeypatch.setattr(serial_loop, "alarm", lambda ring: Bell())

    async def case(load_context: LoadContext, wires: Wires) -> None:
        loop: Pacing = pacing(load_context)
        await loop.ready(load)
        loop.start(0)
        wire = next(wire for wire in wires.opened if wire.in_flight)
        wire.in_flight[0].on_responses([3, 4], 2)
        wire.answer(5)

        window = load_context.recorder.take()
        assert (window.ends_ns.tolist(), window.earlier_counts.tolist(), window.earlier_ns.tolist()) == (
            [5],
            [2],
            [3, 4],
        )
        assert window.responses == 2
        loop.close()

    wires = Wires()
    asyncio.run(case(context(wires), wires))


def test_responses_to_the_end_of_a_sequence_are_not_recorded() -> None:
    ended: list[bool] = []
    slot = EndingSlot(lambda: ended.append(True))
    slot.on_responses([1], 2)
    slot.on_answer(3, "")

    assert ended == [True]
