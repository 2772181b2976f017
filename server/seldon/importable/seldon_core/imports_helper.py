"""Whether TensorFlow is installed: `_TF_PRESENT`, determined on access, since the import takes seconds."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "_TF_PRESENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # a plain folder of that name can be imported, too
        from tensorflow import make_ndarray  # noqa: F401
    except ImportError:
        return False
    return True
