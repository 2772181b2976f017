"""Model: one loaded version of one model, with its Scheduler, Instances and statistics."""

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
from .loading.closing import end_with_timeout
from .running.in_place import devices_of, unread
from .running.instance import ThreadInstance
from .running.isolation import LostBatch, execute, refuse, settled
from .running.quarantine import Quarantine
from .running.stay import LONG_NS, Stay
from .scheduling.arrivals import needs_own_checks
from .scheduling.costs import CostModel
from .scheduling.queue_limits import max_split_rows
from .scheduling.scheduler import Scheduler
from .scheduling.sizing import fast_ns
from .scheduling.timeouts import has_default_timeout
from .sequences.homes import make_sequences
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

    Threads: access `scheduler` and `costs` under `lock` only. Everything else belongs to the event loop, except where a
    method says otherwise.
    `inflight` counts requests accepted and not yet delivered. `holds` counts requests still being decoded and ensembles
    that may need the model (Engine.hold). `told_bytes` is the size of the answers waiting in `streams` (stream.py).
    `admitted`: the shapes that passed `admit`. `bound`: what its Bindings take and return. `forms`: how request tensors
    are laid out in a run, None if as plain rows. `load_s`: seconds from first reading its file until it could serve.
    `events` counts unusual events by name (metrics.md lists them). `device_ns` is the run time spent on each device
    other than a CPU, by device name. Both are under `lock` and never decrease.
    `timed`: requests that give no timeout have one anyway. `counted`: the Instance counts tried at load, with rows/s
    each.
    `detours`: requests are examined before they reach the queue (Engine.submit); those answered by `cache` never reach
    it. `choosy`: accepting a request takes more than a check for room, so requests are never queued together
    (arrivals.py). `looped`: the event loop ran its last Batch, so requests may be queued together. `gathers`: one has
    been queued in this turn as well, so those after it collect in `came` until the turn ends.
    An `ensemble` has neither Backends nor Instances, and nothing ever waits in its queue.
    `outsides` run the Batches of a model of user code. Such a model is never `open`ed, has no Bindings, and receives
    the parameters of its requests.
    `loop_binding` is None before `open`, if the event loop never runs the model, and while a device that the loop lost
    is being reloaded. `stay`: until when the loop leaves the model to threads because its runs took too long.
    `leaving`: the shutdown tasks of Instances it no longer has or will never have (resizing.py).
    """

    cache: Remembering | None = None
    ensemble: Ensemble | None = None
    outsides: Sequence[Outside] = ()
    watchdog: Watchdog | None = None
    overlaps = names_own = False
    """Whether an Instance may have two Batches on its device, and whether the model's hooks may name outputs."""
    in_place: frozenset[int] = frozenset()
    reads_late = False
    """The devices in whose memory its Bindings read and write tensors in place (in_place.py), and whether tensors in
    system shared memory are read only when the batch is gathered."""
    tell_hindered: Callable[[], None] | None = None
    """Called when `hindered` changes, if another process has to know."""

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
        self.request_rows = max(self.max_rows, max_split_rows(spec.policy, self.max_rows) if spec.policy.split else 0)
        self.allowed_rows = spec.policy.allowed_rows
        self.padding = Padding(spec, self.signature) if spec.padding else None
        self.all_outputs = tuple(i for i, output in enumerate(self.signature.outputs) if output.is_tensor)
        self.admitted: dict[tuple[tuple[int, ...] | None, ...], tuple[int, Key]] = {}
        self.lock = threading.Lock()
        shared = Devices() if devices is None else devices
        count = sum(group.count for group in spec.instances if not group.passive)
        # the loop never runs a model with a run limit: it could neither report the timeout nor serve others meanwhile
        self._on_threads = bool(spec.policy.run_limit_us) or needs_threads(spec, shared, backends)
        fast = fast_ns("thread" if self._on_threads else spec.policy.executor, count)
        self.costs = CostModel(spec.policy.allowed_rows)
        self.stay, self.quarantine = Stay(), Quarantine()
        sequences = make_sequences(spec, self.max_rows, count, backends)
        self.scheduler = Scheduler(spec.policy, self.costs, fast, count, sequences, usable_bytes())
        self.events: dict[str, int] = {}
        self.device_ns: dict[str, int] = {}
        self.hindered, self.streams = set[Any](), set[Any]()
        self.inflight = self.holds = self.told_bytes = 0
        self.load_s = 0.0
        self.leaving: set[asyncio.Task[None]] = set()
        self.closing = self.dirty = self.looped = self.gathers = False
        self.came: list[InferRequest] = []
        self.detours = self.passive or (self.forms is not None and self.forms.has_value_keys)
        self.timed = has_default_timeout(spec.policy)
        self.choosy = sequences is not None or needs_own_checks(spec.policy)
        self.instances: list[ThreadInstance | OutsideInstance] = []
        self.loop_binding: Binding | None = None
        self.loop_lost: Binding | None = None
        self.counted: tuple[tuple[int, float], ...] = ()
        self._place = partial(place, spec, backends, shared, reopen or backends.__getitem__)
        self.places: list[Placement] = []
        self._finished = finished

    @cached_property
    def passive(self) -> bool:
        """Whether the model is loaded but none of its Instances ever runs."""
        return bool(self.spec.instances) and all(group.passive for group in self.spec.instances)

    @property
    def waiting_rows(self) -> int:
        """Rows in the queue."""
        return self.scheduler.rows

    @property
    def waiting_requests(self) -> int:
        """Requests in the queue."""
        return self.scheduler.request_count

    @property
    def threads(self) -> list[ThreadInstance]:
        """The Instances that have their own thread."""
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
        """Stop the Instances and free the model. Blocks until the current runs end or their device is found to hang."""
        with self.lock:
            for instance in self.instances:
                instance.stop()
        end_with_timeout(self.name, [at.name for at in self.places], self._end)

    def _end(self) -> None:
        for instance in self.instances:
            instance.join()
        self.instances.clear()
        self.loop_binding = None
        # the runtime's descriptions hold its session, and with it the model's memory
        self.node_inputs = self.node_outputs = ()
        # sequence states must not outlive the model just because something still refers to it
        self.scheduler.sequences = None
        places, self.places = self.places, []
        for at in places:
            at.close()

    @property
    def loop_place(self) -> Placement:
        """The Placement on which the event loop runs: that of the first Instance that is not passive."""
        return next((at for at in self.places if not at.group.passive), self.places[0])

    def dispatch(self, now_ns: int) -> tuple[list[Batch], bool]:
        """Start a run: here if it is fast, otherwise on an idle Instance.

        Returns: the batches that ran here, and whether more should run here in the next loop turn. At most one batch
        runs here per turn: sockets are read in between, which makes the next batch bigger.
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
                lane = scheduler.next_lane(now_ns, fast_only=True)
                if lane is None:
                    return [], False
            batch = scheduler.take_from(lane, now_ns)
        if now_ns >= stay.look_ns:
            stay.looked(time.thread_time_ns(), now_ns)
        try:
            ran = execute(self, binding, batch)
        except LostBatch as lost:
            ran = self._loop_loses(binding, lost)
        except Exception as error:  # noqa: BLE001 - the requests have left the queue and must be answered
            ran = settled(self, batch, error)
        self.learn(batch, ran)
        held_ns = ran[-1].exec_end_ns - batch.exec_start_ns
        if held_ns > LONG_NS and self.spec.policy.executor == "auto":
            said = stay.held(held_ns, time.thread_time_ns(), ran[-1].exec_end_ns)
            if said:
                logger.warning("model %s %s", self.name, said)
        return ran, scheduler.request_count > 0

    def _loop_loses(self, binding: Binding, lost: LostBatch) -> list[Batch]:
        """Answer the requests whose device the loop lost, and have the first Instance reload the model there."""
        with self.lock:
            self.loop_binding, self.loop_lost = None, binding
            self.instances[0].mend_loop()
        return lost.ran + refuse(lost.rest, lost.error)

    @property
    def healthy(self) -> bool:
        """Whether any Instance can run: False if every Instance lost its device and failed to reload."""
        if self.ensemble is not None:
            return self.ensemble.healthy
        return not self.instances or any(instance.failure is None for instance in self.instances)

    @property
    def ready(self) -> bool:
        """Whether requests would be served: the model is healthy and nothing hinders it."""
        return self.healthy and not self.hindered

    def hinder(self, who: Any, *, hindered: bool) -> None:
        """Record that `who`, such as hooks that failed to load, lets no request through, or that it does again."""
        if hindered != (who in self.hindered):
            (self.hindered.add if hindered else self.hindered.discard)(who)
            if self.tell_hindered is not None:
                self.tell_hindered()

    def replace_backend(self, at: Placement, lost: Sequence[Binding]) -> list[Binding]:
        """Reload the model on a lost device, unless that has been done, and bind to it. Blocks.

        Threads: that of the Instance whose Bindings are `lost`. Raises: whatever loading and binding raise.
        """
        bindings = at.replace(lost, self.bound, self.max_rows)
        if at is self.loop_place:
            # the descriptions hold the session
            self.node_inputs, self.node_outputs = at.backend.node_inputs, at.backend.node_outputs
        return bindings

    def doubt(self, at: Placement, backend: Backend) -> None:
        """Have the Instances of a lost Backend reload it even though no work is due. Any thread."""
        with self.lock:
            for instance in self.threads:
                if instance.place is at:
                    instance.doubt(backend)

    def mend_loop(self) -> None:
        """Reload the loop's lost Binding; until then the loop does not run the model. Threads: the first Instance's."""
        if self.loop_lost is not None:
            (binding,) = self.replace_backend(self.loop_place, [self.loop_lost])
            with self.lock:
                self.loop_binding, self.loop_lost = binding, None

    def count(self, event: str, by: int = 1) -> None:
        """Count an unusual event for the metrics page. Any thread; call without `lock` held."""
        with self.lock:
            self.events[event] = self.events.get(event, 0) + by

    def charge(self, device: str, ns: int) -> None:
        """Record run time spent on a device. Any thread; call without `lock` held."""
        with self.lock:
            self.device_ns[device] = self.device_ns.get(device, 0) + ns

    def wake_one(self) -> None:
        """Wake an idle Instance, or one that waits until this many rows are queued. Call with `lock` held."""
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
        """Learn from a run and pass it to the event loop. Called on an Instance's thread. `followed`: as in `learn`."""
        self.learn(taken, ran, followed)
        self._finished(self, ran)

    def hand_over(self, ran: list[Batch]) -> None:
        """Pass batches that ran elsewhere to the event loop. Does not learn from them."""
        self._finished(self, ran)

    def leave_held(self) -> None:
        """Have the event loop wake an Instance when the held batch is due. Called on an Instance's thread."""
        self._finished(self, [])

    def learn(self, taken: Batch, ran: list[Batch], followed: bool = False) -> None:
        """Feed successful runs to the CostModel. `ran`: what `taken` became; `followed`: the next already runs."""
        now_ns = ran[-1].exec_end_ns
        try:
            with self.lock:
                self.scheduler.record_ended(taken, now_ns, followed)
                for batch in ran:
                    if batch.requests[0].error is None:
                        ns = batch.exec_end_ns - (batch.free_ns or batch.exec_start_ns)
                        self.scheduler.learn(batch.key, batch.rows, ns, now_ns, min(batch.handling_ns, ns))
        except Exception:  # the requests have run and must still be answered
            logger.exception("model %s: its run times could not be learned from a run", self.name)


def _said_by(backends: Sequence[Backend]) -> tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]:
    """Return what the runtime reports about the model: its input nodes, output nodes and description."""
    first = backends[0] if backends else None
    return ((), (), {}) if first is None else (first.node_inputs, first.node_outputs, first.runtime_metadata)


def _completed(spec: ModelSpec) -> Signature:
    if spec.signature is None:
        raise ValueError("the spec must be completed before it is loaded")
    return spec.signature
