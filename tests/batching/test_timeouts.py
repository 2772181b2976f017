"""Timeouts: when a request must have left the queue, by the policy of its model and level and its own timeout."""

from __future__ import annotations

import pytest

from penstock.batching.scheduling.timeouts import has_default_timeout, level_of, queue_deadline_ns
from penstock.batching.spec import BatchPolicy, QueuePolicy

FREE = BatchPolicy()
SAYS_SO = BatchPolicy(allow_timeout_override=True)
FIXED = BatchPolicy(default_timeout_us=100, allow_timeout_override=False)
BENDING = BatchPolicy(default_timeout_us=100)
LEVELS = BatchPolicy(
    default_timeout_us=100,
    priority_levels=3,
    default_priority=2,
    level_policies={1: QueuePolicy(10, allow_timeout_override=False), 2: QueuePolicy()},
)


@pytest.mark.parametrize(
    ("policy", "timeout_us", "target_us", "priority", "wait_us"),
    [
        (FREE, 0, 0, 0, 0),
        (FREE, 10_000, 0, 0, 10_000),
        (FREE, 9_999, 0, 0, 0),
        (SAYS_SO, 7, 0, 0, 7),
        (FREE, 0, 9, 0, 9),
        (FREE, 7, 5, 0, 5),
        (FIXED, 0, 0, 0, 100),
        (FIXED, 7, 0, 0, 100),
        (BENDING, 0, 0, 0, 100),
        (BENDING, 7, 0, 0, 7),
        (BENDING, 700, 0, 0, 100),
        (BENDING, 0, 50, 0, 50),
        (LEVELS, 7, 0, 1, 10),
        (LEVELS, 0, 0, 0, 0),
        (LEVELS, 7, 0, 0, 0),
        (LEVELS, 70_000, 0, 0, 70_000),
        (LEVELS, 700, 0, 3, 100),
        (LEVELS, 7, 0, 3, 7),
        (LEVELS, 70_000, 0, 4, 70_000),
    ],
)
def test_a_request_may_shorten_the_timeout_of_its_level_if_the_policy_allows_it(
    policy: BatchPolicy, timeout_us: int, target_us: int, priority: int, wait_us: int
) -> None:
    due = queue_deadline_ns(1_000, timeout_us, policy, target_us, priority)

    assert due == (1_000 + wait_us * 1_000 if wait_us else 0)


@pytest.mark.parametrize(
    ("levels", "default", "priority", "level"),
    [(0, 0, 0, 0), (0, 0, 5, 0), (3, 2, 0, 2), (3, 2, 1, 1), (3, 2, 3, 3), (3, 2, 4, 2), (3, 2, 2**64 - 1, 2)],
)
def test_a_nonexistent_level_is_replaced_by_the_default(levels: int, default: int, priority: int, level: int) -> None:
    assert level_of(BatchPolicy(priority_levels=levels, default_priority=default), priority) == level


@pytest.mark.parametrize(
    ("policy", "timed"), [(FREE, False), (FIXED, True), (BatchPolicy(level_policies={1: QueuePolicy(1)}), True)]
)
def test_a_model_has_a_default_timeout_if_any_of_its_levels_has_one(policy: BatchPolicy, timed: bool) -> None:
    assert has_default_timeout(policy) is timed
