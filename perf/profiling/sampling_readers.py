"""Looking: reads sources on their own threads, so that one that hangs delays neither the run nor the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .sampling_series import Reading

Source = Callable[[], Mapping[str, float]]
"""Returns the current values, by name. It may block, and may raise any exception."""
READ_TIMEOUT_S = 0.5


class PendingRead:
    """One call on a daemon thread, so that a thread that never returns does not keep the process from exiting."""

    def __init__(self, read_source: Callable[[], Any]) -> None:
        self._ask = read_source
        self.answer: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="look", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:  # noqa: BLE001 - whatever a driver or a page does, the run goes on without it
            self.error = error

    def done(self, timeout_s: float) -> bool:
        """Wait for it. Returns: whether it is done."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()


def read_within(timeout_s: float, read_source: Callable[[], Any]) -> Any:
    """Return the result of `read_source`; None if it takes too long or fails."""
    pending = PendingRead(read_source)
    return pending.answer if pending.done(timeout_s) else None


class SourceReader:
    """Reads all sources concurrently. A source whose read is pending is not read again, and its late result is lost.

    `reasons`: by source, why it had no result the last time. Later sources override earlier ones.
    Threads: any; one reading at a time.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._hanging: dict[str, PendingRead] = {}
        self.reasons: dict[str, str] = {}

    def drop(self, name: str) -> None:
        """Stop reading a source."""
        self._sources.pop(name, None)
        self.reasons.pop(name, None)

    def read_all(self, timeout_s: float = READ_TIMEOUT_S) -> Reading:
        """Read all sources that answer in time."""
        with self._lock:
            at_s = time.monotonic()
            pending_reads = {
                name: PendingRead(read_source)
                for name, read_source in self._sources.items()
                if name not in self._hanging
            }
            values: dict[str, float] = {}
            for name, pending in pending_reads.items():
                if not pending.done(at_s + timeout_s - time.monotonic()):
                    self._hanging[name] = pending
                    self.reasons[name] = f"no answer within {timeout_s:g} s"
                elif pending.error is not None:
                    self.reasons[name] = str(pending.error) or type(pending.error).__name__
                else:
                    self.reasons.pop(name, None)
                    values |= pending.answer
            for name in [name for name, pending in self._hanging.items() if pending.done(0)]:
                del self._hanging[name]
            return Reading(at_s, values)
