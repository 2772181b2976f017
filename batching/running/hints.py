"""Hints: which requests of a failed batch the words of its failure point at. Called by isolation.py.

What data makes a run fail is most often an index beyond a table, as of a word that a vocabulary has not, and runtimes
say which: ONNX Runtime "idx=1000 must be within the inclusive range [-1000,999]", TensorFlow "indices[0,2] = 1000 is
not in [0, 1000)". Who has that number among his inputs is run by himself, and the others without him.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.backend import Array

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest

HINTS = 3
"""So often the words are asked about what is left of one batch. After that, many are guilty."""
FEW = 8
"""A number that more than one in so many requests have points at nobody."""
MOST_VALUES = 1 << 16
"""Larger inputs are not looked through: it would take longer than a run of some models."""
MOST_WORDS = 1000
"""Characters; a number that is named later than that is not looked for."""
_NUMBER = re.compile(r"(?<!error )(?<![\w.])-?\d{1,15}(?![\w.])")
"""Not a code of the runtime's, nor a part of a name."""


def pointed_at(words: str, requests: Sequence[InferRequest]) -> list[InferRequest]:
    """Give those of some requests that hold a number which the words name, and few others do; not all of them."""
    found_in = _NUMBER.findall(words[:MOST_WORDS]) if len(requests) > 1 else []
    numbers = [int(number) for number in dict.fromkeys(found_in)]
    found: set[int] = set()
    for position in range(len(requests[0].inputs)) if numbers else ():
        parts = [request.inputs[position] for request in requests]
        if set(map(type, parts)) == {np.ndarray}:
            found |= _holders(parts, numbers)  # type: ignore[arg-type]
    return [requests[at] for at in sorted(found)] if len(found) < len(requests) else []


def _holders(parts: Sequence[Array], numbers: Sequence[int]) -> set[int]:
    sizes = [part.size for part in parts]
    found: set[int] = set()
    if parts[0].dtype.kind not in "iuf" or sum(sizes) > MOST_VALUES:
        return found
    values = np.concatenate([part.ravel() for part in parts])
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # to compare with what a smaller one cannot hold warns
    for number in numbers:
        places = np.flatnonzero(values == number)
        if places.size:
            holders = set(np.searchsorted(np.cumsum(sizes), places, side="right").tolist())
            if len(holders) <= max(1, len(parts) // FEW):
                found |= holders
    return found
