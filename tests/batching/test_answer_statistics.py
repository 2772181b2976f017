"""AnswerStatistics: statistics of a decoupled model's answers, by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.answer_statistics import MAX_POSITIONS, MEMBERS, AnswerStatistics

NOTHING = {member: {"count": 0, "ns": 0} for member in MEMBERS}


def test_an_answer_is_counted_with_its_two_durations_and_their_sum() -> None:
    answers = AnswerStatistics()
    answers.record(0, 5, 2)
    answers.record(0, 1, 1)
    answers.record(1, 3, 4, failed=True)
    answers.record_empty(2, 6)
    answers.record_cancelled(2, 7)

    assert answers.snapshot() == {
        "0": NOTHING | {
            "compute_infer": {"count": 2, "ns": 6}, "compute_output": {"count": 2, "ns": 3},
            "success": {"count": 2, "ns": 9},
        },
        "1": NOTHING | {
            "compute_infer": {"count": 1, "ns": 3}, "compute_output": {"count": 1, "ns": 4},
            "fail": {"count": 1, "ns": 7},
        },
        "2": NOTHING | {
            "compute_infer": {"count": 1, "ns": 6}, "empty_response": {"count": 1, "ns": 6},
            "cancel": {"count": 1, "ns": 7},
        },
    }  # fmt: skip


@given(st.lists(st.integers(0, 2 * MAX_POSITIONS), max_size=50))
def test_positions_are_bounded_and_counts_are_complete_within_the_bound(positions: list[int]) -> None:
    answers = AnswerStatistics()
    for position in positions:
        answers.record(position, 1, 1)

    counted = {position: each["success"]["count"] for position, each in answers.snapshot().items()}
    assert len(counted) <= MAX_POSITIONS
    counted_positions = [position for position in positions if position < MAX_POSITIONS]
    assert {position for position, count in counted.items() if count} == set(map(str, counted_positions))
    assert sum(counted.values()) == len(counted_positions)
