"""The error for names that the original's modules have and these lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WHY = "penstock stands in for seldon-core here, without it; `pip install seldon-core` brings it"


def lacking(module: str, *names: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__`. It raises ImportError for these names: `from` replaces other errors' text."""

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"cannot import name '{name}' from '{module}': {WHY}", name=module)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing
