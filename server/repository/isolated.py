"""ONNX models that request a process of their own, and the settings of processes that a runtime runs in.

Used by scan.py and misfits.py, and by tensorflow.py, whose models always have their own process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.batching.spec import ModelSpec

from . import python
from .findings import Finding
from .statement import Statement

ISOLATED = "runtime.isolated"
_LIMITS = ("worker.timeout_s", "worker.memory_mb")
_WORDS = ("interpreter", "requirements", "timeout_s")


def is_isolated(stated: Statement) -> bool:
    """Return whether a model that the server could run itself is configured to have its own process."""
    return bool(stated.get(ISOLATED, "0") == "1")


def worker_options(stated: Statement) -> dict[str, str]:
    """Return the settings of a model's process as options for its Loader."""
    said = {
        f"worker.{word}": str(stated.values[f"worker.{word}"]) for word in _WORDS if f"worker.{word}" in stated.values
    }
    if "worker.memory_mb" in stated.values:
        said["worker.memory_mb"] = str(stated.values["worker.memory_mb"] >> 20)
    return said


def as_isolated(spec: ModelSpec, stated: Statement) -> ModelSpec:
    """Complete the spec of an ONNX model that requests its own process. Other specs are returned unchanged."""
    if not is_isolated(stated):
        return spec
    return replace(spec, options={**spec.options, **worker_options(stated)}, worker=python.worker(stated))


def mistakes(stated: Statement) -> list[Finding]:
    """Find process settings that have no effect on an ONNX model."""
    return [stated.mistake(name, text) for name, text in _wrong(stated)]


def _wrong(stated: Statement) -> Iterator[tuple[str, str]]:
    isolated = is_isolated(stated)
    for name in stated.values:
        if not name.startswith("worker.") or (isolated and name in _LIMITS):
            continue
        whose = "Python and TensorFlow models"
        if name in _LIMITS:
            whose += f", and ONNX models with {ISOLATED}"
        yield name, f"{name} is for {whose}; for hooks, set hooks.{name.partition('.')[2]}"
    if isolated and stated.get("batching.executor") == "loop":
        yield (
            "batching.executor",
            f"batching.executor does not apply with {ISOLATED}: the event loop cannot wait for the model's process",
        )
