"""TensorFlow models in a repository: when a folder is one, where its SavedModel is, and what may be said of it.

Called by scan.py. Nothing here imports TensorFlow: a model is loaded by a process of its own (server/isolated).
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
"""What makes a folder a SavedModel: one of these in it."""

ONLY_HERE = ("runtime.signature", "runtime.graph_tag", "runtime.session_threads", "runtime.gpu_memory_fraction")
"""What is said of no other runtime."""
_FOREIGN = (
    "runtime.execution_mode", "runtime.mem_arena", "runtime.mem_pattern", "runtime.graph_level", "runtime.gpu_graphs",
    "runtime.gpu_memory", "runtime.pinned", "runtime.cuda", "runtime.tensorrt",
    isolated.ISOLATED, LIBRARIES,
)  # fmt: skip


def is_saved_model(folder: Path) -> bool:
    """Tell whether a folder is a SavedModel."""
    return any((folder / name).is_file() for name in GRAPH_FILES)


def lacking_platform(config: Any, folder: Path) -> str:
    """Give the platform that a configuration leaves out; "" if it does not, or if no version has TensorFlow's files.

    Source: AutoCompleteBackendFields of Triton's core; and the layout of TensorFlow Serving, where a version's folder
    is the SavedModel itself. A model.onnx goes first here, as it did before; in Triton it goes last.
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
    """Say the platform in a configuration that leaves it out. Returns: whether there was anything to say.

    A Python model that brings its own code has none, whatever it says, as in Triton.
    """
    if config.backend == PYTHON and config.platform not in {"", ENSEMBLE}:
        name = config.default_model_filename or python.PYTHON_FILE
        if any((place / name).is_file() for place in folder.iterdir()):
            config.platform = ""
        return False
    config.platform = (platform := lacking_platform(config, folder)) or config.platform
    return bool(platform)


def file_name(folder: Path) -> str:
    """Give the name that stands for the model's file where none is said: that of the layout its versions have."""
    places = [place for place in folder.iterdir() if VERSION.fullmatch(place.name)]
    bare = any(is_saved_model(place) for place in places)
    named = any((place / SAVED_MODEL_FILE).exists() for place in places)
    return GRAPH_FILES[0] if bare and not named else SAVED_MODEL_FILE


def located(folder: Path, version: int, filename: str, findings: list[Finding]) -> Path | None:
    """Find the SavedModel of a version."""
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
    """Give the SavedModel in a version's folder: the folder of that name in it, or else itself."""
    if is_saved_model(place / filename):
        return place / filename
    plain = filename in {SAVED_MODEL_FILE, *GRAPH_FILES}
    return place if plain and is_saved_model(place) else None


def _listed(place: Path) -> str:
    return ", ".join(sorted(other.name for other in place.iterdir())[:8]) or "nothing"


def mistakes(stated: Statement) -> list[Finding]:
    """Find what is said of a TensorFlow model that means nothing for one."""
    return [stated.mistake(name, f"{name} does not apply to a TensorFlow model: {why}") for name, why in _wrong(stated)]


def _wrong(stated: Statement) -> Iterator[tuple[str, str]]:
    for name in stated.values:
        if name in _FOREIGN:
            yield name, "it is for ONNX Runtime"
    if stated.get("batching.executor") == "loop":
        yield "batching.executor", "it runs in its own process, which the event loop cannot wait for"


def foreign_runtime(stated: Statement) -> list[Finding]:
    """Find what is said of TensorFlow by a model of another runtime."""
    return [stated.mistake(name, f"{name} is for TensorFlow models") for name in stated.values if name in ONLY_HERE]


def as_tensorflow(spec: ModelSpec, stated: Statement, rows: int, options: Mapping[str, str]) -> ModelSpec:
    """Complete what is said of a TensorFlow model.

    `rows` and `options` are what the server says of all of them. Where its process runs goes by the options, too.
    """
    said = {**options, **spec.options}
    if float(said.get("gpu_memory_fraction", "0")):
        said["allow_growth"] = "0"  # as in Triton: what is set apart does not grow
    said |= isolated.worker_options(stated)
    policy = replace(spec.policy, default_max_batch_rows=rows)
    return replace(spec, policy=policy, options=said, worker=python.worker(stated), backend=TENSORFLOW)
