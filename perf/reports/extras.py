"""Extras: packages that only `penstock perf` needs, imported where they are used and named where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install 'penstock[perf]'"


class MissingExtraError(Exception):
    """A package of the extra `perf` is not installed; the text says what to run."""


def needed(module: str) -> Any:
    """Import a module of the extra. Raises: MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"penstock perf needs {error.name}: {INSTALL}") from error
