"""Inapplicable settings: those of a model that have no effect on its kind, or exceed its batch. Used by scan.py."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.batching.spec import ModelSpec

from .fields.ensembles import is_inapplicable
from .fields.identity import PYTHON, TENSORFLOW
from .findings import Finding
from .isolated import ISOLATED, is_isolated
from .parsed_config import ParsedConfig
from .penstock_toml import NATIVE_FILE

_NOT_PYTHON = {
    "hooks.file": "the model's own code can do the same",
    "padding": "the model receives each request's tensors unchanged",
    "batching.allowed_sizes": "requests are not gathered into batches that could be padded",
    "batching.split": "the model would see the parts of a request as separate requests",
    "batching.invariance": "only the model itself can guarantee it",
    "batching.run_limit_ms": "set [worker] timeout_s",
    "instances.memory_budget_mb": "set [worker] memory_mb",
    "batch_inputs": "the model receives each request separately",
    "batch_outputs": "the model answers each request separately",
    "device_priority": "its processes do not take turns on a device",
}
"""Settings that have no effect on a Python model, and why."""
_TENSORFLOW_ONLY = ("runtime.signature", "runtime.graph_tag", "runtime.session_threads", "runtime.gpu_memory_fraction")
_ONNX_ONLY = (
    "runtime.execution_mode", "runtime.mem_arena", "runtime.mem_pattern", "runtime.graph_level", "runtime.gpu_graphs",
    "runtime.gpu_memory", "runtime.pinned", "runtime.cuda", "runtime.tensorrt", ISOLATED,
)  # fmt: skip
_LIMIT_KEYS = ("worker.timeout_s", "worker.memory_mb")


def find_inapplicable(spec: ModelSpec, parsed: ParsedConfig) -> list[Finding]:
    """Find settings of a model that have no effect on its kind."""
    texts = [*_oversized(spec)]
    if spec.backend == PYTHON:
        texts += [(name, f"{name} does not apply to a Python model: {why}") for name, why in _unused_by_python(parsed)]
    elif spec.backend == TENSORFLOW:
        texts += [
            (name, f"{name} does not apply to a TensorFlow model: {why}") for name, why in _unused_by_tensorflow(parsed)
        ]
    else:
        texts += [*_unused_by_onnx(parsed)]
    if spec.ensemble is not None:
        texts += [
            (name, f"{name} does not apply to an ensemble")
            for name in parsed.values
            if is_inapplicable(name) and parsed.locations.get(name, (parsed.path, 0))[0].name == NATIVE_FILE
        ]
    return [parsed.make_mistake(name, text) for name, text in texts]


def _oversized(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield the sizes that exceed the largest batch, and what to say about each."""
    policy, max_rows = spec.policy, spec.policy.max_batch_rows
    if max_rows is None:
        return
    sizes = {"batching.cap": policy.cap_rows or 0, "batching.allowed_sizes": max(policy.allowed_rows, default=0)}
    for name, size in sizes.items():
        if size > max_rows:
            yield name, f"{name}: {size} exceeds the max batch size of {max_rows}"
    if max(policy.preferred_rows, default=0) > max_rows:
        yield "batching.preferred", spec.preferred_size_error


def _unused_by_python(parsed: ParsedConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that have no effect on a Python model, and why."""
    for name in parsed.values:
        if name in _NOT_PYTHON:
            yield name, _NOT_PYTHON[name]
        elif name.startswith("runtime.") and name != "runtime.cpu_fallback":
            yield name, "it does not run in one of the server's runtimes"
    if parsed.get("batching.executor", "auto") != "auto":
        yield "batching.executor", "it runs in its own processes"
    if any(not group.count for group in parsed.get("instances", ())):
        yield "instances", 'count = "auto" is for models that the server runs itself'
    sequence = parsed.get("sequence")
    if sequence is not None and sequence.states:
        yield "sequence", "sequence_batching.state is not kept for it: it can keep its own state"
    if any(tensor.is_shape for tensor in parsed.get("inputs", ())):
        yield "inputs", "is_shape_tensor requires a runtime that supports shape tensors"


def _unused_by_tensorflow(parsed: ParsedConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that have no effect on a TensorFlow model, and why."""
    for name in parsed.values:
        if name in _ONNX_ONLY:
            yield name, "it is for ONNX Runtime"
    if parsed.get("batching.executor") == "loop":
        yield "batching.executor", "it runs in its own process, which the event loop cannot wait for"


def _unused_by_onnx(parsed: ParsedConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that have no effect on an ONNX model, and what to say about each."""
    isolated = is_isolated(parsed)
    for name in parsed.values:
        if not name.startswith("worker.") or (isolated and name in _LIMIT_KEYS):
            continue
        models = "Python and TensorFlow models"
        if name in _LIMIT_KEYS:
            models += f", and ONNX models with {ISOLATED}"
        yield name, f"{name} is for {models}; for hooks, set hooks.{name.partition('.')[2]}"
    if isolated and parsed.get("batching.executor") == "loop":
        text = f"does not apply with {ISOLATED}: the event loop cannot wait for the model's process"
        yield "batching.executor", f"batching.executor {text}"
    for name in parsed.values:
        if name in _TENSORFLOW_ONLY:
            yield name, f"{name} is for TensorFlow models"
