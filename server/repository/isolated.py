"""ONNX models that request a process of their own, and the settings of processes that a runtime runs in.

Used by scan.py and inapplicable.py, and by tensorflow.py, whose models always have a process of their own.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.batching.spec import ModelSpec

from . import python
from .parsed_config import ParsedConfig

ISOLATED = "runtime.isolated"
_WORKER_KEYS = ("interpreter", "requirements", "timeout_s")


def is_isolated(parsed: ParsedConfig) -> bool:
    """Return whether a model that the server could run itself is configured to have its own process."""
    return bool(parsed.get(ISOLATED, "0") == "1")


def worker_options(parsed: ParsedConfig) -> dict[str, str]:
    """Return the settings of a model's process as options for its Loader."""
    options = {
        f"worker.{key}": str(parsed.values[f"worker.{key}"]) for key in _WORKER_KEYS if f"worker.{key}" in parsed.values
    }
    if "worker.memory_mb" in parsed.values:
        options["worker.memory_mb"] = str(parsed.values["worker.memory_mb"] >> 20)
    return options


def as_isolated(spec: ModelSpec, parsed: ParsedConfig) -> ModelSpec:
    """Complete the spec of an ONNX model that requests its own process. Other specs are returned unchanged."""
    if not is_isolated(parsed):
        return spec
    return replace(spec, options={**spec.options, **worker_options(parsed)}, worker=python.worker_spec(parsed))
