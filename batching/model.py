"""Model: one loaded version of one model: its Scheduler, its Instances, and what it has counted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from .devices.memory import usable_bytes
from .devices.placement import Devices, Placement, Reopen, needs_threads, place
from .loading.closing import patiently
from .running.in_place import devices_of, unread
from .running.instance import ThreadInstance
from .running.isolation import LostBatch, execute, refuse, settled
from .running.quarantine import Quarantine
from .running.stay import LONG_NS, Stay
from .scheduling.arrivals import is_choosy
from .scheduling.costs import CostModel
from .scheduling.room import whole_rows
from .scheduling.scheduler import Scheduler
from .scheduling.sizing import fast_ns
from .scheduling.timeouts import is_timed
from .sequences.homes import sequences_of
from .shapes.forms import forms_of
from .shapes.padding import Padding
from .statistics import ModelStatistics

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.backends.signature import Signature

    from .caching.remembering import Remembering
    from .ensembles.ensemble import Ensemble
    from .request import InferRequest, Key
    from .running.batch import Batch
    from .running.outside import Outside, OutsideInstance
    from .running.watchdog import Watchdog
    from .spec import ModelSpec

logger = logging.getLogger("penstock.batching")


class Model:
    """One loaded version.

    Threads: `scheduler` and `costs` are touched under `lock` only; everything else belongs to the event loop, but for
    `finish_from_thread`. `inflight` counts requests accepted and not yet delivered, `holds` those that are still being
    decoded, and ensembles that may need it (see Engine.hold), `told_bytes` answers that wait in `streams` (stream.py).
    `admitted`: the shapes that `admit` has passed.
    `events` counts what is out of the ordinary, by name (metrics.md lists them). `device_ns` is what its runs have
    taken of each device other than a CPU, by the device's name; both under `lock`, and never less. `load_s` is how long
    it took from the first look at its file until it could be served. `timed`: requests that do not say how long they
    may wait have a timeout all the same. `counted`: the numbers of Instances that were tried, each with its rows/s.
    `bound` is what its Bindings take and give; `forms` is how requests' tensors stand in a run, None for rows only.
    `detours`: its requests are looked at before they come to its queue (Engine.submit), and those that `cache` answers
    never do. `choosy`: more is decided about each of them than whether there is room, so that none comes to the queue
    together with others (arrivals.py). `looped`: the event loop ran its last Batch, and they may; `gathers`: and
    somebody has come in this turn, so that those after him come together, who are in `came` until then.
    An `ensemble` has neither Backends nor Instances, and nothing ever waits in its queue.
    `outsides` run the Batches of a model of user code, which is never `open`ed: it has no Bindings. Such a model is
    told the parameters of its requests.
    `loop_binding` is None when it is not open, when the loop never runs it, and from when the loop has lost its device
    until it is loaded again. `stay`: until when it is not run there, since it took too long. `leaving`: the ends of
    Instances that it has no more, or is never to have (resizing.py).
    """

    cache: Remembering | None = None
    ensemble: Ensemble | None = None
    outsides: Sequence[Outside] = ()
    watchdog: Watchdog | None = None
    overlaps = names_own = False
    """Whether an Instance of it may have two Batches on its device, and whether its hooks may name outputs."""
    in_place: frozenset[int] = frozenset()
    reads_late = False
    """The devices in whose memory its Bindings read and write tensors that lie there (in_place.py), and whether what
    clients share of the host's is read when it is gathered, and by nobody before."""
    tell_hindered: Callable[[], None] | None = None
    """Called when `hindered` has changed, where the truth is in another process."""

    def __init__(
        self, spec: ModelSpec, backends: Sequence[Backend], finished: Callable[[Model, list[Batch]], None],
        devices: Devices | None = None, reopen: Reopen | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.signature = _completed(spec)
        self.bound = spec.bound or self.signature
        self.forms = forms_of(spec)
        self.name = spec.name
        self.version = str(spec.version)
        self.platform = backends[0].platform if backends else "ensemble"
        self.node_inputs, self.node_outputs, self.described = _said_by(backends)
        self.statistics = ModelStatistics(spec.first_response_ms)
        self.max_rows = spec.policy.max_batch_rows or 1
        self.request_rows = max(self.max_rows, whole_rows(spec.policy, self.max_rows) if spec.policy.split else 0)
        self.allowed_rows = spec.policy.allowed_rows
        self.padding = Padding(spec, self.signature) if spec.padding else None
        self.all_outputs = tuple(i for i, output in enumerate(self.signature.outputs) if output.is_tensor)
        self.admitted: dict[tuple[tuple[int, ...] | None, ...], tuple[int, Key]] = {}
        self.lock = threading.Lock()
        shared = Devices() if devices is None else devices
        count = sum(group.count for group in spec.instances if not group.passive)
        # what has a limit is not run by the loop: nobody could be told, and nobody else served, until it is over
        self._on_threads = bool(spec.policy.run_limit_us) or needs_threads(spec, shared, backends)
        fast = fast_ns("thread" if self._on_threads else spec.policy.executor, count)
        self.costs = CostModel(spec.policy.allowed_rows)
        self.stay, self.quarantine = Stay(), Quarantine()
        sequences = sequences_of(spec, self.max_rows, count, backends)
        self.scheduler = Scheduler(spec.policy, self.costs, fast, count, sequences, usable_bytes())
        self.events: dict[str, int] = {}
        self.device_ns: dict[str, int] = {}
        self.hindered, self.streams = set[Any](), set[Any]()
        self.inflight = self.holds = self.told_bytes = 0
        self.load_s = 0.0
        self.leaving: set[asyncio.Task[None]] = set()
        self.closing = self.dirty = self.looped = self.gathers = False
        self.came: list[InferRequest] = []
        self.detours = self.passive or (self.forms is not None and self.forms.valued)
        self.timed = is_timed(spec.policy)
        self.choosy = sequences is not None or is_choosy(spec.policy)
        self.instances: list[ThreadInstance | OutsideInstance] = []
        self.loop_binding: Binding | None = None
        self.loop_lost: Binding | None = None
        self.counted: tuple[tuple[int, float], ...] = ()
        self._place = partial(place, spec, backends, shared, reopen or backends.__getitem__)
        self.places: list[Placement] = []
        self._finished = finished

    @cached_property
    def passive(self) -> bool:
        """Whether it is loaded, and none of its Instances ever runs."""
        return bool(self.spec.instances) and all(group.passive for group in self.spec.instances)

    @property
    def waiting_rows(self) -> int:
        """Rows in the queue."""
        return self.scheduler.rows

    @property
    def waiting_requests(self) -> int:
        """Requests in the queue."""
        return self.scheduler.live

    @property
    def threads(self) -> list[ThreadInstance]:
        """Its Instances that have a thread of their own."""
        return [instance for instance in self.instances if isinstance(instance, ThreadInstance)]

    def open(self) -> None:
        """Allocate the Bindings and start the Instances."""
        self.places = self._place()
        started = 0
        try:
            for at in self.places:
                for number in range(at.group.count):
                    if at.group.passive:
                        at.bind(self.bound, self.max_rows)
                        continue
                    name = f"{self.name}/{self.version}#{len(self.instances)}"
                    self.instances.append(ThreadInstance(self, at, name, number))
            if not self.passive and not self._on_threads:
                self.loop_binding = self.loop_place.bind(self.bound, self.max_rows)
            self.overlaps = any(instance.overlaps for instance in self.instances)
            self.in_place = devices_of(self, [each for at in self.places for each in at.bound])
            self.reads_late = unread(self)
            for instance in self.instances:
                instance.start()
                started += 1
            for at in self.places:
                at.watch(partial(self.doubt, at))
        except BaseException:
            del self.instances[started:]
            self.close()
            raise

    def close(self) -> None:
        """Stop the Instances and free the model. Blocks until the runs under way have ended, or their device hangs."""
        with self.lock:
            for instance in self.instances:
                instance.stop()
        patiently(self.name, [at.name for at in self.places], self._end)

    def _end(self) -> None:
        for instance in self.instances:
            instance.join()
        self.instances.clear()
        self.loop_binding = None
        # the runtime's descriptions hold its session, and with it the model's memory
        self.node_inputs = self.node_outputs = ()
        # nor are its sequences' states to stay for as long as somebody knows it
        self.scheduler.sequences = None
        places, self.places = self.places, []
        for at in places:
            at.close()

    @property
    def loop_place(self) -> Placement:
        """Where the event loop runs: with the first Instance that runs at all."""
        return next((at for at in self.places if not at.group.passive), self.places[0])

    def dispatch(self, now_ns: int) -> tuple[list[Batch], bool]:
        """Let something run: here and now if it is fast, on an idle Instance otherwise.

        Returns: the batches that ran here, and whether more should run here in the next loop turn. One batch a turn:
        reading sockets goes between, so that the next one is bigger.
        """
        scheduler, stay = self.scheduler, self.stay
        with self.lock:
            lane = scheduler.next_lane(now_ns)
            if lane is None:
                return [], False
            binding = self.loop_binding
            if not lane.fast or binding is None or now_ns < stay.away_until_ns:
                self.wake_one()
                if binding is None or now_ns < stay.away_until_ns:
                    return [], False
                lane = scheduler.next_lane(now_ns, fast=True)
                if lane is None:
                    return [], False
            batch = scheduler.take_from(lane, now_ns)
        if now_ns >= stay.look_ns:
            stay.looked(time.thread_time_ns(), now_ns)
        try:
            ran = execute(self, binding, batch)
        except LostBatch as lost:
            ran = self._loop_loses(binding, lost)
        except Exception as error:  # noqa: BLE001 - whatever it is, they have been taken, and wait
            ran = settled(self, batch, error)
        self.learn(batch, ran)
        held_ns = ran[-1].exec_end_ns - batch.exec_start_ns
        if held_ns > LONG_NS and self.spec.policy.executor == "auto":
            said = stay.held(held_ns, time.thread_time_ns(), ran[-1].exec_end_ns)
            if said:
                logger.warning("model %s %s", self.name, said)
        return ran, scheduler.live > 0

    def _loop_loses(self, binding: Binding, lost: LostBatch) -> list[Batch]:
        """Answer what the loop's device was lost under, and let the first Instance load the model there again."""
        with self.lock:
            self.loop_binding, self.loop_lost = None, binding
            self.instances[0].mend_loop()
        return lost.ran + refuse(lost.rest, lost.error)

    @property
    def healthy(self) -> bool:
        """Whether any Instance can run: not if the device of each was lost, and loading again has failed."""
        if self.ensemble is not None:
            return self.ensemble.healthy
        return not self.instances or any(instance.failure is None for instance in self.instances)

    @property
    def ready(self) -> bool:
        """Whether a request for it would be served: it is healthy, and nobody hinders it."""
        return self.healthy and not self.hindered

    def hinder(self, who: Any, *, hindered: bool) -> None:
        """Take that no request comes through `who`, hooks that cannot be loaded, or that they do again."""
        if hindered != (who in self.hindered):
            (self.hindered.add if hindered else self.hindered.discard)(who)
            if self.tell_hindered is not None:
                self.tell_hindered()

    def replace_backend(self, at: Placement, lost: Sequence[Binding]) -> list[Binding]:
        """Load the model again where the device was lost, unless that has been done, and bind to it; it blocks.

        Threads: that of the Instance whose Bindings are `lost`. Raises: whatever loading and binding raise.
        """
        bindings = at.replace(lost, self.bound, self.max_rows)
        if at is self.loop_place:
            # the descriptions hold the session
            self.node_inputs, self.node_outputs = at.backend.node_inputs, at.backend.node_outputs
        return bindings

    def doubt(self, at: Placement, backend: Backend) -> None:
        """Have the Instances of a Backend that is lost load it again, though nothing is due. Any thread."""
        with self.lock:
            for instance in self.threads:
                if instance.place is at:
                    instance.doubt(backend)

    def mend_loop(self) -> None:
        """Do the same for the event loop, which goes without until then. Threads: that of the first Instance."""
        if self.loop_lost is not None:
            (binding,) = self.replace_backend(self.loop_place, [self.loop_lost])
            with self.lock:
                self.loop_binding, self.loop_lost = binding, None

    def count(self, event: str, by: int = 1) -> None:
        """Count something out of the ordinary, for the metrics page. Any thread; call without `lock` held."""
        with self.lock:
            self.events[event] = self.events.get(event, 0) + by

    def charge(self, device: str, ns: int) -> None:
        """Note what a run has taken of a device. Any thread; call without `lock` held."""
        with self.lock:
            self.device_ns[device] = self.device_ns.get(device, 0) + ns

    def wake_one(self) -> None:
        """Wake an idle Instance, which wakes the next, or one that waits for so many rows. Call with `lock` held."""
        for instance in self.instances:
            if instance.idle:
                instance.wake()
                return
        if self.overlaps:
            for instance in self.instances:
                if 0 < instance.wakes_at_rows <= self.scheduler.rows:
                    instance.wake()
                    return

    def finish_from_thread(self, taken: Batch, ran: list[Batch], followed: bool = False) -> None:
        """Learn from what ran and hand it to the event loop. Called on an Instance's thread. `followed`: see learn."""
        self.learn(taken, ran, followed)
        self._finished(self, ran)

    def hand_over(self, ran: list[Batch]) -> None:
        """Hand what ran elsewhere to the event loop, learned from or not."""
        self._finished(self, ran)

    def leave_held(self) -> None:
        """Have the event loop wake an Instance when what is held open is due. Called on an Instance's thread."""
        self._finished(self, [])

    def learn(self, taken: Batch, ran: list[Batch], followed: bool = False) -> None:
        """Feed the CostModel, failures left out. `ran`: what `taken` has become; `followed`: the next runs already."""
        now_ns = ran[-1].exec_end_ns
        try:
            with self.lock:
                self.scheduler.finished(taken, now_ns, followed)
                for batch in ran:
                    if batch.requests[0].error is None:
                        ns = batch.exec_end_ns - (batch.free_ns or batch.exec_start_ns)
                        self.scheduler.learn(batch.key, batch.rows, ns, now_ns, min(batch.handling_ns, ns))
        except Exception:  # they have run, and are answered
            logger.exception("model %s: nothing was learned from a run", self.name)


def _said_by(backends: Sequence[Backend]) -> tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]:
    """Give what the runtime says of a model."""
    return (backends[0].node_inputs, backends[0].node_outputs, backends[0].described) if backends else ((), (), {})


def _completed(spec: ModelSpec) -> Signature:
    if spec.signature is None:
        raise ValueError("the spec must be completed before it is loaded")
    return spec.signature
