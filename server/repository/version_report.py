"""The description that `penstock check` prints of a version that would be served. Used by check.py."""

from __future__ import annotations

from penstock.backends.signature import TensorSpec
from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.batching.loading.completion import UNSET_ROWS_REASON
from penstock.batching.scheduling.queue_limits import queue_rows
from penstock.batching.spec import BatchPolicy, ModelSpec, PaddedAxis, SequenceSpec, WorkerSpec
from penstock.server.hooks.loading import hook_names_in
from penstock.server.hooks.plan import plan_replicas

from .fields.identity import PYTHON, TENSORFLOW
from .parsed_config import format_value

_HIDDEN_OPTIONS = ("worker.", "cortex_signature", CPU_FALLBACK)
"""Prefixes of options that a user cannot set, or that are printed elsewhere."""


def describe_version(spec: ModelSpec, invariance: str, unbatched: str) -> str:
    """Describe a version that would be served: its configuration and what was completed."""
    kind = "ensemble" if spec.ensemble is not None else spec.backend
    lines = [f"{spec.name} version {spec.version}, {kind}, {spec.path}"]
    if spec.signature is not None:
        lines += _columns("inputs", [_describe_tensor(tensor) for tensor in spec.signature.inputs])
        lines += _columns("outputs", [_describe_tensor(tensor) for tensor in spec.signature.outputs])
        lines += _columns("batching", [_describe_batching(spec, unbatched)])
    elif spec.backend == PYTHON:
        lines += _columns("inputs", ["set by its auto_complete_config, which is not run here;"])
        lines += _columns("", ["so are outputs and batching"])
    lines += [line for axis in spec.padding for line in _columns("padding", [_describe_padding(axis)])]
    if spec.sequence is not None:
        lines += _columns("sequences", [_describe_sequences(spec.sequence)])
    if spec.cached or spec.decoupled:
        lines += _columns("answers", ["cached, with --cache-config" if spec.cached else "any number per request"])
    if invariance:
        lines += _columns("invariance", [invariance])
    if spec.ensemble is not None:
        lines += _columns("steps", [f"{step.model} {step.version or 'latest'}" for step in spec.ensemble.steps])
        return "\n".join(lines)
    groups = "; ".join(format_value(group) for group in spec.instances)
    budget = f", at most {spec.memory_budget_bytes >> 20} MB" if spec.memory_budget_bytes else ""
    lines += _columns("instances", [groups + budget])
    if spec.fallback_reason:
        lines += _columns("fallback", [f"on the CPU: {spec.fallback_reason}"])
    if options := [
        f"{name} {value}" for name, value in sorted(spec.options.items()) if not name.startswith(_HIDDEN_OPTIONS)
    ]:
        lines += _columns("runtime", [", ".join(options)])
    return "\n".join([*lines, *_describe_user_code(spec)])


def _describe_user_code(spec: ModelSpec) -> list[str]:
    hooks = spec.hooks
    lines = _columns("worker", [_describe_worker(spec.worker)]) if _has_worker(spec) else []
    if hooks is None or not hooks.has_file:
        return lines
    suffix = f" ({', '.join(names)})" if (names := hook_names_in(hooks.path)) else ""
    summary = f"{hooks.path}{suffix}, timeout: {hooks.timeout_s:g} s"
    lines += _columns("hooks", [summary, f"replicas: {plan_replicas(hooks).reason}"])
    return lines + (
        _columns("workers", [f"{hooks.workers}, {_describe_worker(hooks.worker)}"]) if hooks.workers else []
    )


def _has_worker(spec: ModelSpec) -> bool:
    return spec.backend in {PYTHON, TENSORFLOW} or spec.options.get("isolated") == "1"


def _describe_worker(worker: WorkerSpec) -> str:
    """Describe the Python and the limits of the processes that run user code."""
    parts = [f"Python: {worker.interpreter or 'that of the server'}"]
    if worker.requirements is not None:
        parts.append(f"environment: {worker.requirements}")
    if worker.timeout_s:
        parts.append(f"timeout: {worker.timeout_s:g} s")
    if worker.memory_bytes:
        parts.append(f"memory: at most {worker.memory_bytes >> 20} MB")
    return ", ".join(parts)


def _columns(title: str, texts: list[str]) -> list[str]:
    return [f"  {title if number == 0 else '':<11}{text}" for number, text in enumerate(texts)]


def _describe_tensor(tensor: TensorSpec) -> str:
    if not tensor.is_tensor:
        advice = f"; {tensor.advice}" if tensor.advice else ""
        return f"{tensor.name}: {tensor.datatype}, for hooks only{advice}"
    return f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}{', optional' if tensor.optional else ''}"


def _describe_batching(spec: ModelSpec, unbatched: str) -> str:
    policy = spec.policy
    if not policy.max_batch_rows:
        if spec.ensemble is not None or spec.backend == PYTHON:
            unbatched = UNSET_ROWS_REASON
        return f"none: {unbatched or 'the model has no batch axis'}"
    parts = [f"up to {count(policy.max_batch_rows, 'row')}"]
    if spec.ensemble is not None:
        return parts[0]
    if policy.preferred_rows:
        parts.append(f"preferred {', '.join(map(str, policy.preferred_rows))}")
    if policy.max_queue_delay_us:
        parts.append(f"waits up to {policy.max_queue_delay_us} us")
    parts.append(f"capped at {policy.cap_rows}" if policy.cap_rows else "cap learned")
    if policy.allowed_rows:
        parts.append(f"only of {format_value(policy.allowed_rows)} rows")
    return ", ".join([*parts, *_describe_policy(policy), f"queue of {queue_rows(policy)} rows"])


def _describe_policy(policy: BatchPolicy) -> list[str]:
    parts = []
    if policy.priority_levels:
        parts.append(f"{count(policy.priority_levels, 'level')}, {policy.default_priority} by default")
    if policy.preserve_ordering:
        parts.append("answers in request order")
    if policy.split:
        parts.append("larger requests are split")
    if policy.invariant:
        parts.append("strictly invariant")
    if policy.latency_target_us:
        parts.append(f"to be answered within {policy.latency_target_us / 1000:g} ms")
    if policy.run_limit_us:
        parts.append(f"runs end after {policy.run_limit_us / 1000:g} ms")
    return parts


def _describe_sequences(spec: SequenceSpec) -> str:
    parts = ["direct" if spec.direct else "oldest", f"expire after {spec.idle_us / 1e6:g} s"]
    if spec.iterative:
        parts.append("one request each, run until the model finishes it")
    if spec.controls:
        parts.append(f"controls {', '.join(control.name for control in spec.controls)}")
    if spec.states:
        parts.append(f"states {', '.join(state.input for state in spec.states)}")
    return ", ".join(parts)


def _describe_padding(padded: PaddedAxis) -> str:
    buckets = format_value(padded.buckets) if padded.buckets else "16, 32, 48, ..."
    mask = f", mask {padded.mask}" if padded.mask else ""
    return f"{padded.input}: axis {padded.axis} to {buckets} with {padded.value:g}{mask}"


def count(number: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
