"""Partial: imports parts of a package without what the package's own `__init__` imports.

Used by loading.py. `import tensorflow` takes 2.5 s of CPU, most of it for Keras, distribution, data sets and three
copies of its own names; importing only what loads and runs a SavedModel takes 1 s, and 130 MB less.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _PartialPackage(ModuleType):
    """A package with only its path; accessing anything else imports the whole package, which replaces it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return getattr(_import_full(self), name)


def _import_full(partial: _PartialPackage) -> ModuleType:
    if sys.modules.get(partial.__name__) is partial:
        del sys.modules[partial.__name__]
    return importlib.import_module(partial.__name__)


def import_parts(package: str, parts: Sequence[str]) -> None:
    """Import modules of a package; if that fails, import the whole package in the ordinary way.

    Does nothing if the package is already imported or not installed. Imported modules stay: the whole package reuses
    them. Raises: what importing the whole package raises.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    partial = sys.modules[package] = _PartialPackage(package)
    partial.__path__ = list(spec.submodule_search_locations)
    partial.__spec__ = spec
    gc_was_enabled = gc.isenabled()
    gc.disable()  # otherwise a fifth of the time would go to scans of what has been imported so far
    try:
        for part in parts:
            importlib.import_module(f"{package}.{part}")
    except Exception:  # noqa: BLE001 - another version may be structured differently
        _import_full(partial)
    finally:
        gc.freeze()  # imported modules stay
        if gc_was_enabled:
            gc.enable()
