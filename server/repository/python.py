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
    "hooks.file": "user code of its own stands around its run already",
    "padding": "the model is given each request's tensors as they are",
    "batching.allowed_sizes": "nothing is gathered, so that nothing can be filled up",
    "batching.split": "the parts of a request would be requests of their own to the model",
    "batching.invariance": "only the model itself can see to that",
    "batching.run_limit_ms": "say [worker] timeout_s",
    "instances.memory_budget_mb": "say [worker] memory_mb",
    "batch_inputs": "the model is given each request by itself",
    "batch_outputs": "the model answers each request by itself",
    "device_priority": "its processes take no turns on a device",
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
    return [stated.mistake(name, f"{name} means nothing for a Python model: {why}") for name, why in _wrong(stated)]


def _wrong(stated: Statement) -> Iterator[tuple[str, str]]:
    for name in stated.values:
        if name in _FOREIGN:
            yield name, _FOREIGN[name]
        elif name.startswith("runtime.") and name != "runtime.cpu_fallback":
            yield name, "no runtime of the server's runs it"
    if stated.get("batching.executor", "auto") != "auto":
        yield "batching.executor", "it runs in processes of its own"
    if any(not group.count for group in stated.get("instances", ())):
        yield "instances", 'count = "auto" is for models that the server can run by itself'
    sequence = stated.get("sequence")
    if sequence is not None and sequence.states:
        yield "sequence", "sequence_batching.state is kept for it by nobody: it can keep its own"
    if any(tensor.is_shape for tensor in stated.get("inputs", ())):
        yield "inputs", "is_shape_tensor is for runtimes that know shape tensors"


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
    return replace(spec, policy=policy, declared=declared, worker=worker(stated), backend=PYTHON)


def worker(stated: Statement) -> WorkerSpec:
    """Return where its code runs, as configured."""
    names = ("interpreter", "requirements", "timeout_s")
    said = {name: stated.values[f"worker.{name}"] for name in names if f"worker.{name}" in stated.values}
    return WorkerSpec(**said, memory_bytes=stated.get("worker.memory_mb", 0))
