"""SequenceTurns: makes a sequence's requests reach the model in order of arrival, however long their hooks take.

Used by `runner.py`. On a stream, a client may send a sequence's next request before it has the answer to the last.
"""

from __future__ import annotations

import asyncio


class SequenceTurns:
    """The turns of a model's sequences. Invariant: a sequence is kept while one of its turns has not been passed on.

    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._last: dict[int | str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def take(self, identity: int | str) -> SequenceTurn:
        """Take the next turn of a sequence. It must be passed on, whether or not it has come."""
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        previous = self._last.get(identity)
        self._last[identity] = released
        released.add_done_callback(lambda _: self._discard(identity, released))
        return SequenceTurn(previous, released)

    def _discard(self, identity: int | str, released: asyncio.Future[None]) -> None:
        if self._last.get(identity) is released:
            del self._last[identity]


class SequenceTurn:
    """The turn of one request."""

    __slots__ = ("_previous", "_released")

    def __init__(self, previous: asyncio.Future[None] | None, released: asyncio.Future[None]) -> None:
        self._previous = previous
        self._released = released

    async def wait_turn(self) -> None:
        """Wait until all earlier turns have been passed on."""
        if self._previous is not None and not self._previous.done():
            await asyncio.wait((self._previous,))

    def release_turn(self) -> None:
        """Let the next turn come in the loop's next turn, or after the earlier ones if this one has not come yet."""
        if self._previous is None or self._previous.done():
            self._released.set_result(None)
        else:
            self._previous.add_done_callback(lambda _: self._released.set_result(None))
