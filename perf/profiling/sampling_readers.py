"""Looking: reads sources on their own threads, so that one that hangs delays neither the run nor the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .sampling_series import Reading

Source = Callable[[], Mapping[str, float]]
"""Returns the current values, by name. It may block, and may raise any exception."""
PATIENCE_S = 0.5


class PendingRead:
    """One call on a daemon thread, so that a thread that never returns does not keep the process from exiting."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self.answer: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="look", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:  # noqa: BLE001 - whatever a driver or a page does, the run goes on without it
            self.error = error

    def done(self, patience_s: float) -> bool:
        """Wait for it. Returns: whether it is done."""
        self._thread.join(max(patience_s, 0.0))
        return not self._thread.is_alive()


def within(patience_s: float, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`; None if it takes too long or fails."""
    look = PendingRead(ask)
    return look.answer if look.done(patience_s) else None


class SourceReader:
    """Reads all sources concurrently. A source whose read is pending is not read again, and its late result is lost.

    `whys`: by source, why it had no result the last time. Later sources override earlier ones.
    Threads: any; one reading at a time.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._hanging: dict[str, PendingRead] = {}
        self.whys: dict[str, str] = {}

    def drop(self, name: str) -> None:
        """Stop reading a source."""
        self._sources.pop(name, None)
        self.whys.pop(name, None)

    def look(self, patience_s: float = PATIENCE_S) -> Reading:
        """Read all sources that answer in time."""
        with self._lock:
            at_s = time.monotonic()
            asked = {name: PendingRead(ask) for name, ask in self._sources.items() if name not in self._hanging}
            values: dict[str, float] = {}
            for name, look in asked.items():
                if not look.done(at_s + patience_s - time.monotonic()):
                    self._hanging[name] = look
                    self.whys[name] = f"no answer within {patience_s:g} s"
                elif look.error is not None:
                    self.whys[name] = str(look.error) or type(look.error).__name__
                else:
                    self.whys.pop(name, None)
                    values |= look.answer
            for name in [name for name, look in self._hanging.items() if look.done(0)]:
                del self._hanging[name]
            return Reading(at_s, values)
