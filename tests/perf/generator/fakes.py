"""Connections without a network: what is sent on them is looked at, and answered when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from penstock.perf.generator.carriers import Slot
from penstock.perf.generator.orders import Part
from penstock.perf.generator.pacing import LoadContext
from penstock.perf.generator.reconnecting import Reconnector
from penstock.perf.generator.recording import Recorder


class Wire:
    """One connection. `in_flight`: the requests without an answer, oldest first."""

    def __init__(self, number: int, on_lost: Callable[[str], None], sent: list[tuple[int, bytes]]) -> None:
        self.number = number
        self.on_lost = on_lost
        self.closed = False
        self.in_flight: list[Slot] = []
        self._sent = sent

    def send(self, request: bytes, slot: Slot) -> None:
        self._sent.append((self.number, request))
        self.in_flight.append(slot)

    def close(self) -> None:
        self.closed = True

    def answer(self, now_ns: int = 0, error: str = "") -> None:
        """Answer the oldest request."""
        self.in_flight.pop(0).on_answer(now_ns, error)

    def end(self, reason: str) -> None:
        """End by itself."""
        self.on_lost(reason)
        slots, self.in_flight = self.in_flight, []
        for slot in slots:
            slot.on_lost(0, reason)


class Wires:
    """Opens them. `sent`: which wire, and what, of all of them in order; `refusing`: nobody listens."""

    def __init__(self, slots_each: int = 1) -> None:
        self.slots_each = slots_each
        self.sent: list[tuple[int, bytes]] = []
        self.opened: list[Wire] = []
        self.refusing = False

    async def open(self, on_lost: Callable[[str], None]) -> Wire:
        if self.refusing:
            raise ConnectionRefusedError("nobody listens")
        self.opened.append(Wire(len(self.opened), on_lost, self.sent))
        return self.opened[-1]

    @property
    def requests(self) -> list[bytes]:
        """What was sent, wherever."""
        return [request for _, request in self.sent]


class Bell:
    """An alarm that never rings by itself. `said`: what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def set(self, at_ns: int) -> None:
        self.messages.append(f"set {at_ns}")

    def disarm(self) -> None:
        self.messages.append("silent")

    def close(self) -> None:
        """It holds nothing."""


class Numbered:
    """Payloads that tell whose they are: `0.0`, `0.1`, ... of slot 0; `0.end` where `sequences`."""

    rows = 1

    def __init__(self, *, sequences: bool = False) -> None:
        self._sequences = sequences

    def stream(self, slot: int) -> Iterator[bytes]:
        return (b"%d.%d" % (slot, number) for number in itertools.count())

    def ending(self, slot: int) -> bytes | None:
        return b"%d.end" % slot if self._sequences else None


def context(
    wires: Wires,
    payloads: Numbered | None = None,
    part: Part = Part(),  # noqa: B008
    dead_after_s: float = 5.0,
) -> LoadContext:
    """Give what a pacing works with."""
    recorder = Recorder()
    return LoadContext(Reconnector(wires, recorder, dead_after_s), payloads or Numbered(), recorder, part)
