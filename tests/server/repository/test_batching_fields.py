"""How `dynamic_batching` in a ModelConfig and the environment variable of Triton's tests are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.batching.scheduling.queue_limits import queue_rows
from penstock.batching.spec import BatchPolicy, QueuePolicy
from penstock.server.repository.fields.batching import HOLD_VARIABLE, hold_requests
from penstock.server.repository.parsed_config import ParsedConfig, make_policy
from tests.server.repository.configs import read_text


def stated(text: str) -> ParsedConfig:
    statement, findings = read_text(text)
    assert findings == []
    return statement


def policy_of(text: str) -> BatchPolicy:
    return make_policy(stated(text), 64)


def test_priority_levels_and_their_queue_policies_are_read() -> None:
    found = policy_of("""
    dynamic_batching {
      priority_levels: 3 default_priority_level: 2
      default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 7 max_queue_size: 4 }
      priority_queue_policy { key: 3 value { default_timeout_microseconds: 9 allow_timeout_override: true } }
      priority_queue_policy { key: 1 value { timeout_action: DELAY max_queue_size: 5 } }
    }
    """)

    assert (found.priority_levels, found.default_priority) == (3, 2)
    assert found.level_policies == {
        1: QueuePolicy(0, allow_timeout_override=False, max_requests=5, delays_on_timeout=True),
        3: QueuePolicy(9, allow_timeout_override=True),
    }
    assert (found.default_timeout_us, found.max_queue_requests) == (7, 4)
    assert found.timeout_delays
    assert not found.allow_timeout_override


def test_the_number_of_priority_levels_may_be_the_largest_uint64() -> None:
    most = 2**64 - 1
    found = policy_of(f"dynamic_batching {{ priority_levels: {most} default_priority_level: {most} }}")

    assert (found.priority_levels, found.default_priority) == (most, most)


LEVEL = "priority_queue_policy { key: 1 value { max_queue_size: 1000 } }"
FITS = "default_queue_policy { max_queue_size: 2000 }"


@pytest.mark.parametrize(
    ("batching", "rows"),
    [
        ("", 1024),
        ("default_queue_policy { max_queue_size: 9 }", 1024),
        ("default_queue_policy { max_queue_size: 0 }", 1024),
        (FITS, 16_000),
        (f"{FITS} priority_levels: 3 default_priority_level: 2", 48_000),
        (f"{FITS} {LEVEL} priority_levels: 3 default_priority_level: 2", 40_000),
        (f"{LEVEL} priority_levels: 1 default_priority_level: 1", 8_000),
    ],
)
def test_the_default_queue_limit_in_rows_has_room_for_max_queue_size_requests(batching: str, rows: int) -> None:
    assert queue_rows(policy_of(f"max_batch_size: 8 dynamic_batching {{ {batching} }}")) == rows


def test_a_configured_queue_limit_in_rows_is_used() -> None:
    config = ParsedConfig(Path("m"), {"batching.max_queue_requests": 5000, "batching.max_queue_rows": 7})

    assert queue_rows(make_policy(config, 64)) == 7


@pytest.mark.parametrize(
    "more",
    [
        "",
        "priority_levels: 1 default_priority_level: 1",
        "default_queue_policy { default_timeout_microseconds: 5 }",
        "default_queue_policy { timeout_action: DELAY }",
    ],
)
def test_preserve_ordering_is_accepted_with_compatible_policies(more: str) -> None:
    assert policy_of(f"dynamic_batching {{ preserve_ordering: true {more} }}").preserve_ordering


def test_a_batch_policy_is_hashable() -> None:
    text = "dynamic_batching { priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 1 value {} } }"

    assert hash(policy_of(text)) == hash(policy_of(text))


@pytest.mark.parametrize(
    ("text", "held"),
    [("dynamic_batching { }", 5), ("sequence_batching { direct { } }", 5), ("", 0), ("max_batch_size: 4", 0)],
)
def test_requests_are_held_only_where_tritons_scheduler_holds_them(text: str, held: int) -> None:
    statement, _ = read_text(text)

    assert make_policy(statement, 64, 5).hold_requests == held
    assert make_policy(statement, 64).hold_requests == 0


@pytest.mark.parametrize(
    ("text", "count"), [(None, 0), ("", 0), ("12", 12), (" 3 ", 3), ("-1", 0), ("x", 0), ("²", 0), ("0", 0)]
)
def test_a_hold_variable_that_is_not_a_positive_number_holds_no_requests(text: str | None, count: int) -> None:
    assert hold_requests({} if text is None else {HOLD_VARIABLE: text}) == count
