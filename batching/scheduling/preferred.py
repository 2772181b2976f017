"""Preferred sizes: how much of a line goes as one batch, where sizes or a delay are said. Called by sizing.py. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class LineWalk(NamedTuple):
    """How far a walk along a line has come.

    `marked` is the longest prefix of a preferred size, or, where there is none, what stands before the request that
    would pass the largest of them; 0 for nothing. `walked` is all that fits one batch. `complete`: it cannot grow any
    more, or need not.
    """

    marked: int
    walked: int
    complete: bool


def walk(line: Iterable[int], sizes: Collection[int], max_rows: int) -> LineWalk:
    """Walk along the rows of those that wait, in the order in which they are served.

    `sizes` are the preferred ones. Units: rows; a request without rows counts for one, so that a walk has an end.
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
