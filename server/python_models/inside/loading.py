"""Loading: model.py is imported as Triton imports it.

Source: python_backend, src/pb_stub.cc, ModelContext::StubSetup.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import TritonModelException
from .module import NAME

_ALSO = "c_python_backend_utils"
"""What Triton's module takes its classes from; some models import it."""
_IMPORTABLE = Path(__file__).parents[1] / "importable"
"""Where processes that the model starts find the module, when they import model.py anew."""


def load_class(file: Path, module: ModuleType) -> Any:
    """Import model.py, and give its TritonPythonModel. Raises: whatever the file raises.

    What lies beside it, and beside its version's folder, can be imported; it is itself VERSION.model, so that it may
    import from its folder by `from . import` too.
    """
    sys.modules[NAME] = sys.modules[_ALSO] = module
    folder = file.parent
    for place in (str(folder), str(folder.parent), str(_IMPORTABLE)):
        if place not in sys.path:
            sys.path.append(place)
    name = file.stem
    if folder.name.isdecimal():
        _import_package(folder)
        name = f"{folder.name}.{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise TritonModelException(f"Python model file not found in '{file}'")
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    if not hasattr(made, "TritonPythonModel"):
        raise AttributeError(f"module '{name}' has no attribute 'TritonPythonModel'")
    return made.TritonPythonModel


def _import_package(folder: Path) -> None:
    """Import the version's folder as the package that model.py is in, and its `__init__.py` if there is one."""
    spec = PathFinder.find_spec(folder.name, [str(folder.parent)])
    if spec is None:
        return  # no folder is there, so neither is the file
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(package)
