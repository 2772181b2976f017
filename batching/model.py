"""Model: one loaded version of one model: its Scheduler, its Instances, and what it has counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .costs import CostModel
from .instance import ThreadInstance
from .isolation import execute
from .scheduler import Scheduler
from .statistics import ModelStatistics

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.backends.signature import Signature

    from .batch import Batch
    from .request import Key
    from .spec import ModelSpec

FAST_NS = {"auto": 100_000, "thread": 0, "loop": 1 << 62}
"""A batch that runs in less time than this is run by the event loop itself, per executor setting. A hand-over to a
thread and back costs 50 us of CPU when it carries one request (perf/micro.py)."""


class Model:
    """One loaded version.

    Threads: `scheduler` is touched under `lock` only; everything else belongs to the event loop, but for
    `finish_from_thread`. `inflight` counts requests accepted and not yet delivered, `holds` those that
    are still being decoded (see Engine.hold). `admitted` is the dialects' memory of shapes that `admit` has passed.
    `events` counts what is out of the ordinary, by name (metrics.md lists them). `load_s` is how long
    it took from the first look at its file until it could be served.
    """

    def __init__(
        self, spec: ModelSpec, backends: Sequence[Backend], finished: Callable[[Model, list[Batch]], None]
    ) -> None:
        if spec.signature is None:
            raise ValueError("the spec must be completed before it is loaded")
        self.spec = spec
        self.signature: Signature = spec.signature
        self.name = spec.name
        self.version = str(spec.version)
        self.platform = backends[0].platform
        self.node_inputs: Sequence[Any] = backends[0].node_inputs
        self.node_outputs: Sequence[Any] = backends[0].node_outputs
        self.statistics = ModelStatistics()
        self.max_rows = spec.policy.max_batch_rows or 1
        self.all_outputs = tuple(i for i, output in enumerate(self.signature.outputs) if output.is_tensor)
        self.admitted: dict[tuple[tuple[int, ...] | None, ...], tuple[int, Key]] = {}
        self.lock = threading.Lock()
        count = sum(group.count for group in spec.instances)
        self.scheduler = Scheduler(spec.policy, CostModel(), FAST_NS[spec.policy.executor], count)
        self.events: dict[str, int] = {}
        self.inflight = 0
        self.holds = 0
        self.load_s = 0.0
        self.closing = False
        self.dirty = False
        self.held = spec.policy.max_queue_delay_us > 0
        self.instances: list[ThreadInstance] = []
        self.loop_binding: Binding | None = None
        self._backends = backends
        self._finished = finished

    @property
    def waiting_rows(self) -> int:
        """Rows in the queue."""
        return self.scheduler.rows

    @property
    def waiting_requests(self) -> int:
        """Requests in the queue."""
        return self.scheduler.live

    def open(self) -> None:
        """Allocate the Bindings and start the Instances."""
        made = 0
        for backend, group in zip(self._backends, self.spec.instances, strict=True):
            for _ in range(group.count):
                binding = backend.bind(self.signature, self.max_rows)
                self.instances.append(ThreadInstance(self, binding, f"{self.name}/{self.version}#{made}"))
                made += 1
        self.loop_binding = self._backends[0].bind(self.signature, self.max_rows)
        started = 0
        try:
            for instance in self.instances:
                instance.start()
                started += 1
        except BaseException:
            del self.instances[started:]
            self.close()
            raise

    def close(self) -> None:
        """Stop the Instances and free the model. Blocks until the runs under way have ended."""
        with self.lock:
            for instance in self.instances:
                instance.stop()
        for instance in self.instances:
            instance.join()
        self.instances.clear()
        self.loop_binding = None
        # the runtime's descriptions hold its session, and with it the model's memory
        self.node_inputs = self.node_outputs = ()
        for backend in self._backends:
            backend.close()

    def dispatch(self, now_ns: int) -> tuple[list[Batch], bool]:
        """Let something run: here and now if it is fast, on an idle Instance otherwise.

        Returns: the batches that ran here, and whether more should run here in the next loop turn. One batch a turn:
        reading sockets goes between, so that the next one is bigger.
        """
        scheduler = self.scheduler
        with self.lock:
            lane = scheduler.next_lane(now_ns)
            if lane is None:
                return [], False
            if not lane.fast:
                self.wake_one()
                lane = scheduler.next_lane(now_ns, fast=True)
                if lane is None:
                    return [], False
            batch = scheduler.take_from(lane, now_ns)
        ran = execute(self, self.loop_binding, batch)  # type: ignore[arg-type]
        self.learn(batch, ran)
        return ran, scheduler.live > 0

    def count(self, event: str, by: int = 1) -> None:
        """Count something out of the ordinary, for the metrics page. Any thread; call without `lock` held."""
        with self.lock:
            self.events[event] = self.events.get(event, 0) + by

    def wake_one(self) -> None:
        """Wake an idle Instance, if there is one; it wakes the next when it leaves something. Call with `lock` held."""
        for instance in self.instances:
            if instance.idle:
                instance.wake()
                break

    def finish_from_thread(self, taken: Batch, ran: list[Batch]) -> None:
        """Learn from what ran and hand it to the event loop. Called on an Instance's thread."""
        self.learn(taken, ran)
        self._finished(self, ran)

    def learn(self, taken: Batch, ran: list[Batch]) -> None:
        """Feed the CostModel, failures left out. `ran` are the batches that `taken` has become."""
        now_ns = ran[-1].exec_end_ns
        with self.lock:
            self.scheduler.finished(taken, now_ns)
            for batch in ran:
                if batch.requests[0].error is None:
                    self.scheduler.learn(batch.key, batch.rows, batch.exec_end_ns - batch.exec_start_ns, now_ns)
