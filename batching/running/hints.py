"""Hints: which requests of a failed batch the error text points at. Called by isolation.py.

The most common failure caused by data is an index beyond a table, such as an unknown word, and runtimes name it: ONNX
Runtime "idx=1000 must be within the inclusive range [-1000,999]", TensorFlow "indices[0,2] = 1000 is not in [0, 1000)".
The requests with that number among their inputs run apart from the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.backend import Array

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest

MAX_HINTS = 3
"""How many times error texts are consulted for one batch. After that, many requests are guilty."""
REQUESTS_PER_HOLDER = 8
"""A number that more than one in this many requests hold points at none of them."""
MAX_VALUES = 1 << 16
"""Larger inputs are not searched: it would take longer than a run of some models."""
MAX_TEXT_CHARS = 1000
"""Characters; numbers that appear later in the text are ignored."""
_NUMBER = re.compile(r"(?<!error )(?<![\w.])-?\d{1,15}(?![\w.])")
"""Excludes the runtime's error codes and parts of names."""


def named_in_error(text: str, requests: Sequence[InferRequest]) -> list[InferRequest]:
    """Return the requests that hold a number which the text names and few others hold; [] if all of them do."""
    matches = _NUMBER.findall(text[:MAX_TEXT_CHARS]) if len(requests) > 1 else []
    numbers = [int(number) for number in dict.fromkeys(matches)]
    found: set[int] = set()
    for position in range(len(requests[0].inputs)) if numbers else ():
        arrays = [request.inputs[position] for request in requests]
        if set(map(type, arrays)) == {np.ndarray}:
            found |= _containing(arrays, numbers)  # type: ignore[arg-type]
    return [requests[at] for at in sorted(found)] if len(found) < len(requests) else []


def _containing(arrays: Sequence[Array], numbers: Sequence[int]) -> set[int]:
    sizes = [array.size for array in arrays]
    found: set[int] = set()
    if arrays[0].dtype.kind not in "iuf" or sum(sizes) > MAX_VALUES:
        return found
    values = np.concatenate([array.ravel() for array in arrays])
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # comparing with a number that a smaller type cannot hold warns
    for number in numbers:
        indices = np.flatnonzero(values == number)
        if indices.size:
            holders = set(np.searchsorted(np.cumsum(sizes), indices, side="right").tolist())
            if len(holders) <= max(1, len(arrays) // REQUESTS_PER_HOLDER):
                found |= holders
    return found
