"""The error for names that the original's modules have and these lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WHY = "Penstock's replacement for seldon-core does not have it; to use the original: pip install seldon-core"


def lacking(module: str, *names: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__`. It raises ImportError for these names: `from` replaces other errors' text."""

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"cannot import name '{name}' from '{module}': {WHY}", name=module)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing
