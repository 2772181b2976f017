"""The closed loop: a fixed number of requests in flight. Each slot sends its next once its last is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .carriers import Carrier
from .fixed_connections import FixedConnections
from .orders import Load, Part
from .pacing import HALT_LIMIT_S, UNANSWERED, EndingSlot, IdleEvent, LoadContext

_NOTHING: Callable[[], bytes] = iter(()).__next__


class _Slot:
    """One request in flight, repeatedly, until there is none to draw; then `idle` is called.

    A request is timed from the arrival of the previous answer, so drawing it is part of its time.
    """

    __slots__ = ("_idle", "_recorder", "_sent_ns", "carrier", "draw", "number", "stream", "working")

    def __init__(self, number: int, context: LoadContext, idle: Callable[[_Slot], None]) -> None:
        self.number = number
        self.carrier: Carrier
        self.stream = context.payloads.stream(number)
        self.draw = _NOTHING
        self.working = False
        self._recorder = context.recorder
        self._idle = idle
        self._sent_ns = 0

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        self._recorder.on_responses(earlier_ns, count)

    def on_answer(self, now_ns: int, error: str) -> None:
        recorder = self._recorder
        recorder.last_answer_ns = now_ns
        if error:
            recorder.fail(error)
        else:
            recorder.starts.append(self._sent_ns)
            recorder.ends.append(now_ns)
        self.proceed(now_ns)

    def on_lost(self, now_ns: int, reason: str) -> None:
        self._recorder.fail(f"connection lost: {reason}")
        self.proceed(now_ns)

    def proceed(self, now_ns: int) -> None:
        """Send the next request."""
        try:
            request = self.draw()
        except StopIteration:
            self._idle(self)
        else:
            self._sent_ns = now_ns
            self.carrier.send(request, self)


class ClosedLoop:
    """Keeps `load.concurrency` requests in flight. Connections, slots and their streams are kept from load to load."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._idle_event = IdleEvent()
        self._connections = FixedConnections(context.openings)
        self._slots: dict[int, _Slot] = {}
        self._draws: dict[int, Callable[[], bytes]] = {}
        self._working = 0

    async def ready(self, load: Load) -> None:
        part = self._context.part
        numbers = part.slots(load.concurrency)
        for number in numbers:
            if number not in self._slots:
                slot = _Slot(number, self._context, self._idle)
                await self._connections.add(slot)
                self._slots[number] = slot
        await self._connections.ready()
        request_count = Part(part.number, min(part.of, load.concurrency)).share(load.requests)
        budget = iter(range(request_count)) if load.requests else None
        self._draws = {number: _limited(self._slots[number].stream, budget) for number in numbers}

    def start(self, start_ns: int) -> None:
        for number, slot in self._slots.items():
            slot.draw = self._draws.get(number, _NOTHING)
        for number in self._draws:
            if not self._slots[number].working:
                self._begin(self._slots[number])

    def stop(self) -> None:
        for slot in self._slots.values():
            slot.draw = _NOTHING

    async def halt(self) -> None:
        self.stop()
        if not await self._idle_event.wait(self.in_flight, HALT_LIMIT_S):
            self._fail_in_flight()

    def in_flight(self) -> int:
        return self._working

    def behind_ns(self) -> int:
        return 0

    def close(self) -> None:
        self._connections.close()

    def _begin(self, slot: _Slot) -> None:
        slot.working = True
        self._working += 1
        slot.proceed(time.monotonic_ns())

    def _idle(self, slot: _Slot) -> None:
        """Send the request that ends what the slot leaves open. After that, another load may use the slot."""
        request = None if self._context.recorder.failure else self._context.payloads.ending(slot.number)
        if request is None:
            self._on_end(slot)
        else:
            slot.carrier.send(request, EndingSlot(partial(self._on_end, slot)))

    def _on_end(self, slot: _Slot) -> None:
        slot.working = False
        self._working -= 1
        if not self._working:
            self._idle_event.set()

    def _fail_in_flight(self) -> None:
        self._connections.close()
        for slot in self._slots.values():
            if slot.working:
                slot.working = False
                self._context.recorder.fail(UNANSWERED)
        self._working = 0


def _limited(stream: Iterator[bytes], budget: Iterator[int] | None) -> Callable[[], bytes]:
    return stream.__next__ if budget is None else (request for _, request in zip(budget, stream, strict=False)).__next__
