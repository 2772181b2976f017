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
LINES_AT_ONCE = 50
"""Logging a line takes about 10 us, and the loop has other work."""
PAUSE_S = 0.01
"""The pause between two reads: reading each line of a flood separately would use half of the loop's time."""
_READ_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_LEFT_BYTES = 1 << 20
"""The maximum that is read after the process has ended: a child may hold its output open and keep writing."""

logger = logging.getLogger("penstock.workers.user")


class Lines:
    """Splits bytes, received in pieces of any size, into lines. Takes the time as an argument, from any clock.

    Invariants: a line has at most LINE_BYTES; the rest is discarded. At most LINES_PER_S lines are returned per second:
    the excess is counted, and the last LAST_LINES of it are kept for `rest`, in case no more output follows.
    A carriage return ends a line, since progress bars use it; empty lines are skipped.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._partial = b""
        self._cut = False
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._second_s = 0.0
        self._left = LINES_PER_S

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Add bytes, and return the lines that are now complete."""
        said = self.report(now_s)
        *whole, self._partial = self._split(self._partial + data.replace(b"\r", b"\n"))
        for line in whole:
            said += self._line(line)
            self._cut = False
        if len(self._partial) > LINE_BYTES:
            said += self._line(self._partial)
            self._partial, self._cut = b"", True
        return said

    def _split(self, data: bytes) -> list[bytes]:
        surplus = data.count(b"\n") - self._left - LAST_LINES - 1
        if surplus <= 0:
            return data.split(b"\n")
        # a flood: skip its middle
        *first, rest = data.split(b"\n", self._left)
        _, *last = rest.rsplit(b"\n", LAST_LINES + 1)
        self.dropped += surplus + 1
        return first + last

    def _line(self, line: bytes) -> list[str]:
        if self._cut or not line:
            return []
        if self._left <= 0:
            self.dropped += 1
            self._last.append(line)
            return []
        self._left -= 1
        return [_text(line)]

    def report(self, now_s: float) -> list[str]:
        """Begin a new second if it is time, and report how many lines the last one dropped."""
        if now_s - self._second_s < 1.0:
            return []
        self._second_s, self._left = now_s, LINES_PER_S
        dropped, self.dropped = self.dropped, 0
        self._last.clear()
        return [_dropped(dropped)] if dropped else []

    def rest(self) -> list[str]:
        """Return what is left at the end of the output: the last lines are not dropped."""
        lines = [*self._last]
        if self._partial and not self._cut:
            lines.append(self._partial)  # a line without an end
        dropped = self.dropped - len(self._last)
        self.dropped, self._partial = 0, b""
        self._last.clear()
        return ([_dropped(dropped)] if dropped else []) + [_text(line) for line in lines]


class Output:
    """One worker's output: a pipe that is read on the loop.

    The worker does not wait for the log unless it writes more than 25 MB/s. `last` is its last line so far. Lines that
    contain one of `noise` are logged at DEBUG and never become `last`. If `heard`, lines are also logged where the
    server logs only warnings or errors: the author of such output chose its level. `line` is called with each line.
    """

    def __init__(
        self, descriptor: int, label: str, about: Mapping[str, str], noise: Sequence[str] = (), *, heard: bool = False,
        line: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.last = ""
        self._line = line
        self._heard = heard
        self._noise = noise
        self._descriptor = descriptor
        self._label = label
        self._about = dict(about)
        self._lines = Lines()
        self._waiting: deque[str] = deque()
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
        self._log(LINES_AT_ONCE)
        self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._waiting:
            self._log(LINES_AT_ONCE)
            self._pause = self._loop.call_later(PAUSE_S, self._go_on)
        elif not self._ended:
            self._loop.add_reader(self._descriptor, self._readable)

    def _read(self) -> int:
        """Read once. Returns: the number of bytes read."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        self._ended = not data
        self._waiting += self._lines.feed(data, self._loop.time())
        return len(data)

    def _report_soon(self) -> None:
        if self._lines.dropped and self._report_timer is None:
            self._report_timer = self._loop.call_later(1.0, self._report)

    def _report(self) -> None:
        self._report_timer = None
        self._waiting += self._lines.report(self._loop.time())
        self._report_soon()  # for a second that has begun since
        self._log(LINES_AT_ONCE)

    def _log(self, most: int) -> None:
        for _ in range(min(len(self._waiting), most)):
            line = self._waiting.popleft()
            level = logging.INFO
            if any(words in line for words in self._noise):
                level = logging.DEBUG
            else:
                self.last = line
                if self._heard:
                    level = max(level, min(logger.getEffectiveLevel(), logging.ERROR))
            logger.log(level, "%s: %s", self._label, line, extra=self._about)
            self._line(line)

    def close(self) -> None:
        """Log what is left, and close the pipe."""
        self._loop.remove_reader(self._descriptor)
        for timer in (self._pause, self._report_timer):
            if timer is not None:
                timer.cancel()
        left = _LEFT_BYTES
        while left > 0 and (read := self._read()):
            left -= read
        self._waiting += self._lines.rest()
        self._log(len(self._waiting))
        os.close(self._descriptor)


def _text(line: bytes) -> str:
    text = line[:LINE_BYTES].decode(errors="backslashreplace")
    return text if len(line) <= LINE_BYTES else f"{text}... (cut)"


def _dropped(count: int) -> str:
    return f"{count} lines dropped"
