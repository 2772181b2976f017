"""ONNX models that request a process of their own, and the settings of processes that a runtime runs in.

Used by scan.py and inapplicable.py, and by tensorflow.py, whose models always have their own process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.batching.spec import ModelSpec

from . import python
from .findings import Finding
from .parsed_config import ParsedConfig

ISOLATED = "runtime.isolated"
_LIMIT_KEYS = ("worker.timeout_s", "worker.memory_mb")
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


def find_mistakes(parsed: ParsedConfig) -> list[Finding]:
    """Find process settings that have no effect on an ONNX model."""
    return [parsed.make_mistake(name, text) for name, text in _ineffective(parsed)]


def _ineffective(parsed: ParsedConfig) -> Iterator[tuple[str, str]]:
    isolated = is_isolated(parsed)
    for name in parsed.values:
        if not name.startswith("worker.") or (isolated and name in _LIMIT_KEYS):
            continue
        models = "Python and TensorFlow models"
        if name in _LIMIT_KEYS:
            models += f", and ONNX models with {ISOLATED}"
        yield name, f"{name} is for {models}; for hooks, set hooks.{name.partition('.')[2]}"
    if isolated and parsed.get("batching.executor") == "loop":
        yield (
            "batching.executor",
            f"batching.executor does not apply with {ISOLATED}: the event loop cannot wait for the model's process",
        )
