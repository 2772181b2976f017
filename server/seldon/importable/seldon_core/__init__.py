"""A substitute for `seldon_core` if the original is not installed, limited to what components import.

This package is last on a worker's path. Its modules have the original's names, signatures and texts; the code is in
`penstock.server.seldon`, which they import on demand. Source: seldon-core 1.17.1, by observed behavior.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    import penstock.server  # noqa: F401 - to check that it is found
except ImportError:
    # a process started by a component, on a Python that may lack penstock
    import runpy

    _SERVER = Path(__file__).resolve().parents[3]
    _child = runpy.run_path(str(_SERVER / "workers" / "child.py"))
    _child["make_importable"]([f"{name}={_SERVER.with_name(name)}" for name in ("server", "batching", "backends")])

from .lacking import WHY
from .storage import Storage
from .version import __version__

__all__ = ["Storage", "__version__"]


class _Absent:
    """The last finder on the path: rejects modules that this package lacks, with the reason."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(f"{__name__}."):
            raise ModuleNotFoundError(f"No module named '{name}': {WHY}", name=name)


sys.meta_path.append(_Absent)
