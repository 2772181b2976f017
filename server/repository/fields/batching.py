"""How requests share batches: `max_batch_size` and `dynamic_batching`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.batching.spec import QueuePolicy

from .parse_context import ParseContext, enum_name

HONOURED = (
    "max_batch_size", "dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.preserve_ordering", "dynamic_batching.priority_levels",
    "dynamic_batching.default_priority_level", "dynamic_batching.default_queue_policy",
    "dynamic_batching.priority_queue_policy",
)  # fmt: skip
HOLD_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
"""An environment variable of Triton's tests: the number of requests that must wait before any run, once per model."""
HAS_SCHEDULER = "batching.has_scheduler"
"""Recorded for the models that those tests apply to: those for which Triton has a scheduler."""


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    config = context.config
    if config.max_batch_size < 0:
        context.add_mistake("max_batch_size", f"'max_batch_size' must be non-negative value for {context.name}")
    elif config.max_batch_size:
        context.set_value("batching.max_batch_size", config.max_batch_size, "max_batch_size")
    kind = config.WhichOneof("scheduling_choice")
    if kind in {"dynamic_batching", "sequence_batching"}:
        context.set_value(HAS_SCHEDULER, value=True, field=kind)
    batching = config.dynamic_batching
    if batching.preferred_batch_size:
        field = "dynamic_batching.preferred_batch_size"
        if min(batching.preferred_batch_size) < 1:
            context.add_mistake(field, f"dynamic batching preferred size must be positive for {context.name}")
        context.set_value("batching.preferred", tuple(sorted(set(batching.preferred_batch_size))), field)
    if batching.max_queue_delay_microseconds:
        field = "dynamic_batching.max_queue_delay_microseconds"
        context.set_value("batching.max_queue_delay_us", batching.max_queue_delay_microseconds, field)
    if batching.HasField("default_queue_policy"):
        _read_default_policy(context, batching.default_queue_policy)
    _read_levels(context, batching)
    if batching.preserve_ordering:
        _read_ordering(context, batching)


def hold_requests(environ: Mapping[str, str], name: str = HOLD_VARIABLE) -> int:
    """Return how many requests must wait before any run, from the environment; 0 for none. Parses like C's atoi."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def _read_default_policy(context: ParseContext, queue: Any) -> None:
    field = "dynamic_batching.default_queue_policy"
    policy = _read_policy(context, queue, field)
    if policy.delays_on_timeout:
        context.set_value("batching.timeout_delays", value=True, field=f"{field}.timeout_action")
    if policy.default_timeout_us:
        text = f"{field}.default_timeout_microseconds"
        context.set_value("batching.default_timeout_us", policy.default_timeout_us, text)
    if policy.max_requests:
        context.set_value("batching.max_queue_requests", policy.max_requests, f"{field}.max_queue_size")
    context.set_value(
        "batching.allow_timeout_override", policy.allow_timeout_override, f"{field}.allow_timeout_override"
    )


def _read_policy(context: ParseContext, queue: Any, field: str) -> QueuePolicy:
    action = enum_name(queue, "timeout_action")
    if not action:
        context.add_mistake(field, f"unknown timeout action {queue.timeout_action} for {context.name}")
    return QueuePolicy(
        queue.default_timeout_microseconds, queue.allow_timeout_override, queue.max_queue_size, action == "DELAY"
    )


def _read_levels(context: ParseContext, batching: Any) -> None:
    """Read the priority levels. The texts are those of Triton's ValidateModelConfig, if it has one."""
    levels, default, policies_by_level = (
        batching.priority_levels,
        batching.default_priority_level,
        batching.priority_queue_policy,
    )
    field, policies = "dynamic_batching.priority_levels", "dynamic_batching.priority_queue_policy"
    if not levels:
        for configured, name in ((default, "default_priority_level"), (policies_by_level, "priority_queue_policy")):
            if configured:
                # not rejected: qa/L0_config_json has a model with policies for levels that it does not have
                text = f"field 'dynamic_batching.{name}' has no effect without 'priority_levels' for {context.name}"
                context.add_warning(f"dynamic_batching.{name}", text)
        return
    if not 0 < default <= levels:
        text = f"default priority level must be in range [1, {levels}] for {context.name}"
        context.add_mistake("dynamic_batching.default_priority_level", text)
    if any(not 0 < level <= levels for level in policies_by_level):
        text = f"priority queue policy must have priority level in range [1, {levels}] for {context.name}"
        context.add_mistake(policies, text)
    context.set_value("batching.priority_levels", levels, field)
    context.set_value("batching.default_priority", default, "dynamic_batching.default_priority_level")
    if policies_by_level:
        configured = {
            level: _read_policy(context, policies_by_level[level], policies) for level in sorted(policies_by_level)
        }
        context.set_value("batching.level_policies", configured, policies)


def _read_ordering(context: ParseContext, batching: Any) -> None:
    """Read `preserve_ordering`, which excludes anything else that changes the order."""
    field = "dynamic_batching.preserve_ordering"
    if batching.priority_levels > 1:
        text = f"Only one priority level is allowed when 'preserve_ordering' is true for {context.name}"
        context.add_mistake(field, text)
    queues = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(queue.default_timeout_microseconds and enum_name(queue, "timeout_action") == "DELAY" for queue in queues):
        text = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {context.name}"
        context.add_mistake(field, text)
    context.set_value("batching.preserve_ordering", value=True, field=field)
