"""Reopening: how a process replaces connections that end, and when it considers the server dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .carriers import Carrier, Opener
from .recording import Recorder

DEAD_AFTER_S = 3.0
"""A server that has answered nothing for this long since the first connection failed is considered dead."""
_CONNECT_LIMIT_S = 3.0
_PAUSE_S = 0.05
_MAX_CONNECTING = 32


class Reconnector:
    """Makes all connections of a process. Threads: its loop's."""

    def __init__(self, opener: Opener, recorder: Recorder, dead_after_s: float = DEAD_AFTER_S) -> None:
        self._opener = opener
        self._recorder = recorder
        self._dead_after_s = dead_after_s
        self._gate = asyncio.Semaphore(_MAX_CONNECTING)
        self._failing_since_ns = 0

    @property
    def slots_each(self) -> int:
        return self._opener.slots_each

    async def connect(self, on_lost: Callable[[str], None]) -> Carrier:
        """Connect once. Raises: OSError."""
        try:
            return await asyncio.wait_for(self._opener.open(on_lost), _CONNECT_LIMIT_S)
        except TimeoutError:
            raise ConnectionError(f"no connection within {_CONNECT_LIMIT_S:.0f} s") from None

    async def reconnect(self, on_lost: Callable[[str], None]) -> Carrier | None:
        """Connect, with any number of attempts. Returns: None once the load cannot continue."""
        async with self._gate:
            # pause only once trouble lasts: it would add to the latencies of a server that merely ends connections
            if self._recorder.last_answer_ns < self._failing_since_ns < time.monotonic_ns() - _PAUSE_S * 1e9:
                await asyncio.sleep(_PAUSE_S)
            while not self._recorder.failure:
                try:
                    return await self.connect(on_lost)
                except OSError as error:
                    self.on_failure(str(error))
                await asyncio.sleep(_PAUSE_S)
        return None

    def on_failure(self, reason: str) -> None:
        """Handle the failure of a connection, on opening or later."""
        now_ns = time.monotonic_ns()
        if self._recorder.last_answer_ns >= self._failing_since_ns:
            self._failing_since_ns = now_ns
        elif now_ns - self._failing_since_ns > self._dead_after_s * 1e9:
            self._recorder.abort(reason)
