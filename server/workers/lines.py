"""Lines: splits a worker's output into lines for the server's log. Used by `worker.py`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence

LINE_BYTES = 8 << 10
LINES_PER_S = 500
LAST_LINES = 20
MAX_LINES_PER_TURN = 50
"""Logging a line takes about 10 us, and the loop has other work."""
PAUSE_S = 0.01
"""The pause between two reads: reading each line of a flood separately would use half of the loop's time."""
_READ_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_MAX_FINAL_BYTES = 1 << 20
"""The maximum that is read after the process has ended: a child may hold its output open and keep writing."""

logger = logging.getLogger("penstock.workers.user")


class LineSplitter:
    """Splits bytes, received in pieces of any size, into lines. Takes the time as an argument, from any clock.

    Invariants: a line has at most LINE_BYTES; the rest is discarded. At most LINES_PER_S lines are returned per second:
    the excess is counted, and the last LAST_LINES of it are kept for `flush`, in case no more output follows.
    A carriage return ends a line, since progress bars use it; empty lines are skipped.
    """

    def __init__(self) -> None:
        self.dropped_count = 0
        self._partial = b""
        self._truncated = False
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._second_s = 0.0
        self._remaining = LINES_PER_S

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Add bytes, and return the lines that are now complete."""
        lines = self.report(now_s)
        *complete_lines, self._partial = self._split(self._partial + data.replace(b"\r", b"\n"))
        for line in complete_lines:
            lines += self._line(line)
            self._truncated = False
        if len(self._partial) > LINE_BYTES:
            lines += self._line(self._partial)
            self._partial, self._truncated = b"", True
        return lines

    def _split(self, data: bytes) -> list[bytes]:
        surplus = data.count(b"\n") - self._remaining - LAST_LINES - 1
        if surplus <= 0:
            return data.split(b"\n")
        # a flood: skip its middle
        *first, remainder = data.split(b"\n", self._remaining)
        _, *last = remainder.rsplit(b"\n", LAST_LINES + 1)
        self.dropped_count += surplus + 1
        return first + last

    def _line(self, line: bytes) -> list[str]:
        if self._truncated or not line:
            return []
        if self._remaining <= 0:
            self.dropped_count += 1
            self._last.append(line)
            return []
        self._remaining -= 1
        return [_text(line)]

    def report(self, now_s: float) -> list[str]:
        """Begin a new second if it is time, and report how many lines the last one dropped."""
        if now_s - self._second_s < 1.0:
            return []
        self._second_s, self._remaining = now_s, LINES_PER_S
        dropped, self.dropped_count = self.dropped_count, 0
        self._last.clear()
        return [_dropped(dropped)] if dropped else []

    def flush(self) -> list[str]:
        """Return what is left at the end of the output: the last lines are not dropped."""
        lines = [*self._last]
        if self._partial and not self._truncated:
            lines.append(self._partial)  # a line without an end
        dropped = self.dropped_count - len(self._last)
        self.dropped_count, self._partial = 0, b""
        self._last.clear()
        return ([_dropped(dropped)] if dropped else []) + [_text(line) for line in lines]


class Output:
    """One worker's output: a pipe that is read on the loop.

    The worker does not wait for the log unless it writes more than 25 MB/s. `last_line` is its last line so far. Lines
    that contain one of `harmless_lines` are logged at DEBUG and never become `last_line`. If `always_logged`, lines are
    also logged where the server logs only warnings or errors: the author of such output chose its level. `on_line` is
    called with each line.
    """

    def __init__(
        self, descriptor: int, label: str, log_fields: Mapping[str, str], harmless_lines: Sequence[str] = (), *,
        always_logged: bool = False, on_line: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.last_line = ""
        self._on_line = on_line
        self._always_logged = always_logged
        self._harmless = harmless_lines
        self._descriptor = descriptor
        self._label = label
        self._log_fields = dict(log_fields)
        self._lines = LineSplitter()
        self._pending: deque[str] = deque()
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # the system may limit a user's pipe memory
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._loop.add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._read()
        self._report_soon()
        self._log(MAX_LINES_PER_TURN)
        self._pause = self._loop.call_later(PAUSE_S, self._continue)

    def _continue(self) -> None:
        if self._pending:
            self._log(MAX_LINES_PER_TURN)
            self._pause = self._loop.call_later(PAUSE_S, self._continue)
        elif not self._ended:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self) -> int:
        """Read once. Returns: the number of bytes read."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        self._ended = not data
        self._pending += self._lines.feed(data, self._loop.time())
        return len(data)

    def _report_soon(self) -> None:
        if self._lines.dropped_count and self._report_timer is None:
            self._report_timer = self._loop.call_later(1.0, self._report)

    def _report(self) -> None:
        self._report_timer = None
        self._pending += self._lines.report(self._loop.time())
        self._report_soon()  # for a second that has begun since
        self._log(MAX_LINES_PER_TURN)

    def _log(self, max_lines: int) -> None:
        for _ in range(min(len(self._pending), max_lines)):
            line = self._pending.popleft()
            level = logging.INFO
            if any(text in line for text in self._harmless):
                level = logging.DEBUG
            else:
                self.last_line = line
                if self._always_logged:
                    level = max(level, min(logger.getEffectiveLevel(), logging.ERROR))
            logger.log(level, "%s: %s", self._label, line, extra=self._log_fields)
            self._on_line(line)

    def close(self) -> None:
        """Log what is left, and close the pipe."""
        self._loop.remove_reader(self._descriptor)
        for timer in (self._pause, self._report_timer):
            if timer is not None:
                timer.cancel()
        remaining = _MAX_FINAL_BYTES
        while remaining > 0 and (read := self._read()):
            remaining -= read
        self._pending += self._lines.flush()
        self._log(len(self._pending))
        os.close(self._descriptor)


def _text(line: bytes) -> str:
    text = line[:LINE_BYTES].decode(errors="backslashreplace")
    return text if len(line) <= LINE_BYTES else f"{text}... (cut)"


def _dropped(count: int) -> str:
    return f"{count} lines dropped"
