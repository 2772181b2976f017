"""ParsedConfig: the settings of one model from one file, and how two are merged and made into a ModelSpec.

Made by model_config.py and penstock_toml.py. Used by scan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.batching.spec import FIRST_RESPONSE_BOUNDS_MS, BatchPolicy, HookSpec, InstanceGroup, ModelSpec, WorkerSpec

from .defaults import Defaults
from .fields.batching import HAS_SCHEDULER
from .fields.identity import BACKEND
from .findings import Finding

POLICY_FIELDS = {
    "batching.max_batch_size": "max_batch_rows",
    "batching.preferred": "preferred_rows",
    "batching.max_queue_delay_us": "max_queue_delay_us",
    "batching.max_queue_rows": "max_queue_rows",
    "batching.max_queue_bytes": "max_queue_bytes",
    "batching.max_queue_requests": "max_queue_requests",
    "batching.default_timeout_us": "default_timeout_us",
    "batching.allow_timeout_override": "allow_timeout_override",
    "batching.cap": "cap_rows",
    "batching.executor": "executor",
    "batching.latency_target_ms": "latency_target_us",
    "batching.allowed_sizes": "allowed_rows",
    "batching.split": "split",
    "batching.invariance": "invariant",
    "batching.run_limit_ms": "run_limit_us",
    "batching.timeout_delays": "timeout_delays",
    "batching.priority_levels": "priority_levels",
    "batching.default_priority": "default_priority",
    "batching.level_policies": "level_policies",
    "batching.preserve_ordering": "preserve_ordering",
}
OPTIONS = {
    "runtime.intra_op_threads": "intra_op_thread_count",
    "runtime.inter_op_threads": "inter_op_thread_count",
    "runtime.execution_mode": "execution_mode",
    "runtime.mem_arena": "enable_mem_arena",
    "runtime.mem_pattern": "enable_mem_pattern",
    "runtime.graph_level": "graph_optimization_level",
    "runtime.isolated": "isolated",
    "runtime.signature": "TF_SIGNATURE_DEF",
    "runtime.graph_tag": "TF_GRAPH_TAG",
    "runtime.session_threads": "TF_USE_PER_SESSION_THREADS",
    "runtime.gpu_memory_fraction": "gpu_memory_fraction",
}
"""The options passed to a Loader. The names are Triton's parameters, except for the graph's level, which is
`optimization.graph.level` in Triton, and the last, which Triton has in --backend-config.
"""


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """The settings in one file. `values` has one entry per setting, by its name in penstock.toml (`batching.cap`).

    Units: those of ModelSpec, so that `batching.latency_target_ms` holds microseconds.
    `locations` has the file and line of each, line 0 if unknown. Settings that are omitted have no entry.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    locations: Mapping[str, tuple[Path, int]] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the setting `name`, or the default."""
        return self.values.get(name, default)

    def make_mistake(self, name: str, message: str) -> Finding:
        """Make a mistake about the setting `name`."""
        path, line = self.locations.get(name, (self.path, 0))
        return Finding(path, message, line)


def merge(first: ParsedConfig, second: ParsedConfig) -> tuple[ParsedConfig, list[Finding]]:
    """Merge two ParsedConfigs. A setting with different values in both is a mistake."""
    findings = [
        second.make_mistake(
            name,
            f"{name} is {format_value(value)} here and {format_value(first.values[name])} in {_location(first, name)}",
        )
        for name, value in second.values.items()
        if name in first.values and first.values[name] != value
    ]
    merged = ParsedConfig(first.path, {**second.values, **first.values}, {**second.locations, **first.locations})
    return merged, findings


def format_value(value: Any) -> str:
    """Format a value as a user would write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, InstanceGroup):
        return f"{value.count or 'auto'} on {', '.join(value.devices)}{', passive' if value.passive else ''}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _location(parsed: ParsedConfig, name: str) -> str:
    path, line = parsed.locations.get(name, (parsed.path, 0))
    return f"{path.name}:{line}" if line else path.name


def make_spec(name: str, path: Path, parsed: ParsedConfig, defaults: Defaults) -> ModelSpec:
    """Make the ModelSpec that all versions share. `path` is the model's folder, or the file that is the model."""
    sequence = parsed.get("sequence")
    return ModelSpec(
        name,
        0,
        path,
        backend=parsed.get("model.backend", BACKEND),
        inputs=parsed.get("inputs", ()),
        outputs=parsed.get("outputs", ()),
        policy=make_policy(parsed, defaults.max_batch_rows, defaults.hold_requests),
        memory_budget_bytes=parsed.get("instances.memory_budget_mb", 0),
        padding=parsed.get("padding", ()),
        hooks=make_hooks(parsed),
        options=runtime_options(parsed),
        labels=parsed.get("labels", {}),
        metric_tags=parsed.get("metrics.tags", ()),
        first_response_ms=parsed.get("metrics.first_response_ms", FIRST_RESPONSE_BOUNDS_MS),
        sequence=sequence and replace(sequence, hold_backlog=defaults.hold_backlog),
        ensemble=parsed.get("ensemble"),
        batch_inputs=parsed.get("batch_inputs", ()),
        batch_outputs=parsed.get("batch_outputs", ()),
        samples=parsed.get("samples", ()),
        cached=parsed.get("cached", False),
        decoupled=parsed.get("decoupled", False),
        device_priority=parsed.get("device_priority", 1.0),
        auto_complete=defaults.auto_complete,
    )


def make_policy(parsed: ParsedConfig, default_max_batch_rows: int, hold_requests: int = 0) -> BatchPolicy:
    """Make the configured batch policy. `hold_requests` applies only if Triton would have a scheduler."""
    fields = {attribute: parsed.values[name] for name, attribute in POLICY_FIELDS.items() if name in parsed.values}
    held = hold_requests if parsed.get(HAS_SCHEDULER) else 0
    return BatchPolicy(default_max_batch_rows=default_max_batch_rows, hold_requests=held, **fields)


def runtime_options(parsed: ParsedConfig) -> dict[str, str]:
    """Return the configured options of the runtime, except for those about GPUs (placing.py)."""
    configured = {option: parsed.values[name] for name, option in OPTIONS.items() if name in parsed.values}
    return {**configured, **parsed.get("runtime.entries", {})}


def make_hooks(parsed: ParsedConfig) -> HookSpec | None:
    """Return the configured hooks."""
    path = parsed.get("hooks.file")
    if path is None:
        return None
    names = ("replicas", "timeout_s", "metadata", "workers")
    fields = {name: parsed.values[f"hooks.{name}"] for name in names if f"hooks.{name}" in parsed.values}
    worker = WorkerSpec(
        interpreter=parsed.get("hooks.interpreter", ""), requirements=parsed.get("hooks.requirements"),
        memory_bytes=parsed.get("hooks.worker_memory_mb", 0),
    )  # fmt: skip
    return HookSpec(path, worker=worker, **fields)
