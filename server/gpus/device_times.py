"""Device times: how long models have used each device since the last reading. Read for the GPUs' lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """The part of a Model that is read here. `device_ns`: by device, only grows, and is changed under `lock`."""

    lock: threading.Lock
    device_ns: dict[str, int]


M = TypeVar("M", bound=Timed)
Used = Mapping[str, Mapping[str, int]]
"""Nanoseconds by device, then by model: its labels."""


class _VersionTimes:
    """One loaded version, and its device times at the last reading."""

    __slots__ = ("_device_ns", "_lock", "_previous_ns", "labels")

    def __init__(self, labels: str, model: Timed) -> None:
        self.labels = labels
        # not the model, which could then not be freed
        self._lock, self._device_ns = model.lock, model.device_ns
        self._previous_ns: dict[str, int] = {}

    def elapsed_ns(self) -> dict[str, int]:
        if not self._device_ns:
            return {}
        with self._lock:
            now = dict(self._device_ns)
        previous, self._previous_ns = self._previous_ns, now
        return {device: ns - previous.get(device, 0) for device, ns in now.items() if ns > previous.get(device, 0)}


class DeviceTimes(Generic[M]):
    """Computes the device time used between readings. A version unloaded since then is read one last time.

    Threads: the event loop's, which loads and unloads.
    """

    def __init__(self, models: Callable[[], Iterable[M]], labels: Callable[[M], str]) -> None:
        self._models = models
        self._labels = labels
        self._seen: dict[int, _VersionTimes] = {}

    def read(self) -> Used:
        """Return the time used since the last call."""
        previous, self._seen = self._seen, {}
        for model in self._models():
            number = id(model.device_ns)  # unique: the dict of a seen version is still referenced
            is_known = number in previous
            self._seen[number] = previous.pop(number) if is_known else _VersionTimes(self._labels(model), model)
        used: dict[str, dict[str, int]] = {}
        for seen in (*previous.values(), *self._seen.values()):
            for device, ns in seen.elapsed_ns().items():
                models = used.setdefault(device, {})
                models[seen.labels] = models.get(seen.labels, 0) + ns
        return used
