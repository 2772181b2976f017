"""Progress: the progress of a training, parsed from its output; and its log. Used by trainings.py and jobs.py.

Trainings need not change what they write: the progress bars of tqdm, Keras and Lightning are recognized, and lines that
name an epoch.
"""

from __future__ import annotations

import re
from collections import deque

LOG_BYTES = 256 << 10
"""The limit for the log of a training, of which the last lines are kept."""
_EPOCH = re.compile(r"\bepoch\b\W{0,3}(\d{1,9})(?:\s?(?:/|of)\s?(\d{1,9}))?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d{1,3})%\||\((\d{1,3})%\)")
"""tqdm and Lightning; PyTorch's examples."""
_STEPS = re.compile(r"(?<![\d./])(\d{1,9})/(\d{1,9})\s?[\[━─]")
"""Keras 2 and 3, and rich's bars."""


class Meter:
    """The progress found in lines. `done` and `epoch_done` are shares, 0 to 1; None if unknown.

    If there are epochs, a bar is that of one epoch. Lightning counts epochs from 0, Keras from 1: a 0 shows which.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.epochs: int | None = None
        self.last_line = ""
        self._bar: float | None = None
        self._first_epoch = 1

    @property
    def done(self) -> float | None:
        """The share of the whole training."""
        if self.epoch is None:
            return self._bar
        if not self.epochs:
            return None
        return _share(self.epoch - self._first_epoch + (self._bar or 0.0), self.epochs)

    @property
    def epoch_done(self) -> float | None:
        """The share of the current epoch."""
        return self._bar if self.epoch is not None else None

    def read(self, line: str) -> None:
        """Parse a line."""
        self.last_line = line
        if (found := _EPOCH.search(line)) is not None:
            epoch, epochs = int(found[1]), int(found[2]) if found[2] else self.epochs
            if epoch == 0:
                self._first_epoch = 0
            if (epoch, epochs) != (self.epoch, self.epochs):
                self.epoch, self.epochs, self._bar = epoch, epochs, None
            # "Epoch 3/10 ━━━" has no steps other than the epochs
            line = line[: found.start()] + line[found.end() :]
        if (found := _PERCENT.search(line)) is not None:
            self._bar = _share(int(found[1] or found[2]), 100)
        elif (found := _STEPS.search(line)) is not None:
            self._bar = _share(int(found[1]), int(found[2]))


def _share(part: float, whole: float) -> float | None:
    return round(min(max(part / whole, 0.0), 1.0), 4) if whole else None


class Log:
    """The last lines of a training, at most LOG_BYTES of them, and the progress found in all."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.dropped_lines = 0
        self._lines: deque[bytes] = deque()
        self._nbytes = 0

    def add(self, line: str) -> None:
        """Add a line."""
        self.meter.read(line)
        kept = line.encode(errors="backslashreplace") + b"\n"
        self._lines.append(kept)
        self._nbytes += len(kept)
        while self._nbytes > LOG_BYTES:
            self._nbytes -= len(self._lines.popleft())
            self.dropped_lines += 1

    def text(self) -> str:
        """Return all lines kept."""
        head = f"({self.dropped_lines} earlier lines are omitted)\n" if self.dropped_lines else ""
        return head + b"".join(self._lines).decode()
