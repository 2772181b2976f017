"""Carriers: the connections of a process, of any protocol, as the pacing uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Slot(Protocol):
    """One of the requests allowed in flight. It may send its next request from the callback that ends its last."""

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        """Handle the responses of a good answer over a stream, just before `on_answer`; `count` of them were not empty.

        `earlier_ns`: when each response except the last arrived, empty or not.
        """

    def on_answer(self, now_ns: int, error: str) -> None:
        """Handle the answer to its request. `error` is empty, or the error that the answer reported."""

    def on_lost(self, now_ns: int, reason: str) -> None:
        """Handle the loss of its request: the connection has ended."""


class Carrier(Protocol):
    """One connection. Threads: its loop's."""

    def send(self, request: bytes, slot: Slot) -> None:
        """Send a request. The slot is notified of its end, but not before this method has returned."""

    def close(self) -> None:
        """Close the connection without notifying anyone."""


class Opener(Protocol):
    """Makes carriers to one target."""

    @property
    def slots_each(self) -> int:
        """How many requests one carrier may have in flight. The first `open` may reduce it."""
        ...

    async def open(self, on_lost: Callable[[str], None]) -> Carrier:
        """Connect. Raises: OSError, ssl.SSLError.

        `on_lost` is called once, when nothing more can be sent on the carrier and before the slots in flight are
        notified. Its argument is empty if the server closed the connection in order (it announced the end, or closed an
        idle connection).
        """
        ...
