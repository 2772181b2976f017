"""Debugging: the content of the endpoint /v2/debug/: the server's log, and the output of the models.

Made by `service.py`, only if the operator has enabled it. Source: deepaas 2.6.0, api/v2/debug.py.
"""

from __future__ import annotations

import logging
from collections import deque
from datetime import datetime

MAX_CHARS = 1 << 20
"""The limit of the text; the oldest lines are dropped."""
_MAX_LINE_CHARS = 16_384
_WARNING = "the debug endpoint is on: anyone who can reach this server can read its log. Turn it off when you are done"

logger = logging.getLogger("penstock.deepaas")


class DebugLog(logging.Handler):
    """Keeps the last lines of the log, which include the output of workers. Threads: any."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
        self._lines: deque[str] = deque()
        self._chars = 0
        logging.getLogger().addHandler(self)
        logger.warning(_WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        try:
            self._add(self.format(record)[:_MAX_LINE_CHARS])
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not affect the code that logged it
            self.handleError(record)

    def text(self) -> bytes:
        """Return the text so far. It ends with a marker, which separates it from the next text."""
        self.acquire()
        try:
            self._add(f"--- DEBUG MARKER {datetime.now()} ---")  # noqa: DTZ005 - that machine's local time, for people
            return "".join(f"{line}\n" for line in self._lines).encode("utf-8", "replace")
        finally:
            self.release()

    def close(self) -> None:
        """Stop collecting."""
        logging.getLogger().removeHandler(self)
        super().close()

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._chars += len(line)
        while self._chars > MAX_CHARS:
            self._chars -= len(self._lines.popleft())
