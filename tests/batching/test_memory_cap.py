from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.scheduling.memory_cap import RECOVERY_NS, MemoryCap


def test_there_is_no_limit_before_a_batch_has_run_out_of_memory() -> None:
    assert MemoryCap().limit(1) == 0


def test_the_limit_is_half_of_the_rows_that_did_not_fit() -> None:
    cap = MemoryCap()
    cap.lower(48, 1)

    assert cap.limit(1) == 24


def test_the_limit_doubles_step_by_step_until_it_is_removed() -> None:
    cap = MemoryCap()
    for rows in (64, 32, 16):
        cap.lower(rows, 0)

    assert [cap.limit(step * RECOVERY_NS + late) for step in range(5) for late in (0, RECOVERY_NS - 1)] == [
        8, 8, 16, 16, 32, 32, 0, 0, 0, 0,
    ]  # fmt: skip


def test_running_out_of_memory_again_restarts_the_recovery() -> None:
    cap = MemoryCap()
    cap.lower(64, 0)
    cap.lower(32, RECOVERY_NS - 1)

    assert cap.limit(RECOVERY_NS) == 16
    assert cap.limit(2 * RECOVERY_NS - 1) == 32


def test_the_limit_is_removed_after_a_long_time_without_batches() -> None:
    cap = MemoryCap()
    cap.lower(64, 0)

    assert cap.limit(100 * RECOVERY_NS) == 0


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2 * RECOVERY_NS)), min_size=1))
def test_the_limit_is_at_least_one_row_and_below_the_rows_that_did_not_fit(steps: list[tuple[int, int]]) -> None:
    cap = MemoryCap()
    now_ns = 0
    for rows, waited_ns in steps:
        now_ns += waited_ns
        cap.lower(rows, now_ns)

        assert 1 <= cap.limit(now_ns) <= max(rows // 2, 1)
