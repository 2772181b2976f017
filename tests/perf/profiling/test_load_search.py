from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.profiling import load_search
from penstock.perf.profiling.options import Range


def walked(search: load_search.Search, good: Callable[[float], bool], most: int = 10_000) -> list[float]:
    visited = [next(search)]
    while len(visited) < most:
        try:
            visited.append(search.send(good(visited[-1])))
        except StopIteration:
            return visited
    raise AssertionError("endless")


def always(value: float) -> bool:
    return True


@pytest.mark.parametrize(
    ("levels_", "visited"),
    [
        (Range(1, 1, 1), [1]),
        (Range(5, 1, 1), [5]),  # START alone: END is 1
        (Range(1, 8, 7), [1, 8]),
        (Range(1, 8, 3), [1, 4, 7]),
        (Range(100.5, 101.5, 0.5), [100.5, 101, 101.5]),
    ],
)
def test_a_range_is_visited_by_its_step_up_to_its_end(levels_: Range, visited: list[float]) -> None:
    assert walked(load_search.linear(levels_), always) == visited


@given(st.integers(1, 50), st.integers(0, 100), st.integers(1, 20), st.integers(1, 120))
def test_a_linear_search_ends_after_the_first_failed_level(start: int, end: int, step: int, limit: int) -> None:
    visited = walked(load_search.linear(Range(start, end, step)), lambda value: value < limit)

    assert visited == [start + step * number for number in range(len(visited))]
    assert all(value < limit for value in visited[:-1])
    assert visited[-1] >= limit or (end and visited[-1] + step > end)


@given(st.integers(1, 100), st.integers(1, 1000), st.integers(1, 50), st.integers(1, 1200))
def test_halving_finds_the_limit_to_within_its_step(start: int, length: int, step: int, limit: int) -> None:
    end = start + length
    visited = walked(load_search.halving(Range(start, end, step), integer=True), lambda value: value < limit)

    if start >= limit:
        assert visited == [start]
    elif end < limit:
        assert visited == [start, end]
    else:
        best, worst = max(v for v in visited if v < limit), min(v for v in visited if v >= limit)
        assert worst - best <= step
        assert all(value == int(value) for value in visited)


@given(st.floats(1, 1e4), st.floats(0, 1e4), st.floats(0.5, 100))
def test_halving_rates_terminates(start: float, length: float, step: float) -> None:
    visited = walked(
        load_search.halving(Range(start, start + length, step), integer=False), lambda value: value < start + 1
    )

    assert len(visited) <= 2 + 20


def test_halving_ends_if_there_is_no_number_in_between() -> None:
    assert len(walked(load_search.halving(Range(1, 2, 1e-300), integer=False), lambda value: value < 1.5)) < 60


def test_a_single_level_is_visited_once() -> None:
    assert walked(load_search.single(3.0), always) == [3.0]
