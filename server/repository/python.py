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
from .fields.batching import HELD
from .fields.identity import PYTHON
from .findings import Finding
from .statement import Statement
from .versions import VERSION

PYTHON_FILE, ONNX_FILE = "model.py", "model.onnx"

_FOREIGN = {
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


def lacks_backend(config: Any, folder: Path) -> bool:
    """Return whether a configuration omits that this is a Python model: a version has model.py, none has model.onnx.

    Source: Triton's core, AutoCompleteBackendFields.
    """
    if config.backend or config.platform or config.default_model_filename not in {"", PYTHON_FILE}:
        return False
    places = [place for place in folder.iterdir() if VERSION.fullmatch(place.name)]
    found = any((place / PYTHON_FILE).is_file() for place in places)
    return found and not any((place / ONNX_FILE).exists() for place in places)


def mistakes(stated: Statement) -> list[Finding]:
    """Find settings that have no effect on a Python model."""
    return [stated.mistake(name, f"{name} does not apply to a Python model: {why}") for name, why in _wrong(stated)]


def _wrong(stated: Statement) -> Iterator[tuple[str, str]]:
    for name in stated.values:
        if name in _FOREIGN:
            yield name, _FOREIGN[name]
        elif name.startswith("runtime.") and name != "runtime.cpu_fallback":
            yield name, "it does not run in one of the server's runtimes"
    if stated.get("batching.executor", "auto") != "auto":
        yield "batching.executor", "it runs in its own processes"
    if any(not group.count for group in stated.get("instances", ())):
        yield "instances", 'count = "auto" is for models that the server runs itself'
    sequence = stated.get("sequence")
    if sequence is not None and sequence.states:
        yield "sequence", "sequence_batching.state is not kept for it: it can keep its own state"
    if any(tensor.is_shape for tensor in stated.get("inputs", ())):
        yield "inputs", "is_shape_tensor requires a runtime that supports shape tensors"


def as_python(spec: ModelSpec, stated: Statement, config: Any) -> ModelSpec:
    """Complete the spec of a Python model.

    Unless a scheduler is configured, each request runs by itself, as in Triton.
    """
    policy = spec.policy
    asked = (HELD, "batching.preferred", "batching.max_queue_delay_us", "batching.cap")
    if not any(name in stated.values for name in asked):
        policy = replace(policy, cap_rows=1)
    sequence = stated.get("sequence")
    if sequence is not None and sequence.iterative and not policy.cap_rows:
        # all that continue are queued by now; a learned size would leave room for those being answered
        policy = replace(policy, cap_rows=policy.max_batch_rows)
    declared = orjson.dumps(to_json(config)).decode()
    return replace(spec, policy=policy, declared_config=declared, worker=worker(stated), backend=PYTHON)


def worker(stated: Statement) -> WorkerSpec:
    """Return where its code runs, as configured."""
    names = ("interpreter", "requirements", "timeout_s")
    said = {name: stated.values[f"worker.{name}"] for name in names if f"worker.{name}" in stated.values}
    return WorkerSpec(**said, memory_bytes=stated.get("worker.memory_mb", 0))
