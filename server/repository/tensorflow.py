"""TensorFlow models in a repository: recognizes them, locates their SavedModels, and checks their settings.

Used by scan.py. Nothing here imports TensorFlow: a model is loaded by its own process (server/isolated).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.batching.spec import ModelSpec

from . import isolated, python
from .fields.ensembles import PLATFORM as ENSEMBLE
from .fields.identity import GRAPHDEF, PYTHON, SAVED_MODEL, TENSORFLOW
from .findings import Finding
from .libraries import LIBRARIES
from .statement import Statement
from .versions import VERSION, lacking

SAVED_MODEL_FILE, GRAPHDEF_FILE = "model.savedmodel", "model.graphdef"
GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
"""A folder that holds one of these is a SavedModel."""

ONLY_HERE = ("runtime.signature", "runtime.graph_tag", "runtime.session_threads", "runtime.gpu_memory_fraction")
"""Settings that apply to no other runtime."""
_FOREIGN = (
    "runtime.execution_mode", "runtime.mem_arena", "runtime.mem_pattern", "runtime.graph_level", "runtime.gpu_graphs",
    "runtime.gpu_memory", "runtime.pinned", "runtime.cuda", "runtime.tensorrt",
    isolated.ISOLATED, LIBRARIES,
)  # fmt: skip


def is_saved_model(folder: Path) -> bool:
    """Return whether a folder is a SavedModel."""
    return any((folder / name).is_file() for name in GRAPH_FILES)


def lacking_platform(config: Any, folder: Path) -> str:
    """Return the platform that a configuration omits; "" if it does not, or if no version has TensorFlow's files.

    Source: AutoCompleteBackendFields of Triton's core, and the layout of TensorFlow Serving, where a version's folder
    is itself the SavedModel. A model.onnx takes precedence here; in Triton it comes last.
    """
    if config.platform or config.backend not in {"", TENSORFLOW}:
        return ""
    if config.default_model_filename:
        known = {SAVED_MODEL_FILE: SAVED_MODEL, GRAPHDEF_FILE: GRAPHDEF}
        return known.get(config.default_model_filename, SAVED_MODEL if config.backend else "")
    places = [place for place in folder.iterdir() if VERSION.fullmatch(place.name)]
    if any((place / python.ONNX_FILE).exists() for place in places) and not config.backend:
        return ""
    if any(_saved_model(place) is not None or (place / SAVED_MODEL_FILE).is_dir() for place in places):
        return SAVED_MODEL
    if any((place / GRAPHDEF_FILE).is_file() for place in places):
        return GRAPHDEF
    return SAVED_MODEL if config.backend else ""


def complete_platform(config: Any, folder: Path) -> bool:
    """Set the platform in a configuration that omits it. Returns: whether it did.

    A Python model with its own code has no platform, whatever the configuration says, as in Triton.
    """
    if config.backend == PYTHON and config.platform not in {"", ENSEMBLE}:
        name = config.default_model_filename or python.PYTHON_FILE
        if any((place / name).is_file() for place in folder.iterdir()):
            config.platform = ""
        return False
    config.platform = (platform := lacking_platform(config, folder)) or config.platform
    return bool(platform)


def file_name(folder: Path) -> str:
    """Return the default name of the model's file, by the layout of its versions."""
    places = [place for place in folder.iterdir() if VERSION.fullmatch(place.name)]
    bare = any(is_saved_model(place) for place in places)
    named = any((place / SAVED_MODEL_FILE).exists() for place in places)
    return GRAPH_FILES[0] if bare and not named else SAVED_MODEL_FILE


def located(folder: Path, version: int, filename: str, findings: list[Finding]) -> Path | None:
    """Locate the SavedModel of a version."""
    place = folder / str(version)
    if (found := _saved_model(place, filename)) is not None:
        return found
    inside = place / filename
    if inside.is_dir():
        text = f"{filename} is not a SavedModel: there is no {GRAPH_FILES[0]} in it ({_listed(inside)} is there)"
    else:
        text = f"there is no SavedModel: neither {SAVED_MODEL_FILE} nor {GRAPH_FILES[0]} ({_listed(place)} is there)"
        if filename not in {SAVED_MODEL_FILE, *GRAPH_FILES}:
            text = f"there is no {filename}, which the configuration names ({_listed(place)} is there)"
    findings.append(lacking(place, version, text))
    return None


def _saved_model(place: Path, filename: str = SAVED_MODEL_FILE) -> Path | None:
    """Return the SavedModel in a version's folder: the subfolder of that name, or else the folder itself."""
    if is_saved_model(place / filename):
        return place / filename
    plain = filename in {SAVED_MODEL_FILE, *GRAPH_FILES}
    return place if plain and is_saved_model(place) else None


def _listed(place: Path) -> str:
    return ", ".join(sorted(other.name for other in place.iterdir())[:8]) or "nothing"


def mistakes(stated: Statement) -> list[Finding]:
    """Find settings that have no effect on a TensorFlow model."""
    return [stated.mistake(name, f"{name} does not apply to a TensorFlow model: {why}") for name, why in _wrong(stated)]


def _wrong(stated: Statement) -> Iterator[tuple[str, str]]:
    for name in stated.values:
        if name in _FOREIGN:
            yield name, "it is for ONNX Runtime"
    if stated.get("batching.executor") == "loop":
        yield "batching.executor", "it runs in its own process, which the event loop cannot wait for"


def foreign_runtime(stated: Statement) -> list[Finding]:
    """Find TensorFlow settings of a model of another runtime."""
    return [stated.mistake(name, f"{name} is for TensorFlow models") for name in stated.values if name in ONLY_HERE]


def as_tensorflow(spec: ModelSpec, stated: Statement, rows: int, options: Mapping[str, str]) -> ModelSpec:
    """Complete the spec of a TensorFlow model.

    `rows` and `options` are the server's defaults for all of them. The options also determine where its process runs.
    """
    said = {**options, **spec.options}
    if float(said.get("gpu_memory_fraction", "0")):
        said["allow_growth"] = "0"  # as in Triton: a reserved fraction does not grow
    said |= isolated.worker_options(stated)
    policy = replace(spec.policy, default_max_batch_rows=rows)
    return replace(spec, policy=policy, options=said, worker=python.worker(stated), backend=TENSORFLOW)
