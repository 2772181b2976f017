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
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._last.get(identity)
        self._last[identity] = passed
        passed.add_done_callback(lambda _: self._forget(identity, passed))
        return SequenceTurn(before, passed)

    def _forget(self, identity: int | str, passed: asyncio.Future[None]) -> None:
        if self._last.get(identity) is passed:
            del self._last[identity]


class SequenceTurn:
    """The turn of one request."""

    __slots__ = ("_before", "_passed")

    def __init__(self, before: asyncio.Future[None] | None, passed: asyncio.Future[None]) -> None:
        self._before = before
        self._passed = passed

    async def come(self) -> None:
        """Wait until all earlier turns have been passed on."""
        if self._before is not None and not self._before.done():
            await asyncio.wait((self._before,))

    def pass_on(self) -> None:
        """Let the next turn come in the loop's next turn, or after the earlier ones if this one has not come yet."""
        if self._before is None or self._before.done():
            self._passed.set_result(None)
        else:
            self._before.add_done_callback(lambda _: self._passed.set_result(None))
