"""Carriers: the connections of a process, whatever their protocol, as the pacing sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Slot(Protocol):
    """One of the requests that may be under way. It may send its next while it is told the end of its last."""

    def responded(self, earlier_ns: Sequence[int], count: int) -> None:
        """Take, just before a good answer over a stream, what it was made of: `count` responses with something in them.

        `earlier_ns`: when each response came, but the last, empty or not.
        """

    def answered(self, now_ns: int, error: str) -> None:
        """Take the answer to its request: `error` is empty, or what it said went wrong."""

    def lost(self, now_ns: int, why: str) -> None:
        """Take that its request gets no answer: the connection has ended."""


class Carrier(Protocol):
    """One connection. Threads: its loop's."""

    def send(self, request: bytes, slot: Slot) -> None:
        """Send a request, whose end the slot will be told: not before this has returned."""

    def close(self) -> None:
        """End the connection; nobody is told."""


class Opener(Protocol):
    """Makes carriers to one target."""

    @property
    def slots_each(self) -> int:
        """How many requests one carrier may have under way at once; the first `open` may teach it better."""
        ...

    async def open(self, lost: Callable[[str], None]) -> Carrier:
        """Connect. Raises: OSError, ssl.SSLError.

        `lost` is called once, when nothing more can be sent on the carrier, before the slots of what is under way are
        told; with nothing where the server wished it (it announced the end, or ended an idle connection).
        """
        ...
