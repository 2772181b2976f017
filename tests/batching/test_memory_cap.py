from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.scheduling.memory_cap import RECOVERY_NS, MemoryCap


def test_there_is_no_limit_before_anything_did_not_fit() -> None:
    assert MemoryCap().limit(1) == 0


def test_half_of_what_did_not_fit_is_allowed() -> None:
    cap = MemoryCap()
    cap.lower(48, 1)

    assert cap.limit(1) == 24


def test_it_recovers_step_by_step_until_it_is_gone() -> None:
    cap = MemoryCap()
    for rows in (64, 32, 16):
        cap.lower(rows, 0)

    assert [cap.limit(step * RECOVERY_NS + late) for step in range(5) for late in (0, RECOVERY_NS - 1)] == [
        8, 8, 16, 16, 32, 32, 0, 0, 0, 0,
    ]  # fmt: skip


def test_running_out_again_begins_anew() -> None:
    cap = MemoryCap()
    cap.lower(64, 0)
    cap.lower(32, RECOVERY_NS - 1)

    assert cap.limit(RECOVERY_NS) == 16
    assert cap.limit(2 * RECOVERY_NS - 1) == 32


def test_what_is_not_asked_for_long_has_recovered_meanwhile() -> None:
    cap = MemoryCap()
    cap.lower(64, 0)

    assert cap.limit(100 * RECOVERY_NS) == 0


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2 * RECOVERY_NS)), min_size=1))
def test_at_least_one_row_is_allowed_and_never_what_has_just_not_fitted(steps: list[tuple[int, int]]) -> None:
    cap = MemoryCap()
    now_ns = 0
    for rows, waited_ns in steps:
        now_ns += waited_ns
        cap.lower(rows, now_ns)

        assert 1 <= cap.limit(now_ns) <= max(rows // 2, 1)
