"""How requests share batches: `max_batch_size` and `dynamic_batching`."""

from __future__ import annotations

from typing import Any

from .notes import Notes

HONOURED = (
    "max_batch_size", "dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.default_queue_policy",
)  # fmt: skip
REFUSED = (
    "dynamic_batching.preserve_ordering", "dynamic_batching.priority_levels",
    "dynamic_batching.default_priority_level", "dynamic_batching.priority_queue_policy",
)  # fmt: skip


def read(notes: Notes) -> None:
    """Read them."""
    config = notes.config
    if config.max_batch_size < 0:
        notes.mistake("max_batch_size", f"'max_batch_size' must be non-negative value for {notes.name}")
    elif config.max_batch_size:
        notes.say("batching.max_batch_size", config.max_batch_size, "max_batch_size")
    batching = config.dynamic_batching
    if batching.preferred_batch_size:
        field = "dynamic_batching.preferred_batch_size"
        if min(batching.preferred_batch_size) < 1:
            notes.mistake(field, f"dynamic batching preferred size must be positive for {notes.name}")
        notes.say("batching.preferred", tuple(sorted(set(batching.preferred_batch_size))), field)
    if batching.max_queue_delay_microseconds:
        field = "dynamic_batching.max_queue_delay_microseconds"
        notes.say("batching.max_queue_delay_us", batching.max_queue_delay_microseconds, field)
    if batching.HasField("default_queue_policy"):
        _queue_policy(notes, batching.default_queue_policy)


def _queue_policy(notes: Notes, queue: Any) -> None:
    field = "dynamic_batching.default_queue_policy"
    if queue.timeout_action:
        notes.mistake(f"{field}.timeout_action", f"field '{field}.timeout_action' is supported as REJECT only")
    if queue.default_timeout_microseconds:
        text = f"{field}.default_timeout_microseconds"
        notes.say("batching.default_timeout_us", queue.default_timeout_microseconds, text)
    if queue.max_queue_size:
        notes.say("batching.max_queue_requests", queue.max_queue_size, f"{field}.max_queue_size")
    notes.say("batching.allow_timeout_override", queue.allow_timeout_override, f"{field}.allow_timeout_override")
