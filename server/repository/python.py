"""Python models in a repository: recognizes them, and determines where their code runs.

Used by scan.py. Nothing here runs a model's code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from penstock.batching.spec import ModelSpec, WorkerSpec

from .completed_config import to_json
from .fields.batching import HAS_SCHEDULER
from .fields.identity import PYTHON
from .parsed_config import ParsedConfig
from .versions import VERSION

PYTHON_FILE, ONNX_FILE = "model.py", "model.onnx"


def is_undeclared(config: Any, folder: Path) -> bool:
    """Return whether a configuration omits that this is a Python model: a version has model.py, none has model.onnx.

    Source: Triton's core, AutoCompleteBackendFields.
    """
    if config.backend or config.platform or config.default_model_filename not in {"", PYTHON_FILE}:
        return False
    versions = [version for version in folder.iterdir() if VERSION.fullmatch(version.name)]
    has_python = any((version / PYTHON_FILE).is_file() for version in versions)
    return has_python and not any((version / ONNX_FILE).exists() for version in versions)


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
