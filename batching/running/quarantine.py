"""Quarantine: requests that failed alone, and come again as they were, run apart from others. Called by isolation.py.

Who is answered with a server's error often sends the same again: a client or a gateway that retries, a job that starts
over. Each time its batch would fail first, and be searched (docs/adr/0011-faults-stay-alone.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.device_array import DeviceArray
    from penstock.batching.request import InferRequest

KEPT_NS = 60_000_000_000
"""So long after it last failed, one is still known."""
MOST = 256
"""So many are known, or remembered as having failed once; the latest."""
SAMPLED = 512
"""Of an input with more than twice so many values, so many are looked at, over all of it."""


class Quarantine:
    """What one model's requests that failed alone looked like.

    Who has failed once is only remembered, which costs nobody anything; from the second time on it is `known`, and
    every request that shares a batch is looked at, in 0.5 us if it is small. Two requests may look alike and not be:
    the one that is served, apart, is not known any more. Nobody is refused for being known.
    Threads: any.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        """The looks of who is run apart, and when each failed last, from the earliest."""
        self._once: dict[int, int] = {}
        self._lock = threading.Lock()

    def note(self, request: InferRequest) -> None:
        """Note that a request has failed alone."""
        look, now_ns = look_of(request), time.monotonic_ns()
        if look is None:
            return
        with self._lock:
            again = self._once.pop(look, None) or self.known.pop(look, None)
            seen = self._once if again is None or again < now_ns - KEPT_NS else self.known
            seen[look] = now_ns
            if len(seen) > MOST:
                del seen[next(iter(seen))]

    def among(self, requests: Sequence[InferRequest]) -> list[InferRequest]:
        """Give those of some requests that are known, if they share a batch with others."""
        known = self.known
        if not known or len(requests) < 2:
            return []
        self._forget(time.monotonic_ns() - KEPT_NS)
        return [request for request in requests if look_of(request) in known]

    def acquit(self, requests: Iterable[InferRequest]) -> None:
        """Forget those that were served after all."""
        for request in requests:
            look = look_of(request)
            if request.error is None and look is not None:
                with self._lock:
                    self.known.pop(look, None)

    def _forget(self, before_ns: int) -> None:
        with self._lock:
            while self.known and self.known[first := next(iter(self.known))] < before_ns:
                del self.known[first]


def look_of(request: InferRequest) -> int | None:
    """Give a number that is the same for requests of the same inputs. None: some of them lie on a device."""
    looks: list[object] = [request.key]
    inputs: Sequence[Array | DeviceArray | None] = request.inputs
    for array in inputs:
        if array is not None and not isinstance(array, np.ndarray):
            return None
        looks.append(None if array is None else _look_at(array))
    return hash(tuple(looks))


def _look_at(array: Array) -> object:
    values = array if array.size <= 2 * SAMPLED else array.flat[:: array.size // SAMPLED]
    return tuple(values.ravel().tolist()) if array.dtype.hasobject else values.tobytes()
