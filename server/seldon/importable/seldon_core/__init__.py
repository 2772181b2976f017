"""What `import seldon_core` finds where the original is not installed: what components import of it, and nothing else.

This package stands last on a worker's path. Its modules have the original's names, signatures and texts; what they do
is in `penstock.server.seldon`, which they import when it is needed. Source: seldon-core 1.17.1, as it behaves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    import penstock.server  # noqa: F401 - to have it found
except ImportError:
    # a process that a component has started, on a Python that need not have penstock
    import runpy

    _SERVER = Path(__file__).resolve().parents[3]
    _child = runpy.run_path(str(_SERVER / "workers" / "child.py"))
    _child["make_importable"]([f"{name}={_SERVER.with_name(name)}" for name in ("server", "batching", "backends")])

from .lacking import WHY
from .storage import Storage
from .version import __version__

__all__ = ["Storage", "__version__"]


class _Absent:
    """Asked last for a module: says of one of this package that it is not in it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(f"{__name__}."):
            raise ModuleNotFoundError(f"No module named '{name}': {WHY}", name=name)


sys.meta_path.append(_Absent)
