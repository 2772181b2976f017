"""Repeats: what is logged again and again, as for each request that fails, is counted, and told once a second.

A warning with its traceback takes 100 us of whoever logs it, and fills disks: of a hook that fails for every request
that would be thousands a second. Called by logs.py. Users' own code logs what it likes.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

WINDOW_S = 1.0
MOST = 20
"""So many of one kind are written in each window; of the others, how many there were."""
KINDS = 256
"""So many kinds are told apart at once; what else comes is written."""
_TOLD = ("name", "levelno", "levelname", "model")


def kind_of(record: logging.LogRecord) -> Hashable | None:
    """Tell what makes a record a repeat of others: its place, its model and its error. None: it never is one."""
    if record.levelno < logging.WARNING or not record.name.startswith("penstock"):
        return None
    raised = record.exc_info[0] if record.exc_info else None
    error = raised or (record.exc_text or "").rpartition("\n")[2].partition(":")[0]
    return record.name, record.lineno, record.msg, getattr(record, "model", None), error


class Repeats:
    """How often each kind of record has come in its window.

    Pure: told the time, in seconds. Invariant: a record is passed, or counted in what `over` gives.
    """

    def __init__(self) -> None:
        self._windows: dict[Hashable, tuple[float, logging.LogRecord]] = {}
        self._counts: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        """Whether something is counted, so that `over` is to be called."""
        return bool(self._windows)

    def passes(self, record: logging.LogRecord, now_s: float) -> bool:
        """Tell whether a record is to be written."""
        kind = kind_of(record)
        if kind is None or (kind not in self._windows and len(self._windows) >= KINDS):
            return True
        if kind not in self._windows:
            # not the record itself: its traceback holds frames, and they a request
            first = {name: getattr(record, name) for name in _TOLD if hasattr(record, name)}
            self._windows[kind] = now_s + WINDOW_S, logging.makeLogRecord(first | {"msg": record.getMessage()})
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        return count <= MOST

    def over(self, now_s: float) -> list[logging.LogRecord]:
        """Give a record for each kind whose window is over and of which not all were written."""
        told = []
        # each window is as long, so the first ends first
        while self._windows and self._windows[kind := next(iter(self._windows))][0] <= now_s:
            _, record = self._windows.pop(kind)
            left = self._counts.pop(kind) - MOST
            if left > 0:
                record.msg = f"{left} more like this in a second: {record.msg}"
                told.append(record)
        return told
