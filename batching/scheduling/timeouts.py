"""Timeouts: when a request must have left the queue, by its model's policy and its own timeout. Called by dialects."""

from __future__ import annotations

from penstock.batching.spec import BatchPolicy, QueuePolicy

MIN_HONORED_US = 10_000
"""If the model configures no timeouts, a request's own timeout counts only from this value on. Triton ignores it there,
so programs send 30 or 1000 and mean seconds or milliseconds: each of their requests that had to wait at all would
fail."""


def level_of(policy: BatchPolicy, priority: int) -> int:
    """Return the level of a request: its own if that exists, otherwise the model's default."""
    return priority if 0 < priority <= policy.priority_levels else policy.default_priority


def default_policy(policy: BatchPolicy) -> QueuePolicy:
    """Return the queue policy of levels that have none of their own."""
    return QueuePolicy(
        policy.default_timeout_us, policy.allow_timeout_override, policy.max_queue_requests, policy.timeout_delays
    )


def has_default_timeout(policy: BatchPolicy) -> bool:
    """Whether requests that give no timeout have one anyway."""
    own = policy.level_policies.values()
    return policy.default_timeout_us > 0 or any(each.default_timeout_us for each in own)


def queue_deadline_ns(
    now_ns: int, timeout_us: int, policy: BatchPolicy, target_us: int = 0, priority: int = 0,
    min_honored_us: int = MIN_HONORED_US,
) -> int:  # fmt: skip
    """Return when a request must have left the queue; 0 for never. It may shorten a default, not lengthen it.

    `target_us` is when it should be answered, if only the queue can be held to it because hooks run around it.
    `min_honored_us`: the smallest timeout that counts if the policy configures none; 0 for what is left of an earlier
    one.
    """
    level_policy: BatchPolicy | QueuePolicy = policy
    if policy.level_policies:
        level_policy = policy.level_policies.get(level_of(policy, priority), policy)
    default_us = level_policy.default_timeout_us
    allows_override = level_policy.allow_timeout_override
    if allows_override is None:
        allows_override = default_us > 0 or timeout_us >= min_honored_us
    effective_us = default_us
    if timeout_us and allows_override:
        effective_us = min(timeout_us, default_us or timeout_us)
    effective_us = min(effective_us or target_us, target_us) if target_us else effective_us
    return now_ns + effective_us * 1000 if effective_us else 0
