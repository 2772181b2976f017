"""TensorFlow models in a repository: recognizes them, and locates their SavedModels.

Used by scan.py. Nothing here imports TensorFlow: a model is loaded by its own process (server/isolated).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.batching.spec import ModelSpec

from . import isolated, python
from .defaults import Defaults
from .fields.ensembles import PLATFORM as ENSEMBLE
from .fields.identity import GRAPHDEF, PYTHON, SAVED_MODEL, TENSORFLOW
from .findings import Finding
from .parsed_config import ParsedConfig
from .versions import VERSION, missing_file

SAVED_MODEL_FILE, GRAPHDEF_FILE = "model.savedmodel", "model.graphdef"
GRAPH_FILES = ("saved_model.pb", "saved_model.pbtxt")
"""A folder that holds one of these is a SavedModel."""


def is_saved_model(folder: Path) -> bool:
    """Return whether a folder is a SavedModel."""
    return any((folder / name).is_file() for name in GRAPH_FILES)


def undeclared_platform(config: Any, folder: Path) -> str:
    """Return the platform that a configuration omits; "" if it does not, or if no version has TensorFlow's files.

    Source: AutoCompleteBackendFields of Triton's core, and the layout of TensorFlow Serving, where a version's folder
    is itself the SavedModel. A model.onnx takes precedence here; in Triton it comes last.
    """
    if config.platform or config.backend not in {"", TENSORFLOW}:
        return ""
    if config.default_model_filename:
        known = {SAVED_MODEL_FILE: SAVED_MODEL, GRAPHDEF_FILE: GRAPHDEF}
        return known.get(config.default_model_filename, SAVED_MODEL if config.backend else "")
    versions = [version for version in folder.iterdir() if VERSION.fullmatch(version.name)]
    if any((version / python.ONNX_FILE).exists() for version in versions) and not config.backend:
        return ""
    if any(_find_saved_model(version) is not None or (version / SAVED_MODEL_FILE).is_dir() for version in versions):
        return SAVED_MODEL
    if any((version / GRAPHDEF_FILE).is_file() for version in versions):
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
    config.platform = (platform := undeclared_platform(config, folder)) or config.platform
    return bool(platform)


def file_name(folder: Path) -> str:
    """Return the default name of the model's file, by the layout of its versions."""
    versions = [version for version in folder.iterdir() if VERSION.fullmatch(version.name)]
    is_version = any(is_saved_model(version) for version in versions)
    in_subfolder = any((version / SAVED_MODEL_FILE).exists() for version in versions)
    return GRAPH_FILES[0] if is_version and not in_subfolder else SAVED_MODEL_FILE


def locate_version(folder: Path, version: int, filename: str, findings: list[Finding]) -> Path | None:
    """Locate the SavedModel of a version."""
    version_folder = folder / str(version)
    if (found := _find_saved_model(version_folder, filename)) is not None:
        return found
    path = version_folder / filename
    if path.is_dir():
        text = f"{filename} is not a SavedModel: there is no {GRAPH_FILES[0]} in it (found {_contents(path)})"
    else:
        contents = _contents(version_folder)
        text = f"there is no SavedModel: neither {SAVED_MODEL_FILE} nor {GRAPH_FILES[0]} (found {contents})"
        if filename not in {SAVED_MODEL_FILE, *GRAPH_FILES}:
            text = f"there is no {filename}, which the configuration names (found {contents})"
    findings.append(missing_file(version_folder, version, text))
    return None


def _find_saved_model(version_folder: Path, filename: str = SAVED_MODEL_FILE) -> Path | None:
    """Return the SavedModel in a version's folder: the subfolder of that name, or else the folder itself."""
    if is_saved_model(version_folder / filename):
        return version_folder / filename
    is_default_name = filename in {SAVED_MODEL_FILE, *GRAPH_FILES}
    return version_folder if is_default_name and is_saved_model(version_folder) else None


def _contents(folder: Path) -> str:
    return ", ".join(sorted(child.name for child in folder.iterdir())[:8]) or "nothing"


def as_tensorflow(spec: ModelSpec, parsed: ParsedConfig, defaults: Defaults) -> ModelSpec:
    """Complete the spec of a TensorFlow model. Its options also determine where its process runs."""
    rows, options = defaults.for_tensorflow
    merged = {**options, **spec.options}
    if float(merged.get("gpu_memory_fraction", "0")):
        merged["allow_growth"] = "0"  # as in Triton: a reserved fraction does not grow
    merged |= isolated.worker_options(parsed)
    policy = replace(spec.policy, default_max_batch_rows=rows)
    return replace(spec, policy=policy, options=merged, worker=python.worker_spec(parsed), backend=TENSORFLOW)
