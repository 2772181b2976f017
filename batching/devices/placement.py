"""Placement: a Model on one device: its Backend, its Share of the Device, and how to reload it.

Made by opening.py. Instances bind to it, and ask it for new Bindings after a device loss.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import needs_thread, on_loss
from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.batching.spec import InstanceGroup

from .device import Device, Share, TurnArbiter, make_device, run_width
from .rate_limiter import Claim, RateLimiter

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.backends.signature import Signature
    from penstock.batching.spec import ModelSpec

logger = logging.getLogger("penstock.batching")

Reopen = Callable[[int], "Backend"]
"""Loads the model again for the Placement at this position. Raises: InferError."""


class Devices(dict[str, Device]):
    """The Devices of one Engine by name, its RateLimiter, and the CPUs of host policies.

    `lost_reason`: why nothing can run on one of them until the process restarts (`ProcessLost`), "" normally. `on_lost`
    is called when it is set, on whichever thread found out.
    """

    def __init__(
        self, limiter: RateLimiter | None = None, host_policies: Mapping[str, frozenset[int]] | None = None
    ) -> None:
        super().__init__()
        self.limiter = limiter
        self.lost_reason = ""
        self.on_lost: Callable[[], None] | None = None
        self._host_policies = dict(host_policies or {})
        self._lock = threading.Lock()

    def mark_lost(self, reason: str) -> None:
        """Record, once, that a device is lost for this process: only another process can serve there again."""
        with self._lock:
            first, self.lost_reason = not self.lost_reason, self.lost_reason or reason
        if first:
            logger.critical("%s; this process cannot use the device again and must be restarted", reason)
            if self.on_lost is not None:
                self.on_lost()

    def cpus(self, group: InstanceGroup, device: str) -> frozenset[int]:
        """Return the CPUs that the threads of a group are pinned to; empty means all."""
        return self._host_policies.get(group.host_policy or device.replace("cuda:", "gpu_"), frozenset())


class Placement:
    """The Instances of a Model that belong to one group and one device, whose `name` is "cpu", "cuda:0", ...

    `owns_share`: it is the first of its Model there, and leaves the Device for all of them. `group` is that of its
    Instances.
    Invariant: a replaced Backend is closed when the last of its Bindings has been given back, since another Instance
    may still be finishing a run. On devices other than a CPU, where each Instance has its own, it is closed before the
    next one is loaded, which may need the memory.
    Threads: `bind` and `rebind` may be called on any; `rebind` blocks while the model is loaded.
    """

    def __init__(
        self, name: str, backend: Backend, device: Device, share: Share, reopen: Callable[[], Backend]
    ) -> None:
        self.name = name
        self.device = device
        self.share = share
        self.owns_share = True
        self.backend = backend
        self.group = InstanceGroup(0, (name,))
        self.limiter: RateLimiter | None = None
        self.claims: list[Claim] = []
        self.cpus: frozenset[int] = frozenset()
        self.devices = Devices()
        self._reopen = reopen
        self.bindings: list[Binding] = []
        self._backend_closed = False
        self._replaced: list[tuple[Backend, list[Binding]]] = []
        self._lock = threading.Lock()
        self._on_lost: Callable[[Backend], None] | None = None
        self.rerun_lock = threading.Lock()
        """Held by the Instance that reruns requests after a device loss, so that only one does."""

    @property
    def single_group(self) -> InstanceGroup:
        """The group as one of a single Instance."""
        return replace(self.group, count=1)

    def set_group(self, group: InstanceGroup, devices: Devices) -> None:
        """Set the group of its Instances. Raises: InferError if the RateLimiter would never let one run."""
        self.group, self.devices = group, devices
        self.cpus = devices.cpus(group, self.name)
        self.limiter = limiter_of(group, devices)
        for _ in range(group.count):
            self.add_claim()

    def add_claim(self) -> int:
        """Register one more Instance with the RateLimiter, if there is one. Returns: the index of its claim."""
        if self.limiter is not None:
            self.claims.append(self.limiter.join(self.name, self.group.resources, self.group.rate_priority))
        return len(self.claims) - 1

    def release(self, bindings: Sequence[Binding], share: Any) -> None:
        """Release what an ended Instance had here: its Bindings, and its `share` of the giver of its turns."""
        with self._lock:
            self.bindings[:] = [each for each in self.bindings if not _contains(each, bindings)]
        for binding in bindings:
            self.release_binding(binding)
        if self.limiter is not None:
            self.claims.remove(share)
            self.limiter.leave(share)

    def turn_source(self, claim_index: int) -> tuple[TurnArbiter, Any]:
        """Return what gives this Instance its turns, and the Instance's share there."""
        return (self.device, self.share) if self.limiter is None else (self.limiter, self.claims[claim_index])

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        """Allocate a Binding on the current Backend."""
        with self._lock:
            return self._bind(signature, capacity_rows)

    def watch_loss(self, on_lost: Callable[[Backend], None]) -> None:
        """Call `on_lost` when this Backend, or a later one here, is lost while nothing runs."""
        with self._lock:
            self._on_lost = on_lost
            on_loss(self.backend, partial(on_lost, self.backend))

    def is_bound(self, backend: Backend, binding: Binding) -> bool:
        """Whether a Binding belongs to a Backend that is or was here."""
        with self._lock:
            owners = [(self.backend, self.bindings), *self._replaced]
            return any(_contains(binding, bound) for owner, bound in owners if owner is backend)

    def rebind(self, lost: Sequence[Binding], signature: Signature, capacity_rows: int) -> list[Binding]:
        """Return new Bindings for an Instance whose Backend is lost, reloading the model unless that has been done.

        Raises: whatever loading and binding raise; the lost Bindings can then be passed again.
        """
        with self._lock:
            if self._backend_closed or any(_contains(binding, self.bindings) for binding in lost):
                self._reload()
            try:
                bindings = self._bind_all(len(lost), signature, capacity_rows)
            except DeviceLost:  # lost again before all of its Instances were back
                self._reload()
                bindings = self._bind_all(len(lost), signature, capacity_rows)
        for binding in lost:
            self.release_binding(binding)
        return bindings

    def _reload(self) -> None:
        if self.name != "cpu":
            self._backend_closed, self.bindings = True, []
            self.backend.close()
        backend = self._reopen()
        if self._backend_closed:
            self._backend_closed = False
        else:
            self._replaced.append((self.backend, self.bindings))
        self.backend, self.bindings = backend, []
        if self._on_lost is not None:
            on_loss(backend, partial(self._on_lost, backend))

    def release_binding(self, lost: Binding) -> None:
        """Record that a Binding of a lost Backend is no longer used."""
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

    def leave(self) -> None:
        """Stop its Instances from taking turns."""
        if self.owns_share:
            self.device.leave(self.share)
        if self.limiter is not None:
            for claim in self.claims:
                self.limiter.leave(claim)
            self.claims.clear()

    def close(self) -> None:
        """Free the model and leave the device. No Binding may be in use."""
        self.leave()
        for backend in (self.backend, *(backend for backend, _ in self._replaced)):
            backend.close()
        self.bindings.clear()
        self._replaced.clear()

    def _bind(self, signature: Signature, capacity_rows: int) -> Binding:
        binding = self.backend.bind(signature, capacity_rows)
        self.bindings.append(binding)
        return binding

    def _bind_all(self, count: int, signature: Signature, capacity_rows: int) -> list[Binding]:
        before = len(self.bindings)
        try:
            return [self._bind(signature, capacity_rows) for _ in range(count)]
        except BaseException:
            del self.bindings[before:]
            raise


def _contains(binding: Binding, bindings: Sequence[Binding]) -> bool:
    return any(each is binding for each in bindings)


def backend_groups(groups: Sequence[InstanceGroup]) -> list[InstanceGroup]:
    """Return the group of each Backend of a Model whose groups are on one device each.

    On a CPU, all Instances of a group share a Backend. On any other device each has its own session and stream, so none
    waits for what another has queued.
    """
    shared = [group.passive or group.devices == ("cpu",) for group in groups]
    each = zip(groups, shared, strict=True)
    return [
        one for group, is_shared in each for one in ([group] if is_shared else [replace(group, count=1)] * group.count)
    ]


def make_placements(spec: ModelSpec, backends: Sequence[Backend], devices: Devices, reopen: Reopen) -> list[Placement]:
    """Make a Placement for each Backend, and the Model's Share of each Device, which is created if needed.

    Raises: InferError if the RateLimiter would never let an Instance run, leaving nothing behind.
    """
    shares: dict[str, Share] = {}
    placements: list[Placement] = []
    try:
        for position, (backend, group) in enumerate(zip(backends, backend_groups(spec.instances), strict=True)):
            (name,) = group.devices
            device = devices.setdefault(name, make_device(name))
            is_first = name not in shares
            if is_first:
                shares[name] = _join(spec, device, name, devices)
            placement = Placement(name, backend, device, shares[name], partial(reopen, position))
            placements.append(placement)
            placement.owns_share = is_first
            placement.set_group(group, devices)
    except BaseException:
        for placement in placements:
            placement.leave()
        raise
    return placements


def _join(spec: ModelSpec, device: Device, name: str, shared: Devices) -> Share:
    """Join a Device. Instances under the RateLimiter take no turns there, and passive ones never run."""
    return device.join(*_turn_demand(spec, name, shared), spec.device_priority)


def _turn_demand(spec: ModelSpec, name: str, shared: Devices) -> tuple[int, int]:
    """Return how many Instances take turns on a Device, and the width of a run there."""
    here = [group for group in spec.instances if group.devices == (name,)]
    in_turn = sum(group.count for group in here if not group.passive and limiter_of(group, shared) is None)
    return in_turn, max(run_width(name, group.count, spec.threads) for group in here)


def resize_shares(spec: ModelSpec, placements: Sequence[Placement]) -> None:
    """Update a Model's Shares to its number of Instances. Devices that it no longer uses are left elsewhere."""
    for name in {device for group in spec.instances for device in group.devices}:
        placement = next(each for each in placements if each.name == name)
        placement.device.resize(placement.share, *_turn_demand(spec, name, placement.devices))


def limiter_of(group: InstanceGroup, shared: Devices) -> RateLimiter | None:
    """Return the RateLimiter of a group; None if it has none."""
    return shared.limiter if group.resources and not group.passive else None


def needs_threads(spec: ModelSpec, devices: Devices, backends: Sequence[Backend] = ()) -> bool:
    """Whether a Model must not run on the event loop: it might block there, or is pinned to other CPUs."""
    if any(map(needs_thread, backends)):
        return True
    for group in spec.instances:
        pinned = any(devices.cpus(group, device) for device in group.devices)
        if limiter_of(group, devices) is not None or (pinned and not group.passive):
            return True
    return False


@contextmanager
def pinned_to_cpus(devices: Devices, group: InstanceGroup, device: str) -> Iterator[None]:
    """Pin this thread, and any threads started meanwhile, to the CPUs of a group for the duration.

    Raises: InferError (INVALID: none of them is there).
    """
    cpus = devices.cpus(group, device)
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    pin_thread(cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin_thread(cpus: frozenset[int]) -> None:
    """Pin this thread to some CPUs; if empty, do nothing. Raises: InferError (INVALID: none of them is there)."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        text = f"host policy: this process cannot run on any of its CPUs, {sorted(cpus)}"
        raise InferError(Code.INVALID, text) from error


def try_pin_thread(cpus: frozenset[int]) -> None:
    """Pin this thread to some CPUs; if none of them is there any more, log that and do nothing."""
    try:
        pin_thread(cpus)
    except InferError as error:
        logger.warning("%s", error.message)
