"""Pacing: what the closed and open loops share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .carriers import Carrier
from .orders import Load, Part, Payloads
from .reconnecting import Reconnector
from .recording import Recorder

HALT_LIMIT_S = 10.0
"""The longest wait for requests in flight when a load halts."""
UNANSWERED = f"no answer within {HALT_LIMIT_S:.0f} s of the load's end"
NEVER_NS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a process uses to drive any load."""

    openings: Reconnector
    payloads: Payloads
    recorder: Recorder
    part: Part


class Pacing(Protocol):
    """Sends requests, one load after the other. Threads: its loop's."""

    async def ready(self, load: Load) -> None:
        """Prepare a load. Raises: OSError if the server cannot be reached, ValueError."""

    def start(self, start_ns: int) -> None:
        """Begin the prepared load."""

    def stop(self) -> None:
        """Stop sending."""

    async def halt(self) -> None:
        """Stop sending, and wait for requests in flight, for a limited time; then end open sequences."""

    def in_flight(self) -> int:
        """Return how many requests have no answer yet."""
        ...

    def behind_ns(self) -> int:
        """Return for how long the next request has been due."""
        ...

    def close(self) -> None:
        """Close all connections."""


class TimedSlot:
    """A slot of an open loop: its request is timed from when it was due. `ended` is called at each end."""

    __slots__ = ("_due_ns", "_late_ns", "_on_end", "_recorder", "carrier")

    def __init__(self, recorder: Recorder, on_end: Callable[[Any], None]) -> None:
        self.carrier: Carrier
        self._recorder = recorder
        self._on_end = on_end
        self._due_ns = self._late_ns = 0

    def send(self, request: bytes, due_ns: int) -> None:
        self._due_ns = due_ns
        self._late_ns = time.monotonic_ns() - due_ns
        self.carrier.send(request, self)

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        self._recorder.on_responses(earlier_ns, count)

    def on_answer(self, now_ns: int, error: str) -> None:
        recorder = self._recorder
        recorder.last_answer_ns = now_ns
        if error:
            recorder.fail(error)
        else:
            recorder.starts.append(self._due_ns)
            recorder.ends.append(now_ns)
            recorder.late.append(self._late_ns)
        self._on_end(self)

    def on_lost(self, now_ns: int, reason: str) -> None:
        self._recorder.fail(f"connection lost: {reason}")
        self._on_end(self)


class EndingSlot:
    """A slot for the request that ends a sequence; it records nothing."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        pass

    def on_answer(self, now_ns: int, error: str) -> None:
        self._on_end()

    def on_lost(self, now_ns: int, reason: str) -> None:
        self._on_end()


class IdleEvent:
    """Waits until nothing is in flight."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, in_flight: Callable[[], int], seconds: float) -> bool:
        """Wait up to `seconds`. Returns: whether nothing is in flight any more."""
        self._event.clear()
        if in_flight():
            try:
                await asyncio.wait_for(self._event.wait(), seconds)
            except TimeoutError:
                return False
        return True
