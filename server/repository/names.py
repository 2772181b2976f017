"""Names: the name of a model from its path, and which paths are themselves a model. Used by scan.py."""

from __future__ import annotations

from pathlib import Path

from . import tensorflow
from .versions import KERAS_ADVICE, KERAS_FILES, VERSION


def is_single(path: Path) -> bool:
    """Return whether a path is itself a model: an .onnx file, or a SavedModel."""
    return tensorflow.is_saved_model(path) if path.is_dir() else path.suffix == ".onnx" and path.is_file()


def model_name(path: Path) -> str:
    """Return the name of a model that is a single path."""
    return path.name.removesuffix(".savedmodel") if path.is_dir() else path.stem


def name_problem(name: str) -> str | None:
    """Describe what is wrong with a model's name, or return None."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"the name {name!a} is not UTF-8"
    return None if name.isprintable() else f"the name {name!a} has unprintable characters"


def single_problem(path: Path) -> str | None:
    """Describe what is wrong with a path that is itself a model, or return None."""
    if path.is_dir() and VERSION.fullmatch(path.name):
        return version_folder_text(path)
    hidden = "a model's name must not start with '.'" if path.name.startswith(".") else None
    return name_problem(model_name(path)) or hidden


def version_folder_text(path: Path) -> str:
    """Say which path to give instead of a version's folder."""
    return f"is one version of a model; pass the folder that contains the model's folder: {path.parent.parent}"


def path_problem(path: Path) -> str:
    """Say why a path cannot be served."""
    if not path.exists():
        return f"is a broken link to {path.readlink()}" if path.is_symlink() else "does not exist"
    if path.name in tensorflow.GRAPH_FILES:
        return f"is a part of a SavedModel; pass the folder: {path.parent}"
    if path.suffix in KERAS_FILES:
        return KERAS_ADVICE
    return "is neither a folder nor an .onnx file"


def folder_problem(path: Path) -> str:
    """Say why a folder of a repository is not a model."""
    if is_single(path):
        return "is a SavedModel without a version: move its files to a subfolder 1"
    return "is not a model: it has neither a version folder (1, 2, ...) nor a configuration"
