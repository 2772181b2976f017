"""WorkerReplicas: a model's hooks in separate processes, and a request's use of them.

Made by `placement.py`, called on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.backends.node import Node
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec
from penstock.server.workers.backoff import Backoff
from penstock.server.workers.order import Interpreters, Order

from .call import AnswerFormat, HookCall, ReplicaGoneError, log_warning
from .generator_call import Answer, GeneratorCall
from .loading import POST
from .packing import DISCARD_PARAMETERS, pack, write_signature
from .plan import ReplicaPlan
from .replica import LOAD_LIMIT_S
from .replica_lease import ReplicaLease
from .replicas import Replicas, pending_calls_of
from .worker_generator_call import WorkerGeneratorCall
from .worker_replica import WorkerReplica

MAX_END_S = 60.0
"""More than a running hook and the end of its process may take, so that nothing waits forever."""


def order_of(model: Model, spec: HookSpec, interpreter: str) -> Order:
    """Return what each worker of a model's hooks must run."""
    worker = spec.worker
    settings = {
        "path": str(spec.path),
        "roots": [str(root) for root in spec.roots],
        "mounts": dict(spec.mounts),
        "decoupled": model.spec.decoupled,
        "model": model.name,
        "dialect": spec.dialect,
        "dialect_settings": dict(spec.dialect_settings),
        "runtime_metadata": dict(model.runtime_description),
        "signature": write_signature(model.signature),
        "inputs": [Node.from_runtime(node).to_json() for node in model.node_inputs],
        "outputs": [Node.from_runtime(node).to_json() for node in model.node_outputs],
        "metadata": pack(dict(spec.metadata)),
    }
    return Order(
        "penstock.server.hooks.worker_service", settings, f"the hooks of model '{model.name}'", {"model": model.name},
        interpreter=interpreter, path=worker.path, environment=worker.environment, memory_bytes=worker.memory_bytes,
        open_limit_s=LOAD_LIMIT_S, on_event=model.count_event, mounts=spec.mounts,
        folder=spec.roots[0] if spec.roots else None,
    )  # fmt: skip


class WorkerReplicas(Replicas):
    """The replicas of one model, each a process.

    Invariants: their number is constant; one that ends is replaced, at once or, if it keeps ending, with growing
    delays. If the plan is shared, any of them runs any call: the calls wait in one queue, for the first with room.
    """

    def __init__(self, model: Model, spec: HookSpec, plan: ReplicaPlan, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(model, spec, plan, loop)
        self._order: Order | None = None
        self._backoffs: dict[WorkerReplica, Backoff] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._queue: deque[HookCall] = deque()
        self._process_ends: set[asyncio.Future[None]] = set()
        self._load_error: InferError | None = None
        self._request_numbers = itertools.count(1)

    def prepare(self, interpreters: Interpreters) -> None:
        """Find the interpreter. Threads: a thread that may block. Raises: InferError."""
        label = f"the hooks of model '{self._model.name}'"
        self._order = order_of(self._model, self._spec, interpreters(self._spec.worker, label))

    async def start(self) -> WorkerReplica:
        """Start all at once, and wait until they have loaded the file. Raises: InferError."""
        started = [self._start_replica(Backoff()) for _ in range(self._limit)]
        opened = await asyncio.gather(*(asyncio.shield(each.ready) for each in started), return_exceptions=True)
        for error in opened:
            if error is not None:
                raise error
        for replica in started:
            self._put_in_service(replica)
        if not self.shared:
            self._free.remove(started[0])
        return started[0]

    def _start_replica(self, backoff: Backoff) -> WorkerReplica:
        if self._order is None:
            raise InferError(Code.INTERNAL, "hooks without an interpreter")
        replica = WorkerReplica(self._model, self._spec, self._order, self)
        self._backoffs[replica] = backoff
        self._process_ends.add(replica.ended)
        replica.ended.add_done_callback(self._process_ends.discard)
        return replica

    def _put_in_service(self, replica: WorkerReplica) -> None:
        if replica.is_serving:
            self._backoffs[replica].record_serving(self._loop.time())
            self._load_error = None
            self._model.set_blocked(self, blocked=False)
            self._live.append(replica)
            self.on_released(replica)
            self.dispatch_queued()
        else:
            self.on_failed(replica)

    # -- requests ----------------------------------------------------------------------------------------------

    def admit(self) -> WorkerReplicaLease:
        """Admit a request, or reject it on arrival if too many are waiting. Raises: InferError (OVERLOADED)."""
        waiting = len(self._waiters) + len(self._queue)
        if waiting:
            self._check_queue(waiting)
        return WorkerReplicaLease(self, self._model, next(self._request_numbers))

    def acquire(self) -> Any:
        """Take a replica if one is free; if they are shared, any."""
        if not self.shared:
            return super().acquire()
        for replica in self._live:
            if replica.is_serving:
                return replica
        return None

    def least_loaded(self) -> WorkerReplica | None:
        """Return the replica with the fewest waiting calls."""
        serving = [replica for replica in self._live if replica.is_serving]
        return min(serving, key=pending_calls_of, default=None)

    def request_replica(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Wait for a replica. Raises: InferError if the last attempt to load the file again has failed."""
        if self._load_error is not None and not self._live:
            raise InferError(self._load_error.code, self._load_error.message)
        return super().request_replica(deadline_ns)

    def dispatch(self, call: HookCall) -> None:
        """Run a call on the first replica with room. Raises: ReplicaGoneError if none would ever run it."""
        replica = None if self._queue else self._least_loaded_free()
        if replica is not None:
            replica.send(call)
        elif self.acquire() is not None:
            self._queue.append(call)
        else:
            raise ReplicaGoneError

    def dispatch_queued(self) -> None:
        """Distribute waiting calls, each to the replica with the fewest waiting calls."""
        while self._queue and (replica := self._least_loaded_free()) is not None:
            call = self._queue.popleft()
            if not call.future.done():
                replica.send(call)

    def _least_loaded_free(self) -> WorkerReplica | None:
        """Return the replica with room that has the fewest waiting calls."""
        found: WorkerReplica | None = None
        for replica in self._live:
            if (
                replica.free_slots > 0
                and (found is None or replica.pending_calls < found.pending_calls)
                and replica.is_serving
            ):
                found = replica
        return found

    # -- replacing replicas ------------------------------------------------------------------------------------

    def _add_replica(self) -> None:
        """Do nothing: all replicas exist, or are being started."""

    def on_failed(self, replica: WorkerReplica) -> None:
        """Replace a replica that has ended."""
        backoff = self._backoffs.pop(replica, None)
        if backoff is None:
            return
        for collection in (self._live, self._free):
            if replica in collection:
                collection.remove(replica)
        if replica.has_answered:
            backoff.reset()  # a single call has ended it, and others should not wait because of that
        if not self._closing:
            after_s = max(backoff.next_delay_s(self._loop.time()), 0.001)  # uvloop does not make a timer for 0
            self._timers.add(self._loop.call_later(after_s, self._restart, backoff))

    def _restart(self, backoff: Backoff) -> None:
        now_s = self._loop.time()
        self._timers = {timer for timer in self._timers if timer.when() > now_s and not timer.cancelled()}
        if self._closing:
            return
        try:
            replica = self._start_replica(backoff)
        except InferError as error:
            self._on_load_failed(error)
            self._timers.add(self._loop.call_later(backoff.next_delay_s(now_s), self._restart, backoff))
            return
        replica.ready.add_done_callback(lambda ready: self._on_restarted(replica, ready))

    def _on_restarted(self, replica: WorkerReplica, ready: asyncio.Future[None]) -> None:
        error = ready.exception()
        if self._closing:
            return
        if error is None:
            self._put_in_service(replica)
            return
        if isinstance(error, InferError):
            log_warning(error.message, {"model": self._model.name})
            # a file that has become invalid is not the client's mistake
            self._on_load_failed(InferError(Code.NOT_READY, error.message))
        self.on_failed(replica)

    def _on_load_failed(self, error: InferError) -> None:
        self._load_error = error = self._without_paths(error)
        if self._live:
            return
        self._model.set_blocked(self, blocked=True)
        self._reject_waiters(error)
        queue, self._queue = self._queue, deque()
        for call in queue:
            if not call.future.done():
                call.future.set_exception(InferError(error.code, error.message))

    def close(self) -> None:
        """End all replicas; waiting requests are rejected."""
        super().close()
        for timer in self._timers:
            timer.cancel()
        self._on_load_failed(InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded"))
        for replica in self._backoffs:
            replica.stop()

    def kill(self) -> None:
        """Kill the processes now; to be called after `close`."""
        for replica in self._backoffs:
            replica.kill()

    async def wait_ended(self) -> None:
        """Wait until every process is gone, at most MAX_END_S; to be called after `close`."""
        if self._process_ends:
            await asyncio.wait(set(self._process_ends), timeout=MAX_END_S)


class WorkerReplicaLease(ReplicaLease):
    """One request's use of the hooks in workers.

    If pre_inference may leave something for post_inference in the parameters, both run in one process.
    """

    __slots__ = ("_has_worker_state", "_request_number")

    def __init__(self, replicas: WorkerReplicas, model: Model, number: int) -> None:
        self._replicas = replicas
        self._model = model
        self._replica = None
        self._hook_ran = self._has_worker_state = False
        self._request_number = number
        replicas.active_requests += 1

    def dispatch(self, call: HookCall) -> bool:
        """Run one of the request's hooks: in the first worker with room, unless one holds what it needs."""
        call.request_number = self._request_number
        if call.hook == POST:
            self._has_worker_state = False
        if not self._replicas.shared or self._is_pinned():
            return self._dispatch_to_held(call)
        try:
            self._replicas.dispatch(call)
        except ReplicaGoneError:
            return False
        return True

    def on_hook_returned(self, call: HookCall) -> None:
        """Record that a hook has returned."""
        self._hook_ran = True
        if call.replica.keeps_parameters and call.hook != POST:
            self._replica, self._has_worker_state = call.replica, True

    def make_generator_call(
        self, outputs: list[Any], answer_format: AnswerFormat, request_id: str
    ) -> WorkerGeneratorCall:
        """Make the call for a hook that yields, for a model's outputs, which the worker converts."""
        generator = WorkerGeneratorCall(outputs, answer_format.conversion, request_id)
        generator.request_number = self._request_number
        self._has_worker_state = False
        return generator

    async def next_answer(self, generator: GeneratorCall) -> Answer | None:
        """Return what the request's hook yields next, None after the last. Raises: InferError."""
        if not generator.started and self._replicas.shared and not self._is_pinned():
            self._replica = self._replicas.least_loaded()
        return await super().next_answer(generator)

    def _is_pinned(self) -> bool:
        return self._hook_ran and (
            not self._replicas.shared or (self._replica is not None and self._replica.keeps_parameters)
        )

    def _replica_gone_error(self) -> InferError:
        text = f"the hooks of model '{self._model.name}' ended, and the state that this request had left there is lost"
        return InferError(Code.NOT_READY, text)

    def end(self) -> None:
        """Give back the replica."""
        if self._has_worker_state:
            self._replica.notify(DISCARD_PARAMETERS, self._request_number)
        super().end()
