"""Repeats: what is logged again and again, as for each request that fails, is counted, and told once a second.

A warning with its traceback takes 100 us of whoever logs it, and fills disks: of a hook that fails for every request
that would be thousands a second. Called by logs.py. Users' own code logs what it likes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from typing import Any

USERS = ".user."
"""How the loggers of what users' code says end."""
WINDOW_S = 1.0
MOST = 20
"""So many of one kind are written in each window; of the others, how many there were."""
KINDS = 256
"""So many kinds are told apart at once; what else comes is told apart by its place and model only."""
_NUMBER = re.compile(r"\d+")
_TOLD = ("name", "levelno", "levelname", "model")


def kind_of(record: logging.LogRecord) -> Hashable | None:
    """Tell of which kind a record is: its place, its model, its words but for numbers, its error. None: of none."""
    name = f"{record.name}."
    if record.levelno < logging.WARNING or not name.startswith("penstock.") or name.endswith(USERS):
        return None
    raised = record.exc_info[0] if record.exc_info else None
    return (*_place_of(record), _NUMBER.sub("", record.getMessage()), raised)


def _place_of(record: logging.LogRecord) -> tuple[Hashable, ...]:
    return record.name, record.lineno, str(getattr(record, "model", ""))


class Repeats:
    """How often each kind of record has come in its window.

    Pure: told the time, in seconds. Invariant: a record is passed, or counted in what `over` gives.
    """

    def __init__(self) -> None:
        self._windows: dict[Hashable, tuple[float, dict[str, Any]]] = {}
        self._counts: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        """Whether something is counted, so that `over` is to be called."""
        return bool(self._windows)

    def passes(self, record: logging.LogRecord, now_s: float) -> bool:
        """Tell whether a record is to be written."""
        kind = kind_of(record)
        if kind is None:
            return True
        if kind not in self._windows and len(self._windows) >= KINDS:
            kind = _place_of(record)
        if kind not in self._windows:
            # not the record itself: its traceback holds frames, and they a request
            first = {name: getattr(record, name) for name in _TOLD if hasattr(record, name)}
            self._windows[kind] = now_s + WINDOW_S, first | {"msg": record.getMessage()}
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        return count <= MOST

    def over(self, now_s: float) -> list[logging.LogRecord]:
        """Give a record for each kind whose window is over and of which not all were written."""
        told = []
        # each window is as long, so the first ends first
        while self._windows and self._windows[kind := next(iter(self._windows))][0] <= now_s:
            _, first = self._windows.pop(kind)
            left = self._counts.pop(kind) - MOST
            if left > 0:
                first["msg"] = f"{left} more like this in a second: {first['msg']}"
                told.append(logging.makeLogRecord(first))
        return told
