"""Python models in a repository: recognizes them, checks their configuration, and determines where their code runs.

Used by scan.py. Nothing here runs a model's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from penstock.batching.spec import ModelSpec, WorkerSpec

from .completed_config import to_json
from .fields.batching import HAS_SCHEDULER
from .fields.identity import PYTHON
from .findings import Finding
from .parsed_config import ParsedConfig
from .versions import VERSION

PYTHON_FILE, ONNX_FILE = "model.py", "model.onnx"

_INEFFECTIVE = {
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


def is_undeclared(config: Any, folder: Path) -> bool:
    """Return whether a configuration omits that this is a Python model: a version has model.py, none has model.onnx.

    Source: Triton's core, AutoCompleteBackendFields.
    """
    if config.backend or config.platform or config.default_model_filename not in {"", PYTHON_FILE}:
        return False
    versions = [version for version in folder.iterdir() if VERSION.fullmatch(version.name)]
    has_python = any((version / PYTHON_FILE).is_file() for version in versions)
    return has_python and not any((version / ONNX_FILE).exists() for version in versions)


def find_mistakes(parsed: ParsedConfig) -> list[Finding]:
    """Find settings that have no effect on a Python model."""
    return [
        parsed.make_mistake(name, f"{name} does not apply to a Python model: {why}")
        for name, why in _ineffective(parsed)
    ]


def _ineffective(parsed: ParsedConfig) -> Iterator[tuple[str, str]]:
    for name in parsed.values:
        if name in _INEFFECTIVE:
            yield name, _INEFFECTIVE[name]
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


def as_python(spec: ModelSpec, parsed: ParsedConfig, config: Any) -> ModelSpec:
    """Complete the spec of a Python model.

    Unless a scheduler is configured, each request runs by itself, as in Triton.
    """
    policy = spec.policy
    scheduling_keys = (HAS_SCHEDULER, "batching.preferred", "batching.max_queue_delay_us", "batching.cap")
    if not any(name in parsed.values for name in scheduling_keys):
        policy = replace(policy, cap_rows=1)
    sequence = parsed.get("sequence")
    if sequence is not None and sequence.iterative and not policy.cap_rows:
        # all that continue are queued by now; a learned size would leave room for those being answered
        policy = replace(policy, cap_rows=policy.max_batch_rows)
    declared = orjson.dumps(to_json(config)).decode()
    return replace(spec, policy=policy, declared_config=declared, worker=worker_spec(parsed), backend=PYTHON)


def worker_spec(parsed: ParsedConfig) -> WorkerSpec:
    """Return where its code runs, as configured."""
    names = ("interpreter", "requirements", "timeout_s")
    values = {name: parsed.values[f"worker.{name}"] for name in names if f"worker.{name}" in parsed.values}
    return WorkerSpec(**values, memory_bytes=parsed.get("worker.memory_mb", 0))
