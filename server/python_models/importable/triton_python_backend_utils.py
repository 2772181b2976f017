"""The `triton_python_backend_utils` of processes without a server, which model.py has started.

multiprocessing's "spawn" and "forkserver" import model.py again there. Tensors and configurations work as in the model
itself; functions that need the server raise. In the model's own process another module already has this name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_SERVER = Path(__file__).resolve().parents[2]


def _make_importable() -> None:
    """Make penstock's packages importable, as in the worker: its Python need not have them installed."""
    spec = importlib.util.spec_from_file_location("_penstock_child", _SERVER / "workers" / "child.py")
    if spec is None or spec.loader is None:
        raise ImportError("penstock's worker program cannot be imported")
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.make_importable([f"{name}={_SERVER.with_name(name)}" for name in ("server", "batching", "backends")])


def _make_module() -> ModuleType:
    if "penstock" not in sys.modules:
        _make_importable()
    from penstock.server.python_models.inside.module import make_module
    from penstock.server.python_models.inside.server_proxy import ServerProxy

    return make_module(ServerProxy(None), str(Path.cwd()))


sys.modules["c_python_backend_utils"] = sys.modules[__name__] = _make_module()
