"""Preferred sizes: how much of a queue forms one batch, if sizes or a delay are configured. Used by sizing.py. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class LineWalk(NamedTuple):
    """How far a walk along a queue has come.

    `marked` is the longest prefix of a preferred size or, if there is none, everything before the request that would
    exceed the largest of them; 0 for none. `walked` is everything that fits one batch. `complete`: it cannot grow any
    more, or need not.
    """

    marked: int
    walked: int
    complete: bool


def walk(line: Iterable[int], sizes: Collection[int], max_rows: int) -> LineWalk:
    """Walk along the rows of the waiting requests, in the order in which they are served.

    `sizes` are the preferred ones. Units: rows; a request without rows counts as one, so that a walk ends.
    Source: Triton core, DynamicBatchScheduler::GetDynamicBatch.
    """
    largest = max(sizes)
    marked = walked = 0
    for rows in line:
        after = walked + (rows or 1)
        if walked:
            if after > largest and not marked:
                marked = walked
            if after > max_rows:
                return LineWalk(marked, walked, complete=True)
        walked = after
        if walked in sizes:
            marked = walked
    return LineWalk(marked, walked, complete=walked >= largest)
