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
from .devices.placement import Devices, Placement, Reopen, make_placements, needs_threads
from .loading.closing import end_with_timeout
from .running.in_place import devices_of, has_unread_values
from .running.instance import ThreadInstance
from .running.isolation import LostBatch, execute, fail_requests, fail_unanswered
from .running.loop_guard import LONG_BATCH_NS, LoopGuard
from .running.quarantine import Quarantine
from .scheduling.arrivals import needs_own_checks
from .scheduling.costs import CostModel
from .scheduling.queue_limits import max_split_rows
from .scheduling.scheduler import Scheduler
from .scheduling.sizing import fast_ns
from .scheduling.timeouts import has_default_timeout
from .sequences.affinity import make_sequences
from .shapes.forms import forms_of
from .shapes.padding import Padding
from .statistics import ModelStatistics

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.backends.signature import Signature

    from .caching.model_cache import ModelCache
    from .ensembles.ensemble import Ensemble
    from .request import InferRequest, Key
    from .running.batch import Batch
    from .running.external import ExternalExecutor, ExternalInstance
    from .running.watchdog import Watchdog
    from .spec import ModelSpec

logger = logging.getLogger("penstock.batching")


class Model:
    """One loaded version.

    Threads: `scheduler` and `costs` are used under `lock`; the rest on the event loop, unless a method says otherwise.
    `inflight` counts requests accepted and not yet delivered. `hold_count` counts requests still being decoded and
    ensembles that may need the model (Engine.hold). `unread_bytes` is the size of the answers waiting in `streams`
    (stream.py). `admitted_shapes`: the shapes that passed `admit`. `binding_signature`: what its Bindings take and
    return. `forms`: how request tensors are laid out in a run, None if as plain rows. `load_s`: seconds from first
    reading its file until it could serve. `event_counts` counts unusual events by name (metrics.md lists them).
    `device_ns` is the run time spent on each device other than a CPU, by device name. Both are under `lock` and never
    decrease. `has_default_timeout`: applied to requests without one. `instance_trials`: Instance counts tried at load,
    with rows/s each. `intercepts`: requests are examined before they reach the queue (Engine.submit); those answered by
    `cache` never reach it. `admits_singly`: accepting a request takes more than a check for room, so requests are never
    queued together (arrivals.py). `ran_on_loop`: the event loop ran its last Batch, so requests may be queued together.
    `collects_arrivals`: one has been queued in this turn as well, so those after it collect in `arrivals` until the
    turn ends.
    An `ensemble` has neither Backends nor Instances, and nothing ever waits in its queue.
    `executors` run the Batches of a model of user code. Such a model is never `open`ed, has no Bindings, and receives
    the parameters of its requests.
    `loop_binding` is None before `open`, if the event loop never runs the model, and while a device that the loop lost
    is being reloaded. `loop_guard`: until when the loop leaves the model to threads because its runs took too long.
    `shutdown_tasks`: the shutdown tasks of Instances it no longer has or will never have (resizing.py).
    """

    cache: ModelCache | None = None
    ensemble: Ensemble | None = None
    executors: Sequence[ExternalExecutor] = ()
    watchdog: Watchdog | None = None
    overlaps = hooks_name_outputs = False
    """Whether an Instance may have two Batches on its device, and whether the model's hooks may name outputs."""
    in_place_devices: frozenset[int] = frozenset()
    reads_at_gather = False
    """The devices in whose memory its Bindings read and write tensors in place (in_place.py), and whether tensors in
    system shared memory are read only when the batch is gathered."""
    on_blockers_changed: Callable[[], None] | None = None
    """Called when `blockers` changes, if another process has to know."""

    def __init__(
        self, spec: ModelSpec, backends: Sequence[Backend], on_finished: Callable[[Model, list[Batch]], None],
        devices: Devices | None = None, reopen: Reopen | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.signature = _completed_signature(spec)
        self.binding_signature = spec.binding_signature or self.signature
        self.forms = forms_of(spec)
        self.name = spec.name
        self.version = str(spec.version)
        self.platform = backends[0].platform if backends else "ensemble"
        self.node_inputs, self.node_outputs, self.runtime_description = _runtime_description(backends)
        self.statistics = ModelStatistics(spec.first_response_ms)
        self.max_rows = spec.policy.max_batch_rows or 1
        split_rows = max_split_rows(spec.policy, self.max_rows) if spec.policy.split else 0
        self.max_request_rows = max(self.max_rows, split_rows)
        self.allowed_rows = spec.policy.allowed_rows
        self.padding = Padding(spec, self.signature) if spec.padding else None
        self.all_outputs = tuple(i for i, output in enumerate(self.signature.outputs) if output.is_tensor)
        self.admitted_shapes: dict[tuple[tuple[int, ...] | None, ...], tuple[int, Key]] = {}
        self.lock = threading.Lock()
        devices = Devices() if devices is None else devices
        count = sum(group.count for group in spec.instances if not group.passive)
        # the loop never runs a model with a run limit: it could neither report the timeout nor serve others meanwhile
        self._threads_only = bool(spec.policy.run_limit_us) or needs_threads(spec, devices, backends)
        fast_run_ns = fast_ns("thread" if self._threads_only else spec.policy.executor, count)
        self.costs = CostModel(spec.policy.allowed_rows)
        self.loop_guard, self.quarantine = LoopGuard(), Quarantine()
        sequences = make_sequences(spec, self.max_rows, count, backends)
        self.scheduler = Scheduler(spec.policy, self.costs, fast_run_ns, count, sequences, usable_bytes())
        self.event_counts, self.device_ns = dict[str, int](), dict[str, int]()
        self.blockers, self.streams = set[object](), set[Any]()
        self.inflight = self.hold_count = self.unread_bytes = 0
        self.load_s = 0.0
        self.shutdown_tasks: set[asyncio.Task[None]] = set()
        self.closing = self.scheduled = self.ran_on_loop = self.collects_arrivals = False
        self.arrivals: list[InferRequest] = []
        self.intercepts = self.passive or (self.forms is not None and self.forms.has_value_keys)
        self.has_default_timeout = has_default_timeout(spec.policy)
        self.admits_singly = sequences is not None or needs_own_checks(spec.policy)
        self.instances: list[ThreadInstance | ExternalInstance] = []
        self.loop_binding: Binding | None = None
        self.lost_loop_binding: Binding | None = None
        self.instance_trials: tuple[tuple[int, float], ...] = ()
        self._make_placements = partial(make_placements, spec, backends, devices, reopen or backends.__getitem__)
        self.placements: list[Placement] = []
        self._on_finished = on_finished

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
    def thread_instances(self) -> list[ThreadInstance]:
        """The Instances that have their own thread."""
        return [instance for instance in self.instances if isinstance(instance, ThreadInstance)]

    def open(self) -> None:
        """Allocate the Bindings and start the Instances."""
        self.placements = self._make_placements()
        started = 0
        try:
            for placement in self.placements:
                for number in range(placement.group.count):
                    if placement.group.passive:
                        placement.bind(self.binding_signature, self.max_rows)
                        continue
                    name = f"{self.name}/{self.version}#{len(self.instances)}"
                    self.instances.append(ThreadInstance(self, placement, name, number))
            if not self.passive and not self._threads_only:
                self.loop_binding = self.loop_placement.bind(self.binding_signature, self.max_rows)
            self.overlaps = any(instance.overlaps for instance in self.instances)
            bindings = [each for placement in self.placements for each in placement.bindings]
            self.in_place_devices = devices_of(self, bindings)
            self.reads_at_gather = has_unread_values(self)
            for instance in self.instances:
                instance.start()
                started += 1
            for placement in self.placements:
                placement.watch_loss(partial(self.on_backend_lost, placement))
        except BaseException:
            del self.instances[started:]
            self.close()
            raise

    def close(self) -> None:
        """Stop the Instances and free the model. Blocks until the current runs end or their device is found to hang."""
        with self.lock:
            for instance in self.instances:
                instance.stop()
        end_with_timeout(self.name, [placement.name for placement in self.placements], self._shut_down)

    def _shut_down(self) -> None:
        for instance in self.instances:
            instance.join()
        self.instances.clear()
        self.loop_binding = None
        # the runtime's descriptions hold its session, and with it the model's memory
        self.node_inputs = self.node_outputs = ()
        # sequence states must not outlive the model just because something still refers to it
        self.scheduler.sequences = None
        placements, self.placements = self.placements, []
        for placement in placements:
            placement.close()

    @property
    def loop_placement(self) -> Placement:
        """The Placement on which the event loop runs: that of the first Instance that is not passive."""
        return next((placement for placement in self.placements if not placement.group.passive), self.placements[0])

    def dispatch(self, now_ns: int) -> tuple[list[Batch], bool]:
        """Start a run: here if it is fast, otherwise on an idle Instance.

        Returns: the batches that ran here, and whether more should run here in the next loop turn. At most one batch
        runs here per turn: sockets are read in between, which makes the next batch bigger.
        """
        scheduler, guard = self.scheduler, self.loop_guard
        with self.lock:
            lane = scheduler.next_lane(now_ns)
            if lane is None:
                return [], False
            binding = self.loop_binding
            if not lane.fast or binding is None or now_ns < guard.off_loop_until_ns:
                self.wake_one()
                if binding is None or now_ns < guard.off_loop_until_ns:
                    return [], False
                lane = scheduler.next_lane(now_ns, fast_only=True)
                if lane is None:
                    return [], False
            batch = scheduler.take_from(lane, now_ns)
        if now_ns >= guard.next_sample_ns:
            guard.sample_cpu(time.thread_time_ns(), now_ns)
        try:
            batches = execute(self, binding, batch)
        except LostBatch as lost:
            batches = self._on_loop_device_lost(binding, lost)
        except Exception as error:  # noqa: BLE001 - the requests have left the queue and must be answered
            batches = fail_unanswered(self, batch, error)
        self.learn(batch, batches)
        held_ns = batches[-1].exec_end_ns - batch.exec_start_ns
        if held_ns > LONG_BATCH_NS and self.spec.policy.executor == "auto":
            message = guard.record_long_batch(held_ns, time.thread_time_ns(), batches[-1].exec_end_ns)
            if message:
                logger.warning("model %s %s", self.name, message)
        return batches, scheduler.request_count > 0

    def _on_loop_device_lost(self, binding: Binding, lost: LostBatch) -> list[Batch]:
        """Answer the requests whose device the loop lost, and have the first Instance reload the model there."""
        with self.lock:
            self.loop_binding, self.lost_loop_binding = None, binding
            self.instances[0].request_loop_restore()
        return lost.finished + fail_requests(lost.remaining, lost.error)

    @property
    def healthy(self) -> bool:
        """Whether any Instance can run: False if every Instance lost its device and failed to reload."""
        if self.ensemble is not None:
            return self.ensemble.healthy
        return not self.instances or any(instance.failure is None for instance in self.instances)

    @property
    def ready(self) -> bool:
        """Whether requests would be served: the model is healthy and nothing hinders it."""
        return self.healthy and not self.blockers

    def set_blocked(self, blocker: object, *, blocked: bool) -> None:
        """Record that `blocker`, such as hooks that failed to load, lets no request through, or that it does again."""
        if blocked != (blocker in self.blockers):
            (self.blockers.add if blocked else self.blockers.discard)(blocker)
            if self.on_blockers_changed is not None:
                self.on_blockers_changed()

    def replace_backend(self, placement: Placement, lost: Sequence[Binding]) -> list[Binding]:
        """Reload the model on a lost device, unless that has been done, and bind to it. Blocks.

        Threads: that of the Instance whose Bindings are `lost`. Raises: whatever loading and binding raise.
        """
        bindings = placement.rebind(lost, self.binding_signature, self.max_rows)
        if placement is self.loop_placement:
            # the descriptions hold the session
            self.node_inputs, self.node_outputs = placement.backend.node_inputs, placement.backend.node_outputs
        return bindings

    def on_backend_lost(self, placement: Placement, backend: Backend) -> None:
        """Have the Instances of a lost Backend reload it even though no work is due. Any thread."""
        with self.lock:
            for instance in self.thread_instances:
                if instance.placement is placement:
                    instance.report_backend_lost(backend)

    def restore_loop_binding(self) -> None:
        """Reload the loop's lost Binding; until then the loop does not run the model. Threads: the first Instance's."""
        if self.lost_loop_binding is not None:
            (binding,) = self.replace_backend(self.loop_placement, [self.lost_loop_binding])
            with self.lock:
                self.loop_binding, self.lost_loop_binding = binding, None

    def count_event(self, event: str, increment: int = 1) -> None:
        """Count an unusual event for the metrics page. Any thread; call without `lock` held."""
        with self.lock:
            self.event_counts[event] = self.event_counts.get(event, 0) + increment

    def add_device_time(self, device: str, ns: int) -> None:
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
                if 0 < instance.wake_at_rows <= self.scheduler.rows:
                    instance.wake()
                    return

    def finish_from_thread(self, taken: Batch, batches: list[Batch], followed: bool = False) -> None:
        """Learn from a run and pass it to the event loop. Called on an Instance's thread. `followed`: as in `learn`."""
        self.learn(taken, batches, followed)
        self._on_finished(self, batches)

    def pass_to_loop(self, batches: list[Batch]) -> None:
        """Pass batches that ran elsewhere to the event loop. Does not learn from them."""
        self._on_finished(self, batches)

    def notify_loop(self) -> None:
        """Have the event loop wake an Instance when the held batch is due. Called on an Instance's thread."""
        self._on_finished(self, [])

    def learn(self, taken: Batch, batches: list[Batch], followed: bool = False) -> None:
        """Feed successful runs to the CostModel. `batches`: what `taken` became; `followed`: the next already runs."""
        now_ns = batches[-1].exec_end_ns
        try:
            with self.lock:
                self.scheduler.record_ended(taken, now_ns, followed)
                for batch in batches:
                    if batch.requests[0].error is None:
                        ns = batch.exec_end_ns - (batch.device_free_ns or batch.exec_start_ns)
                        self.scheduler.learn(batch.key, batch.rows, ns, now_ns, min(batch.handling_ns, ns))
        except Exception:  # the requests have run and must still be answered
            logger.exception("model %s: its run times could not be learned from a run", self.name)


def _runtime_description(backends: Sequence[Backend]) -> tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]:
    """Return what the runtime reports about the model: its input nodes, output nodes and description."""
    first = backends[0] if backends else None
    return ((), (), {}) if first is None else (first.node_inputs, first.node_outputs, first.runtime_metadata)


def _completed_signature(spec: ModelSpec) -> Signature:
    if spec.signature is None:
        raise ValueError("the spec must be completed before it is loaded")
    return spec.signature
