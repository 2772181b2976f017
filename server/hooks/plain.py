"""Plain: what is nothing but numbers, texts, arrays and containers of them, and how much that is. For `swift.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MANY = 2048
"""Of what a global has, for it to be gone through, again and again by a comprehension: as much as a sample has."""
_LOOKED_INTO = 1 << 18
"""Of what one has that is only looked into: a vocabulary."""
_DEEP = 8
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SCALARS = frozenset(np.sctypeDict.values())


def is_small(settings: Any) -> bool:
    """Tell whether what hooks are told of their configuration is plain, and little."""
    return members(settings) <= MANY


def has_small(value: Any) -> bool:
    """Tell whether each of what a large container has is plain and little."""
    left: float = _LOOKED_INTO
    for each in (*value, *value.values()) if type(value) is dict else value:
        count = members(each)
        left -= count
        if count > MANY or left < 0:
            return False
    return True


def members(value: Any, depth: int = 0) -> float:
    """Count what a value has; infinite where that is not numbers, texts and containers of them, or too much."""
    if type(value) is np.ndarray:
        return math.inf if value.dtype.hasobject else 1 + value.nbytes // 8
    if type(value) in PLAIN or (type(value) in _SCALARS and not value.dtype.hasobject):
        return 1 + (len(value) // 64 if isinstance(value, str | bytes) else 0)
    if depth >= _DEEP or type(value) not in {list, tuple, dict, set, frozenset} or len(value) > MANY:
        return math.inf
    count = 1.0
    for each in (*value, *value.values()) if type(value) is dict else value:
        count += members(each, depth + 1)
        if count > MANY:
            return math.inf
    return count
