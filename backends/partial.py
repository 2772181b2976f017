"""Partial: parts of a package, imported without what the package's own `__init__` imports.

Called by loading.py. `import tensorflow` takes 2.5 s of CPU, most of it for Keras, distribution, data sets and three
copies of its own names; what loads and runs a SavedModel takes 1 s, and 130 MB less.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Outline(ModuleType):
    """A package that has its place and nothing else; who wants more of it gets the whole, which takes its place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return getattr(_whole(self), name)


def _whole(outline: _Outline) -> ModuleType:
    if sys.modules.get(outline.__name__) is outline:
        del sys.modules[outline.__name__]
    return importlib.import_module(outline.__name__)


def import_parts(package: str, parts: Sequence[str]) -> None:
    """Import modules of a package; where that fails, the whole package, as anybody else would.

    Does nothing for a package that is there already, or is not installed. Modules that have been imported stay: the
    whole package takes them up. Raises: what importing the whole package raises.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    outline = sys.modules[package] = _Outline(package)
    outline.__path__ = list(spec.submodule_search_locations)
    outline.__spec__ = spec
    collects = gc.isenabled()
    gc.disable()  # or a fifth of it all would be walks over what there is so far
    try:
        for part in parts:
            importlib.import_module(f"{package}.{part}")
    except Exception:  # noqa: BLE001 - another version may be made otherwise
        _whole(outline)
    finally:
        gc.freeze()  # what has been imported stays
        if collects:
            gc.enable()
