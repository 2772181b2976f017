"""Whether TensorFlow is installed: `_TF_PRESENT`, found out when it is asked, as it takes seconds to import."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "_TF_PRESENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # a folder of that name is importable, too
        from tensorflow import make_ndarray  # noqa: F401
    except ImportError:
        return False
    return True
