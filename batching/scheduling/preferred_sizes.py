"""Preferred sizes: how much of a queue forms one batch, if sizes or a delay are configured. Used by sizing.py. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class QueuePrefix(NamedTuple):
    """How far a walk along a queue has come.

    `preferred_rows` is the longest prefix of a preferred size or, if there is none, everything before the request that
    would exceed the largest of them; 0 for none. `fitting_rows` is everything that fits one batch. `complete`: it
    cannot grow any more, or need not.
    """

    preferred_rows: int
    fitting_rows: int
    complete: bool


def find_prefix(waiting_rows: Iterable[int], sizes: Collection[int], max_rows: int) -> QueuePrefix:
    """Walk along the rows of the waiting requests, in the order in which they are served.

    `sizes` are the preferred ones. Units: rows; a request without rows counts as one, so that a walk ends.
    Source: Triton core, DynamicBatchScheduler::GetDynamicBatch.
    """
    largest = max(sizes)
    preferred_rows = fitting_rows = 0
    for rows in waiting_rows:
        new_rows = fitting_rows + (rows or 1)
        if fitting_rows:
            if new_rows > largest and not preferred_rows:
                preferred_rows = fitting_rows
            if new_rows > max_rows:
                return QueuePrefix(preferred_rows, fitting_rows, complete=True)
        fitting_rows = new_rows
        if fitting_rows in sizes:
            preferred_rows = fitting_rows
    return QueuePrefix(preferred_rows, fitting_rows, complete=fitting_rows >= largest)
