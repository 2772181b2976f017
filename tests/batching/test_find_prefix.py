"""Preferred sizes: how much of a queue runs as one batch, compared with Triton's own loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.scheduling.sizing import find_prefix


def goes(rows: list[int], sizes: set[int], max_rows: int, *, over: bool = False) -> int:
    """Return how many rows run now; 0 for none. `over`: the oldest request has waited for the queue delay."""
    prefix = find_prefix(rows, sizes, max_rows)
    if prefix.preferred_rows and not over:
        return prefix.preferred_rows
    return prefix.fitting_rows if over or prefix.complete else 0


@pytest.mark.parametrize(
    ("rows", "now"),
    [
        ([2], 2), ([6], 6), ([7], 7), ([8], 8), ([1], 0), ([3], 0), ([5], 0), ([1, 3], 0), ([3, 7], 3), ([3, 4], 3),
        ([4], 0), ([1] * 3, 2), ([1] * 6, 6), ([1] * 7, 6), ([2, 3], 2), ([2, 4], 6), ([2, 6], 2), ([1, 1, 5], 2),
        ([5, 3], 5), ([1, 2, 8], 3), ([], 0),
    ],
)  # fmt: skip
def test_batches_with_preferred_sizes_2_and_6_and_a_maximum_of_8(rows: list[int], now: int) -> None:
    assert goes(rows, {2, 6}, 8) == now


@pytest.mark.parametrize(
    ("rows", "now"), [([1], 1), ([3, 4], 7), ([1] * 7, 7), ([1] * 9, 8), ([3, 7], 3), ([5, 4], 5), ([7, 1, 1], 8)]
)
def test_all_requests_that_fit_run_when_the_delay_is_over(rows: list[int], now: int) -> None:
    assert goes(rows, {2, 6}, 8, over=True) == now


def test_a_request_without_rows_counts_as_one_row() -> None:
    assert find_prefix([0] * 100, {4}, 8) == (4, 8, True)


def tritons(rows: list[int], sizes: set[int], max_rows: int, *, delay: bool, over: bool) -> int:
    """DynamicBatchScheduler::GetDynamicBatch, line by line: the rows that run, 0 if it waits."""
    send_now = False
    best = pending = marked = 0
    cursor = 0
    while cursor < len(rows):
        size = max(1, rows[cursor])
        if pending != 0:
            if pending + size > max(sizes) and best == 0:
                best = marked = pending
            if pending + size > max_rows:
                send_now = True
                break
        pending += size
        cursor += 1
        if pending in sizes:
            best = marked = pending
    if best != 0 and not over:
        return marked
    if cursor == 0:
        return 0
    if send_now or pending >= max(sizes):
        return pending
    return pending if over or not delay else 0


@given(
    st.integers(1, 16).flatmap(
        lambda most: st.tuples(
            st.just(most), st.lists(st.integers(0, most), max_size=40), st.sets(st.integers(1, most), min_size=1)
        )
    ),
    st.booleans(),
)
def test_preferred_sizes_select_the_same_rows_as_triton(case: tuple[int, list[int], set[int]], over: bool) -> None:
    most, rows, sizes = case

    assert goes(rows, sizes, most, over=over) == tritons(rows, sizes, most, delay=True, over=over)
    prefix = find_prefix(rows, sizes, most)
    assert (prefix.preferred_rows or prefix.fitting_rows) == tritons(rows, sizes, most, delay=False, over=False)
