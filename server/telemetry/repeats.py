"""Repeats: limits log records that repeat, such as for each failing request, and reports their number once a second.

A warning with a traceback takes 100 us of the caller and fills disks: a hook that fails for every request would log
thousands a second. Used by logs.py. Records from user code are not limited.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from typing import Any

USER_SUFFIX = ".user."
"""How the logger names of user code end."""
WINDOW_S = 1.0
MAX_PER_WINDOW = 20
"""The number of records of one kind written per window; further ones are counted."""
MAX_KINDS = 256
"""The most kinds distinguished at a time; beyond that, records are only distinguished by place and model."""
_NUMBER = re.compile(r"\d+")
_COPIED_FIELDS = ("name", "levelno", "levelname", "model")


def kind_of(record: logging.LogRecord) -> Hashable | None:
    """Return a record's kind: place, model, text without numbers, error type. None if it is not limited."""
    name = f"{record.name}."
    if record.levelno < logging.WARNING or not name.startswith("penstock.") or name.endswith(USER_SUFFIX):
        return None
    raised = record.exc_info[0] if record.exc_info else None
    return (*_location_of(record), _NUMBER.sub("", record.getMessage()), raised)


def _location_of(record: logging.LogRecord) -> tuple[Hashable, ...]:
    return record.name, record.lineno, str(getattr(record, "model", ""))


class Repeats:
    """Counts each kind of record within its window.

    Pure: the time is passed in, in seconds. Invariant: a record passes, or is counted in what `pop_expired` returns.
    """

    def __init__(self) -> None:
        self._windows: dict[Hashable, tuple[float, dict[str, Any]]] = {}
        self._counts: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        """Whether anything is counted, so that `pop_expired` must be called."""
        return bool(self._windows)

    def allows(self, record: logging.LogRecord, now_s: float) -> bool:
        """Return whether to write a record."""
        kind = kind_of(record)
        if kind is None:
            return True
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = _location_of(record)
        if kind not in self._windows:
            # not the record itself: its traceback holds frames, which hold a request
            copied = {name: getattr(record, name) for name in _COPIED_FIELDS if hasattr(record, name)}
            self._windows[kind] = now_s + WINDOW_S, copied | {"msg": record.getMessage()}
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        return count <= MAX_PER_WINDOW

    def pop_expired(self, now_s: float) -> list[logging.LogRecord]:
        """Return a summary for each kind whose window has ended and of which some records were not written."""
        summaries = []
        # all windows have the same length, so the first to begin ends first
        while self._windows and self._windows[kind := next(iter(self._windows))][0] <= now_s:
            _, first = self._windows.pop(kind)
            suppressed = self._counts.pop(kind) - MAX_PER_WINDOW
            if suppressed > 0:
                first["msg"] = f"{suppressed} more like this in a second: {first['msg']}"
                summaries.append(logging.makeLogRecord(first))
        return summaries
