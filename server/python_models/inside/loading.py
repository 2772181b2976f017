"""Imports model.py as Triton does.

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

_NATIVE_NAME = "c_python_backend_utils"
"""The module that Triton's takes its classes from; some models import it."""
_IMPORTABLE = Path(__file__).parents[1] / "importable"
"""Where processes started by the model find the module when they import model.py again."""


def load_class(file: Path, module: ModuleType) -> Any:
    """Import model.py, and return its TritonPythonModel. Raises: whatever the file raises.

    It can import files beside it and beside its version's folder. Its module is VERSION.model, so that it can also use
    `from . import`.
    """
    sys.modules[NAME] = sys.modules[_NATIVE_NAME] = module
    folder = file.parent
    for path in (str(folder), str(folder.parent), str(_IMPORTABLE)):
        if path not in sys.path:
            sys.path.append(path)
    name = file.stem
    if folder.name.isdecimal():
        _import_package(folder)
        name = f"{folder.name}.{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise TritonModelException(f"Python model file not found in '{file}'")
    model_module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model_module)
    if not hasattr(model_module, "TritonPythonModel"):
        raise AttributeError(f"module '{name}' has no attribute 'TritonPythonModel'")
    return model_module.TritonPythonModel


def _import_package(folder: Path) -> None:
    """Import the version's folder as the package of model.py, with its `__init__.py` if there is one."""
    spec = PathFinder.find_spec(folder.name, [str(folder.parent)])
    if spec is None:
        return  # the folder does not exist, so neither does the file
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(package)
