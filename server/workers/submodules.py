"""Import of the standard library's submodules at first use, for user code that imports only their packages.

`import urllib` and then `urllib.request` works in a process that has imported the submodule elsewhere. In the servers
that such code was written for, Flask, requests or TensorFlow had done so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

_PACKAGES = ("concurrent", "importlib", "logging", "urllib")


def import_submodules_on_use() -> None:
    """Make the submodules of these packages attributes that are imported when they are used, in this process."""
    for name in _PACKAGES:
        package = importlib.import_module(name)
        vars(package).setdefault("__getattr__", _importer_of(package))


def _importer_of(package: ModuleType) -> Callable[[str], ModuleType]:
    def import_submodule(name: str) -> ModuleType:
        full_name = f"{package.__name__}.{name}"
        if name.startswith("_") or "." in name or importlib.util.find_spec(full_name) is None:
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}", name=name, obj=package)
        return importlib.import_module(full_name)

    return import_submodule
