"""The log lines of `?debug=true` for one request: its intermediate values, truncated.

Called by `conversions.py`, in the server or in a worker process. Source: Cortex 0.10, debug_obj.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

_MOST_ELEMENTS = 10
_MOST_LETTERS = 500

logger = logging.getLogger("penstock.hooks")


def show(name: str, value: Any) -> None:
    """Log a value of a request, or print it in a process without logging. It never raises."""
    try:
        line = f"{name}: {shown(value)}"
    except Exception as error:  # noqa: BLE001 - what a value's own __str__ does must not change the answer
        line = f"{name}: {type(value).__name__} that cannot be shown: {type(error).__name__}"
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, flush=True)  # noqa: T201 - a worker's stdout is its log


def shown(value: Any) -> str:
    """Format a value: ten elements of each list and dict, and 500 characters of each text."""
    if isinstance(value, str):
        return f'"{_cut(value)}"'
    if isinstance(value, dict):
        parts: list[str] = []
        for key, each in value.items():
            if len(parts) >= _MOST_ELEMENTS:
                parts.append("...")
                break
            parts.append(f"{shown(key)}: {shown(each)}")
        return f"{{{', '.join(parts)}}}"
    # an array without axes claims to be iterable, and is not
    if isinstance(value, Iterable) and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ():
        parts = [shown(each) for each in value[:_MOST_ELEMENTS]]
        if len(value) > _MOST_ELEMENTS:  # type: ignore[arg-type]
            parts.append("...")
        return f"[{', '.join(parts)}]"
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 3] + "..."
