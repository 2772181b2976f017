"""About the server: metrics page lines about the server itself: versions, and which models can be served.

Called by metrics.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from contextlib import suppress

from .exposition import label_value

ONNX_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
"""The distributions that provide it; it is not imported, since a server may have no models that need it."""


def build_info() -> str:
    """Return the line with the versions in use."""
    versions = {"version": _version("penstock"), "python": platform.python_version(),
                "onnxruntime": _version(*ONNX_RUNTIMES)}  # fmt: skip
    labels = ",".join(f'{name}="{label_value(version)}"' for name, version in versions.items())
    return f"penstock_build_info{{{labels}}} 1"


def model_ready(readiness: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Return a line for each name, version and readiness."""
    return [
        f'penstock_model_ready{{model="{label_value(name)}",version="{version}"}} {int(ready)}'
        for name, version, ready in readiness
    ]


def _version(*distributions: str) -> str:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
