"""What a module of this package says of a name that the original's has and it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WHY = "penstock stands in for seldon-core here, without it; `pip install seldon-core` brings it"


def lacking(module: str, *names: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__`. It raises ImportError for these names, as `from` would not give our text else."""

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"cannot import name '{name}' from '{module}': {WHY}", name=module)
        raise AttributeError(f"module '{module}' has no attribute '{name}'")

    return missing
