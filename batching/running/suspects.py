"""Suspects: which requests of a failed batch run next, alone or together, to find the guilty one. Used by isolation.py.

First those that the error text points at: the most common failure caused by data is an index beyond a table, such as an
unknown word, and runtimes name it: ONNX Runtime "idx=1000 must be within the inclusive range [-1000,999]", TensorFlow
"indices[0,2] = 1000 is not in [0, 1000)". The requests with that number among their inputs run apart from the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.backend import Array

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest

PARTS = 3
"""Of the requests that failed together, a third is tried, or two thirds if a failure costs next to nothing: either is
within a few percent of the optimum. Halves take 6 to 19% more for small models (docs/adr/0011)."""
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


class Suspects:
    """The unsettled requests of a failed batch, from first to last. Pure: told how runs went.

    A part of those that failed together is run, starting with the first. If it passes, its requests are served, and the
    guilty one must be among the others, which are not run as a whole again; if it fails, it is divided further. The
    requests behind a guilty one were never tried without it: they run together.
    `cheap`: a run that fails takes much less time than one that passes. `remaining`: the number of unsettled ones.
    `max_failures`: the most failures it takes to find one guilty request if failures are not cheap, including the
    first.
    """

    __slots__ = (
        "_cheap",
        "_cleared",
        "_culprits",
        "_failed_together",
        "_last_failed",
        "_max_fitting",
        "_settled",
        "_total",
        "max_failures",
        "remaining"
    )  # fmt: skip

    def __init__(self, count: int, *, cheap: bool = False) -> None:
        self.remaining = count
        self._cheap = cheap
        self.max_failures = (count - 1).bit_length() + 1
        self._failed_together = 0
        """How many of the next requests failed together, so that one of them is guilty; 0: unknown."""
        self._cleared = 0
        """How many of those are innocent, because the guilty one is known."""
        self._last_failed = count
        self._total = count
        self._max_fitting = count
        self._settled = 0
        self._culprits = 0

    def next_count(self) -> int:
        """Return how many to run now; at least one, since some are left."""
        if self._cleared:
            size = self._cleared
        elif self._failed_together:
            size = (self._failed_together * 2 if self._cheap else self._failed_together) // PARTS
        elif self._culprits > 1:
            # many are guilty: run as many as were settled per guilty one
            size = self._settled // self._culprits
        else:
            size = self.remaining
        return max(1, min(size, self._max_fitting, self.remaining))

    def record_success(self, count: int) -> None:
        """Record that the next `count` were served."""
        self._settle(count)
        if self._failed_together:
            self._failed_together -= count
            if self._failed_together <= 0:
                # every one of them passed: their number was the problem
                self._failed_together = 0
                self._max_fitting = max(1, self._last_failed // 2)

    def record_failure(self, count: int) -> None:
        """Record that the next `count` failed together."""
        self._failed_together = self._last_failed = count
        self._cleared = 0

    def record_culprit(self, position: int) -> None:
        """Record that the next ones failed together because of the one at this position among them."""
        self._failed_together = self._last_failed = position + 1
        self._cleared = position

    def record_too_many(self, count: int) -> None:
        """Record that the next `count` failed because they were too many."""
        self._failed_together = self._cleared = 0
        self._max_fitting = max(1, count // 2)

    def record_too_large(self) -> None:
        """Record that the next one does not fit alone, so nothing is known about how many others fit."""
        self._max_fitting = self._total

    def record_single_failure(self) -> None:
        """Record that the next one failed alone and was answered."""
        self._settle(1)
        self._culprits += 1
        self._failed_together = 0

    def _settle(self, count: int) -> None:
        self.remaining -= count
        self._settled += count
        self._cleared = 0


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
