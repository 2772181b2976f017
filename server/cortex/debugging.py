"""The log lines of `?debug=true` for one request: its intermediate values, truncated.

Called by `conversions.py`, in the server or in a worker process. Source: Cortex 0.10, debug_obj.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

_MAX_ELEMENTS = 10
_MAX_CHARACTERS = 500

logger = logging.getLogger("penstock.hooks")


def log_value(name: str, value: Any) -> None:
    """Log a value of a request, or print it in a process without logging. It never raises."""
    try:
        line = f"{name}: {format_value(value)}"
    except Exception as error:  # noqa: BLE001 - what a value's own __str__ does must not change the answer
        line = f"{name}: {type(value).__name__} that cannot be shown: {type(error).__name__}"
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        print(line, flush=True)  # noqa: T201 - a worker's stdout is its log


def format_value(value: Any) -> str:
    """Format a value: ten elements of each list and dict, and 500 characters of each text."""
    if isinstance(value, str):
        return f'"{_truncate(value)}"'
    if isinstance(value, dict):
        parts: list[str] = []
        for key, each in value.items():
            if len(parts) >= _MAX_ELEMENTS:
                parts.append("...")
                break
            parts.append(f"{format_value(key)}: {format_value(each)}")
        return f"{{{', '.join(parts)}}}"
    # an array without axes claims to be iterable, and is not
    if isinstance(value, Iterable) and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ():
        parts = [format_value(each) for each in value[:_MAX_ELEMENTS]]
        if len(value) > _MAX_ELEMENTS:  # type: ignore[arg-type]
            parts.append("...")
        return f"[{', '.join(parts)}]"
    return _truncate(str(value))


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
