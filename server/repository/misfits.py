"""Misfits: settings of a model that cannot be honored, or have no effect on its kind. Used by scan.py."""

from __future__ import annotations

from penstock.batching.spec import ModelSpec

from . import isolated, python, tensorflow
from .fields.ensembles import is_foreign
from .fields.identity import PYTHON, TENSORFLOW
from .findings import Finding
from .statement import Statement

NATIVE_FILE = "penstock.toml"


def misfits(spec: ModelSpec, stated: Statement) -> list[Finding]:
    """Find settings of a model that have no effect on its kind."""
    findings = oversized(spec, stated)
    if spec.backend == PYTHON:
        findings += python.mistakes(stated)
    elif spec.backend == TENSORFLOW:
        findings += tensorflow.mistakes(stated)
    else:
        findings += [*isolated.mistakes(stated), *tensorflow.foreign_runtime(stated)]
    return findings + (_foreign(stated) if spec.ensemble is not None else [])


def _foreign(stated: Statement) -> list[Finding]:
    """Find settings in an ensemble's penstock.toml that have no effect on ensembles."""
    return [
        stated.mistake(name, f"{name} does not apply to an ensemble")
        for name in stated.values
        if is_foreign(name) and stated.places.get(name, (stated.path, 0))[0].name == NATIVE_FILE
    ]


def oversized(spec: ModelSpec, stated: Statement) -> list[Finding]:
    """Find sizes that exceed the largest batch."""
    most = spec.policy.max_batch_rows
    if most is None:
        return []
    sizes = {
        "batching.cap": spec.policy.cap_rows or 0,
        "batching.allowed_sizes": max(spec.policy.allowed_rows, default=0),
    }
    more = f"exceeds the max batch size of {most}"
    texts = {name: f"{name}: {size} {more}" for name, size in sizes.items() if size > most}
    if max(spec.policy.preferred_rows, default=0) > most:
        texts["batching.preferred"] = spec.preferred_size_error
    return [stated.mistake(name, text) for name, text in texts.items()]
