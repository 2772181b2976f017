"""Timeouts: when a request must have left the queue, by its model's policy and its own wish. Called by dialects."""

from __future__ import annotations

from .spec import BatchPolicy


def due_ns(now_ns: int, timeout_us: int, policy: BatchPolicy, target_us: int = 0) -> int:
    """Give when a request must have left the queue; 0 for never. It may shorten a default, not lengthen it.

    `target_us` is when it should be answered, where nothing but the queue can be held to it: hooks run around it.
    """
    default_us = policy.default_timeout_us
    if timeout_us and policy.allow_timeout_override:
        chosen = min(timeout_us, default_us) if default_us else timeout_us
    else:
        chosen = default_us
    chosen = min(chosen or target_us, target_us) if target_us else chosen
    return now_ns + chosen * 1000 if chosen else 0
