"""Placement: a Model on one device: the Backend loaded there, its Share of the Device, and how it is loaded again.

Made by opening.py; its Instances bind to it, and ask it for another Binding when the device has lost the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .device import Device, Share, device_of, width_of

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.backends.signature import Signature

    from .spec import ModelSpec

Reopen = Callable[[int], "Backend"]
"""Loads the model once more for the Placement at this position. Raises: InferError."""


class Placement:
    """Where some Instances of a Model run.

    Invariant: a Backend that was replaced is closed when the last of its Bindings has been given back, since another
    Instance may still be at its last run.
    Threads: `bind` and `replace` may be called on any; `replace` blocks while the model is loaded.
    """

    def __init__(self, backend: Backend, device: Device, share: Share, reopen: Callable[[], Backend]) -> None:
        self.device = device
        self.share = share
        self.backend = backend
        self._reopen = reopen
        self._bound: list[Binding] = []
        self._replaced: list[tuple[Backend, list[Binding]]] = []
        self._lock = threading.Lock()

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding on what is loaded now."""
        with self._lock:
            return self._bind(signature, capacity_rows)

    def replace(self, lost: Binding, signature: Signature, capacity_rows: int) -> Binding:
        """Give a Binding in the place of one whose Backend is lost, which is loaded again unless it has been since.

        Raises: whatever loading and binding raise; the lost Binding can then be brought again.
        """
        with self._lock:
            if any(binding is lost for binding in self._bound):
                backend = self._reopen()
                self._replaced.append((self.backend, self._bound))
                self.backend, self._bound = backend, []
            binding = self._bind(signature, capacity_rows)
        self.give_back(lost)
        return binding

    def give_back(self, lost: Binding) -> None:
        """Note that a Binding of a lost Backend is not used any more."""
        with self._lock:
            ended = []
            for entry in self._replaced:
                entry[1][:] = [binding for binding in entry[1] if binding is not lost]
                if not entry[1]:
                    ended.append(entry)
            for entry in ended:
                self._replaced.remove(entry)
        for backend, _ in ended:
            backend.close()

    def close(self) -> None:
        """Free the model and leave the device. No Binding may be in use."""
        self.device.leave(self.share)
        for backend in (self.backend, *(backend for backend, _ in self._replaced)):
            backend.close()
        self._bound.clear()
        self._replaced.clear()

    def _bind(self, signature: Signature, capacity_rows: int) -> Binding:
        binding = self.backend.bind(signature, capacity_rows)
        self._bound.append(binding)
        return binding


def place(spec: ModelSpec, backends: Sequence[Backend], devices: dict[str, Device], reopen: Reopen) -> list[Placement]:
    """Give each Backend its Placement, and its Instances their Share of the Device, which is made if need be."""
    said = spec.options.get("intra_op_thread_count", "")
    threads = int(said) if said.isdecimal() else 0
    placements = []
    for position, (backend, group) in enumerate(zip(backends, spec.instances, strict=True)):
        (name,) = group.devices
        device = devices.setdefault(name, device_of(name))
        share = device.join(group.count, width_of(name, group.count, threads))
        placements.append(Placement(backend, device, share, partial(reopen, position)))
    return placements
