"""Versions: which version folders a model has, and which of them are served. Used by scan.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .findings import NO_VERSION, Finding
from .model_config import MODEL_FILE
from .parsed_config import ParsedConfig

VERSION = re.compile(r"[1-9][0-9]{0,18}")
"""The name of a version's folder."""
KERAS_FILES = frozenset((".keras", ".h5", ".hdf5"))
"""Suffixes of files written by Keras's `model.save`, which are not SavedModels."""
KERAS_ADVICE = "is a Keras file; serve the SavedModel that its model.export(FOLDER) writes (docs/tensorflow.md)"
_OTHER_FOLDERS = frozenset({"__pycache__", "configs", "initial_state", "warmup"})


def list_versions(folder: Path, findings: list[Finding]) -> list[int]:
    """List the version folders of a model's folder."""
    versions: list[int] = []
    for path in sorted(folder.iterdir()):
        if VERSION.fullmatch(path.name) and path.is_symlink() and not path.exists():
            text = f"is ignored: a broken link to {path.readlink()}"
            findings.append(Finding(path, text, is_mistake=False))
        if not path.is_dir() or path.name.startswith(".") or path.name in _OTHER_FOLDERS:
            continue
        if VERSION.fullmatch(path.name) and int(path.name) < 2**63:
            versions.append(int(path.name))
        else:
            findings.append(Finding(path, _ignored(path.name), is_mistake=False))
    return sorted(versions)


def _ignored(name: str) -> str:
    """Say why a folder is not a version. Source: Triton core, model_repository_manager.cc."""
    if name.isascii() and name.isdigit() and name.startswith("0"):
        return f"ignore version directory '{name}' which contains leading zeros in its directory name"
    return f"ignore version directory '{name}' which fails to convert to integral number"


def locate_version(folder: Path, version: int, filename: str, findings: list[Finding]) -> Path | None:
    """Locate the file of a version. A model with its weights in separate files may be a folder."""
    version_folder = folder / str(version)
    path = version_folder / filename
    if path.is_dir():
        path /= MODEL_FILE
    if path.is_file() and path.suffix not in KERAS_FILES:
        return path
    contents = ", ".join(sorted(child.name for child in version_folder.iterdir())[:8]) or "nothing"
    text = f"there is no {filename} (found {contents}); default_model_filename or [model] file can name another"
    if path.is_symlink() and not path.exists():
        text = f"{path.name} is a broken link"  # clients read this: its target is a path on this machine
    findings.append(missing_file(version_folder, version, text))
    return None


def missing_file(version_folder: Path, version: int, text: str) -> Finding:
    """Say what a version's folder lacks, or, if it holds a model saved by Keras, what to do with it."""
    keras_files = sorted(child for child in version_folder.iterdir() if child.suffix in KERAS_FILES)
    return (
        Finding(keras_files[0], KERAS_ADVICE, version=version)
        if keras_files
        else Finding(version_folder, text, version=version)
    )


def choose_versions(folder: Path, parsed: ParsedConfig, versions: Sequence[int], findings: list[Finding]) -> list[int]:
    """Choose which of the existing versions to serve.

    A version that is named but does not exist is a mistake if none is left; otherwise it is skipped, as in Triton.
    """
    policy, selection = parsed.get("model.versions", ("latest", 1))
    if policy == "specific":
        chosen = [version for version in versions if version in selection]
        for version in sorted(set(selection) - set(versions)):
            finding = parsed.make_mistake(
                "model.versions", f"version {version} of model '{folder.name}' does not exist"
            )
            findings.append(replace(finding, version=version, is_mistake=not chosen))
        return chosen
    if not versions:
        findings.append(Finding(folder, f"{NO_VERSION} '{folder.name}'"))
    return list(versions) if policy == "all" else list(versions[-selection:])


def set_policy(config: Any, parsed: ParsedConfig) -> None:
    """Set the version policy in a ModelConfig, declared or not."""
    policy, selection = parsed.get("model.versions", ("latest", 1))
    if policy == "all":
        config.version_policy.all.SetInParent()
    elif policy == "specific":
        config.version_policy.specific.versions[:] = selection
    else:
        config.version_policy.latest.num_versions = selection
