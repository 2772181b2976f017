"""Extras: imports packages that only `penstock perf` needs, when used, and names those that are missing."""

from __future__ import annotations

import importlib
from typing import Any

INSTALL = "pip install 'penstock[perf]'"


class MissingExtraError(Exception):
    """A package of the extra `perf` is not installed. The text says what to run."""


def needed(module: str) -> Any:
    """Import a module of the extra. Raises: MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"penstock perf needs {error.name}: {INSTALL}") from error
