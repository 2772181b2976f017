"""Inapplicable settings: those of a model that cannot be honored, or have no effect on its kind. Used by scan.py."""

from __future__ import annotations

from penstock.batching.spec import ModelSpec

from . import isolated, python, tensorflow
from .fields.ensembles import is_inapplicable
from .fields.identity import PYTHON, TENSORFLOW
from .findings import Finding
from .parsed_config import ParsedConfig

NATIVE_FILE = "penstock.toml"


def find_inapplicable(spec: ModelSpec, parsed: ParsedConfig) -> list[Finding]:
    """Find settings of a model that have no effect on its kind."""
    findings = find_oversized(spec, parsed)
    if spec.backend == PYTHON:
        findings += python.find_mistakes(parsed)
    elif spec.backend == TENSORFLOW:
        findings += tensorflow.find_mistakes(parsed)
    else:
        findings += [*isolated.find_mistakes(parsed), *tensorflow.find_foreign_settings(parsed)]
    return findings + (_inapplicable_to_ensemble(parsed) if spec.ensemble is not None else [])


def _inapplicable_to_ensemble(parsed: ParsedConfig) -> list[Finding]:
    """Find settings in an ensemble's penstock.toml that have no effect on ensembles."""
    return [
        parsed.make_mistake(name, f"{name} does not apply to an ensemble")
        for name in parsed.values
        if is_inapplicable(name) and parsed.locations.get(name, (parsed.path, 0))[0].name == NATIVE_FILE
    ]


def find_oversized(spec: ModelSpec, parsed: ParsedConfig) -> list[Finding]:
    """Find sizes that exceed the largest batch."""
    max_rows = spec.policy.max_batch_rows
    if max_rows is None:
        return []
    sizes = {
        "batching.cap": spec.policy.cap_rows or 0,
        "batching.allowed_sizes": max(spec.policy.allowed_rows, default=0),
    }
    excess = f"exceeds the max batch size of {max_rows}"
    texts = {name: f"{name}: {size} {excess}" for name, size in sizes.items() if size > max_rows}
    if max(spec.policy.preferred_rows, default=0) > max_rows:
        texts["batching.preferred"] = spec.preferred_size_error
    return [parsed.make_mistake(name, text) for name, text in texts.items()]
