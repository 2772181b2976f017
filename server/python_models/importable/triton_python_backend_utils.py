"""What `import triton_python_backend_utils` finds where no server is: in a process that model.py has started.

multiprocessing's "spawn" and "forkserver" import model.py anew there. Tensors and configurations can be used as in the
model itself; what needs the server raises. In the model's own process another module has this name already.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_SERVER = Path(__file__).resolve().parents[2]


def _make_importable() -> None:
    """Make penstock's packages importable, as in the worker itself: its Python need not have them installed."""
    spec = importlib.util.spec_from_file_location("_penstock_child", _SERVER / "workers" / "child.py")
    if spec is None or spec.loader is None:
        raise ImportError("penstock's workers are gone")
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.make_importable([f"{name}={_SERVER.with_name(name)}" for name in ("server", "batching", "backends")])


def _made() -> ModuleType:
    if "penstock" not in sys.modules:
        _make_importable()
    from penstock.server.python_models.inside.module import make_module
    from penstock.server.python_models.inside.outside import ServerProxy

    return make_module(ServerProxy(None), str(Path.cwd()))


sys.modules["c_python_backend_utils"] = sys.modules[__name__] = _made()
