"""Statement: the settings of one model from one file, and how Statements are merged and made into ModelSpecs.

Made by model_config.py and penstock_toml.py. Used by scan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.batching.spec import FIRST_RESPONSE_BOUNDS_MS, BatchPolicy, HookSpec, InstanceGroup, ModelSpec, WorkerSpec

from .defaults import Defaults
from .fields.batching import HELD
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
class Statement:
    """The settings in one file. `values` has one entry per setting, by its name in penstock.toml (`batching.cap`).

    Units: those of ModelSpec, so that `batching.latency_target_ms` holds microseconds.
    `places` has the file and line of each, line 0 if unknown. Settings that are omitted have no entry.
    """

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the setting `name`, or the default."""
        return self.values.get(name, default)

    def mistake(self, name: str, message: str) -> Finding:
        """Make a mistake about the setting `name`."""
        path, line = self.places.get(name, (self.path, 0))
        return Finding(path, message, line)


def merge(first: Statement, second: Statement) -> tuple[Statement, list[Finding]]:
    """Merge two Statements. A setting with different values in both is a mistake."""
    findings = [
        second.mistake(name, f"{name} is {shown(value)} here and {shown(first.values[name])} in {_place(first, name)}")
        for name, value in second.values.items()
        if name in first.values and first.values[name] != value
    ]
    merged = Statement(first.path, {**second.values, **first.values}, {**second.places, **first.places})
    return merged, findings


def shown(value: Any) -> str:
    """Format a value as a user would write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    if isinstance(value, InstanceGroup):
        return f"{value.count or 'auto'} on {', '.join(value.devices)}{', passive' if value.passive else ''}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _place(statement: Statement, name: str) -> str:
    path, line = statement.places.get(name, (statement.path, 0))
    return f"{path.name}:{line}" if line else path.name


def spec(name: str, path: Path, statement: Statement, defaults: Defaults) -> ModelSpec:
    """Make the ModelSpec that all versions share. `path` is the model's folder, or the file that is the model."""
    sequence = statement.get("sequence")
    return ModelSpec(
        name,
        0,
        path,
        backend=statement.get("model.backend", BACKEND),
        inputs=statement.get("inputs", ()),
        outputs=statement.get("outputs", ()),
        policy=policy(statement, defaults.max_batch_rows, defaults.hold_requests),
        memory_budget_bytes=statement.get("instances.memory_budget_mb", 0),
        padding=statement.get("padding", ()),
        hooks=hooks(statement),
        options=options(statement),
        labels=statement.get("labels", {}),
        metric_tags=statement.get("metrics.tags", ()),
        first_response_ms=statement.get("metrics.first_response_ms", FIRST_RESPONSE_BOUNDS_MS),
        sequence=sequence and replace(sequence, hold_backlog=defaults.hold_backlog),
        ensemble=statement.get("ensemble"),
        batch_inputs=statement.get("batch_inputs", ()),
        batch_outputs=statement.get("batch_outputs", ()),
        samples=statement.get("samples", ()),
        cached=statement.get("cached", False),
        decoupled=statement.get("decoupled", False),
        device_priority=statement.get("device_priority", 1.0),
        auto_complete=defaults.auto_complete,
    )


def policy(statement: Statement, default_max_batch_rows: int, hold_requests: int = 0) -> BatchPolicy:
    """Make the configured batch policy. `hold_requests` applies only if Triton would have a scheduler."""
    said = {attribute: statement.values[name] for name, attribute in POLICY_FIELDS.items() if name in statement.values}
    held = hold_requests if statement.get(HELD) else 0
    return BatchPolicy(default_max_batch_rows=default_max_batch_rows, hold_requests=held, **said)


def options(statement: Statement) -> dict[str, str]:
    """Return the configured options of the runtime, except for those about GPUs (placing.py)."""
    said = {option: statement.values[name] for name, option in OPTIONS.items() if name in statement.values}
    return {**said, **statement.get("runtime.entries", {})}


def hooks(statement: Statement) -> HookSpec | None:
    """Return the configured hooks."""
    path = statement.get("hooks.file")
    if path is None:
        return None
    names = ("replicas", "timeout_s", "metadata", "workers")
    said = {name: statement.values[f"hooks.{name}"] for name in names if f"hooks.{name}" in statement.values}
    worker = WorkerSpec(
        interpreter=statement.get("hooks.interpreter", ""), requirements=statement.get("hooks.requirements"),
        memory_bytes=statement.get("hooks.worker_memory_mb", 0),
    )  # fmt: skip
    return HookSpec(path, worker=worker, **said)
