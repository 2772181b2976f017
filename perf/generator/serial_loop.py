"""The open loop of serial sequences: each has at most one request in flight; its others wait their turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import cycle

from .alarm import alarm
from .fixed_connections import FixedConnections
from .orders import Load
from .pacing import HALT_LIMIT_S, NEVER_NS, UNANSWERED, EndingSlot, IdleEvent, LoadContext, TimedSlot
from .schedule import due_ns


class _Sequence(TimedSlot):
    """One sequence, whose requests wait for each other; the wait is part of their time."""

    def __init__(self, number: int, stream: Iterator[bytes], loop: SerialLoop) -> None:
        super().__init__(loop.recorder, loop.proceed)
        self.number = number
        self.waiting: deque[int] = deque()
        self.busy = False
        self._draw = stream.__next__

    def send_next(self) -> None:
        """Send the request that has waited longest."""
        self.send(self._draw(), self.waiting.popleft())


class SerialLoop:
    """Follows a schedule, dealt to the sequences in turn. Each sequence has its own room on a connection."""

    def __init__(self, context: LoadContext) -> None:
        self.recorder = context.recorder
        self._context = context
        self._alarm = alarm(self._wake)
        self._quiet = IdleEvent()
        self._connections = FixedConnections(context.openings)
        self._sequences: dict[int, _Sequence] = {}
        self._turn: Iterator[_Sequence] = iter(())
        self._times: Iterator[int] = iter(())
        self._due_ns = NEVER_NS
        self._busy = 0

    async def ready(self, load: Load) -> None:
        numbers = self._context.part.slots(load.sequences)
        for number in numbers:
            if number not in self._sequences:
                sequence = _Sequence(number, self._context.payloads.stream(number), self)
                await self._connections.add(sequence)
                self._sequences[number] = sequence
        await self._connections.ready()
        self._next = (due_ns(load, self._context.part), cycle([self._sequences[number] for number in numbers]))

    def start(self, start_ns: int) -> None:
        times, self._turn = self._next
        self._times = (start_ns + at_ns for at_ns in times)
        self._due_ns = next(self._times, NEVER_NS)
        self._wake()

    def stop(self) -> None:
        self._alarm.disarm()
        self._due_ns = NEVER_NS
        for sequence in self._sequences.values():
            sequence.waiting.clear()

    async def halt(self) -> None:
        self.stop()
        if not await self._quiet.wait(self.in_flight, HALT_LIMIT_S):
            self._fail_in_flight()
        if not self.recorder.failure:
            self._end_sequences()
            await self._quiet.wait(self.in_flight, HALT_LIMIT_S)

    def in_flight(self) -> int:
        return self._busy

    def behind_ns(self) -> int:
        oldest = min((each.waiting[0] for each in self._sequences.values() if each.waiting), default=self._due_ns)
        return max(time.monotonic_ns() - oldest, 0)

    def close(self) -> None:
        self.stop()
        self._alarm.close()
        self._connections.close()

    def proceed(self, sequence: _Sequence) -> None:
        """Handle the end of a sequence's request."""
        if sequence.waiting:
            self.recorder.waited_for_connection += 1
            sequence.send_next()
        else:
            self._idle(sequence)

    def _idle(self, sequence: _Sequence) -> None:
        sequence.busy = False
        self._busy -= 1
        if not self._busy:
            self._quiet.set()

    def _wake(self) -> None:
        now_ns, at_ns = time.monotonic_ns(), self._due_ns
        while at_ns <= now_ns:
            sequence = next(self._turn)
            sequence.waiting.append(at_ns)
            if not sequence.busy:
                sequence.busy = True
                self._busy += 1
                sequence.send_next()
            at_ns = next(self._times, NEVER_NS)
        self._due_ns = at_ns
        if at_ns == NEVER_NS:
            self._alarm.disarm()
        else:
            self._alarm.set(at_ns)

    def _fail_in_flight(self) -> None:
        self._connections.close()
        for sequence in self._sequences.values():
            if sequence.busy:
                self.recorder.fail(UNANSWERED)
                self._idle(sequence)

    def _end_sequences(self) -> None:
        for sequence in self._sequences.values():
            request = self._context.payloads.ending(sequence.number)
            if request is not None:
                sequence.busy = True
                self._busy += 1
                sequence.carrier.send(request, EndingSlot(partial(self._idle, sequence)))
