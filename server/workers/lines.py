"""Lines: what a worker writes to its output, line by line in the server's log. Used by `worker.py`."""

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
"""A line costs some 10 us to log, and the loop has others to serve."""
PAUSE_S = 0.01
"""Between two reads: one for each line that a worker floods with takes half of the loop's time."""
_READ_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_LEFT_BYTES = 1 << 20
"""The most that is read of a process that has ended: a child of its own may hold its output, and go on."""

logger = logging.getLogger("penstock.workers.user")


class Lines:
    """Makes lines of bytes in any pieces. Told the time, of any clock.

    Invariants: a line has no more than LINE_BYTES, and its rest is left out. No second has more than LINES_PER_S
    lines: those above are counted, and the last few of them kept, for `rest` to give when there will be no more.
    A carriage return ends a line, as progress bars have it; empty lines are none.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._partial = b""
        self._cut = False
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._second_s = 0.0
        self._left = LINES_PER_S

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """Take bytes, and give the lines that are whole now."""
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
        # a flood: what is in the middle is not looked at
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
        """Begin a new second, if it is time, and say how many lines the last one has cost."""
        if now_s - self._second_s < 1.0:
            return []
        self._second_s, self._left = now_s, LINES_PER_S
        dropped, self.dropped = self.dropped, 0
        self._last.clear()
        return [_dropped(dropped)] if dropped else []

    def rest(self) -> list[str]:
        """Give what there is when no more will come: the last lines are not dropped."""
        lines = [*self._last]
        if self._partial and not self._cut:
            lines.append(self._partial)  # one without an end
        dropped = self.dropped - len(self._last)
        self.dropped, self._partial = 0, b""
        self._last.clear()
        return ([_dropped(dropped)] if dropped else []) + [_text(line) for line in lines]


class Output:
    """One worker's output: a pipe that is read on the loop.

    The worker does not wait for the log, unless it writes more than 25 MB/s. `last` is its last line so far. Lines
    that have one of `noise` in them are for debugging only, and never the last. Those that are `heard` are logged also
    where the server logs warnings or errors alone: who wrote them has chosen what to write. `line` is called with each.
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
        with contextlib.suppress(OSError):  # users may have so much of them
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
        """Read once. Returns: how many bytes there were."""
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
        self._report_soon()  # of a second that had begun since
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
