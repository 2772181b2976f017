"""Python models in a repository: when a folder is one, what its configuration may say, and where its code runs.

Called by scan.py. Nothing here runs a model's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from penstock.batching.spec import ModelSpec, WorkerSpec

from .completed import to_json
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
"""What means nothing for a Python model, and why."""


def lacks_backend(config: Any, folder: Path) -> bool:
    """Tell whether a configuration leaves out that this is a Python model: a version has model.py, none model.onnx.

    Source: Triton's core, AutoCompleteBackendFields.
    """
    if config.backend or config.platform or config.default_model_filename not in {"", PYTHON_FILE}:
        return False
    places = [place for place in folder.iterdir() if VERSION.fullmatch(place.name)]
    found = any((place / PYTHON_FILE).is_file() for place in places)
    return found and not any((place / ONNX_FILE).exists() for place in places)


def mistakes(stated: Statement) -> list[Finding]:
    """Find what is said of a Python model that means nothing for one."""
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
    """Complete what is said of a Python model.

    Unless a scheduler is asked for, each request is run by itself, as in Triton.
    """
    policy = spec.policy
    asked = (HELD, "batching.preferred", "batching.max_queue_delay_us", "batching.cap")
    if not any(name in stated.values for name in asked):
        policy = replace(policy, cap_rows=1)
    sequence = stated.get("sequence")
    if sequence is not None and sequence.iterative and not policy.cap_rows:
        # all that go on are there by now: sizes that are learned leave room for those that are being answered
        policy = replace(policy, cap_rows=policy.max_batch_rows)
    declared = orjson.dumps(to_json(config)).decode()
    return replace(spec, policy=policy, declared=declared, worker=worker(stated), backend=PYTHON)


def worker(stated: Statement) -> WorkerSpec:
    """Give where its code runs, as it is stated."""
    names = ("interpreter", "requirements", "timeout_s")
    said = {name: stated.values[f"worker.{name}"] for name in names if f"worker.{name}" in stated.values}
    return WorkerSpec(**said, memory_bytes=stated.get("worker.memory_mb", 0))
