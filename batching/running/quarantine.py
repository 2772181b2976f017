"""Quarantine: requests that failed alone and come again unchanged run apart from others. Used by isolation.py.

A client that gets a server error often sends the same request again: a retrying client or gateway, or a restarted job.
Each time its batch would fail first and be searched (docs/adr/0011-faults-stay-alone.md).
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

RETENTION_NS = 60_000_000_000
"""How long a request stays known after it last failed."""
MAX_FINGERPRINTS = 256
"""How many are kept, both of the known ones and of those that failed once; the latest."""
SAMPLED_VALUES = 512
"""Of an input with more than twice this many values, about this many are sampled, spread over all of it."""


class Quarantine:
    """Fingerprints of one model's requests that failed alone.

    A request that has failed once is only recorded, which costs nothing. After the second time it is `known`, and every
    request that shares a batch is fingerprinted, in 0.5 us if it is small. Different requests may have the same
    fingerprint: if one is then served, apart, it is no longer known. No request is rejected for being known.
    Threads: any.
    """

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        """The fingerprints to run apart, with when each last failed, earliest first."""
        self._failed_once: dict[int, int] = {}
        self._lock = threading.Lock()

    def record_failure(self, request: InferRequest) -> None:
        """Record that a request failed alone."""
        key, now_ns = fingerprint(request), time.monotonic_ns()
        if key is None:
            return
        with self._lock:
            previous_ns = self._failed_once.pop(key, None) or self.known.pop(key, None)
            entries = self._failed_once if previous_ns is None or previous_ns < now_ns - RETENTION_NS else self.known
            entries[key] = now_ns
            if len(entries) > MAX_FINGERPRINTS:
                del entries[next(iter(entries))]

    def find_known(self, requests: Sequence[InferRequest]) -> list[InferRequest]:
        """Return the requests that are known, if they share a batch with others."""
        known = self.known
        if not known or len(requests) < 2:
            return []
        self._expire(time.monotonic_ns() - RETENTION_NS)
        return [request for request in requests if fingerprint(request) in known]

    def discard_served(self, requests: Iterable[InferRequest]) -> None:
        """Forget those that were served after all."""
        for request in requests:
            key = fingerprint(request)
            if request.error is None and key is not None:
                with self._lock:
                    self.known.pop(key, None)

    def _expire(self, before_ns: int) -> None:
        with self._lock:
            while self.known and self.known[first := next(iter(self.known))] < before_ns:
                del self.known[first]


def fingerprint(request: InferRequest) -> int | None:
    """Return a fingerprint, equal for requests with equal inputs. None: an input is on a device."""
    parts: list[object] = [request.key]
    inputs: Sequence[Array | DeviceArray | None] = request.inputs
    for array in inputs:
        if array is not None and not isinstance(array, np.ndarray):
            return None
        parts.append(None if array is None else _array_fingerprint(array))
    return hash(tuple(parts))


def _array_fingerprint(array: Array) -> object:
    values = array if array.size <= 2 * SAMPLED_VALUES else array.flat[:: array.size // SAMPLED_VALUES]
    return tuple(values.ravel().tolist()) if array.dtype.hasobject else values.tobytes()
