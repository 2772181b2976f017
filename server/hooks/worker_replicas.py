"""WorkerReplicas: a model's hooks in separate processes, and a request's use of them.

Made by `placement.py`, called on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.backends.node import Node
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec
from penstock.server.workers.backoff import Backoff
from penstock.server.workers.order import Order

from .call import AnswerForm, HookCall, MovedError, log
from .loading import POST
from .packing import FORGET, pack, write_signature
from .plan import ReplicaPlan
from .pull import Answer, Pull
from .replica import LOAD_LIMIT_S
from .replicas import Replicas, waiting_of
from .visit import Visit
from .worker_pull import WorkerPull
from .worker_replica import WorkerReplica

Interpreters = Callable[[Any, str], str]
"""Returns the Python for a WorkerSpec and its label. Blocks, for minutes if an environment must be made."""

ENDED_S = 60.0
"""More than a running hook and the end of its process may take, so that nothing waits forever."""


def order_of(model: Model, spec: HookSpec, interpreter: str) -> Order:
    """Return what each worker of a model's hooks must run."""
    place = spec.worker
    settings = {
        "path": str(spec.path),
        "roots": [str(root) for root in spec.roots],
        "mounts": dict(spec.mounts),
        "decoupled": model.spec.decoupled,
        "model": model.name,
        "dialect": spec.dialect,
        "dialect_settings": dict(spec.dialect_settings),
        "described": dict(model.described),
        "signature": write_signature(model.signature),
        "inputs": [Node.from_runtime(node).to_json() for node in model.node_inputs],
        "outputs": [Node.from_runtime(node).to_json() for node in model.node_outputs],
        "metadata": pack(dict(spec.metadata)),
    }
    return Order(
        "penstock.server.hooks.inside", settings, f"the hooks of model '{model.name}'", {"model": model.name},
        interpreter=interpreter, path=place.path, environment=place.environment, memory_bytes=place.memory_bytes,
        open_limit_s=LOAD_LIMIT_S, count=model.count, mounts=spec.mounts,
        folder=spec.roots[0] if spec.roots else None,
    )  # fmt: skip


class WorkerReplicas(Replicas):
    """The replicas of one model, each a process.

    Invariants: their number is constant; one that ends is replaced, at once or, if it keeps ending, with growing
    delays. If the plan is shared, any of them runs any call: the calls wait in one queue, for the first with room.
    """

    def __init__(self, model: Model, spec: HookSpec, decided: ReplicaPlan, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(model, spec, decided, loop)
        self._order: Order | None = None
        self._backoffs: dict[WorkerReplica, Backoff] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._line: deque[HookCall] = deque()
        self._ended: set[asyncio.Future[None]] = set()
        self._broken: InferError | None = None
        self._numbers = itertools.count(1)

    def prepare(self, interpreters: Interpreters) -> None:
        """Find the interpreter. Threads: a thread that may block. Raises: InferError."""
        label = f"the hooks of model '{self._model.name}'"
        self._order = order_of(self._model, self._spec, interpreters(self._spec.worker, label))

    async def start(self) -> WorkerReplica:
        """Start all at once, and wait until they have loaded the file. Raises: InferError."""
        started = [self._open(Backoff()) for _ in range(self._limit)]
        opened = await asyncio.gather(*(asyncio.shield(each.ready) for each in started), return_exceptions=True)
        for problem in opened:
            if problem is not None:
                raise problem
        for replica in started:
            self._serve(replica)
        if not self.shared:
            self._free.remove(started[0])
        return started[0]

    def _open(self, backoff: Backoff) -> WorkerReplica:
        if self._order is None:
            raise InferError(Code.INTERNAL, "hooks without an interpreter")
        replica = WorkerReplica(self._model, self._spec, self._order, self)
        self._backoffs[replica] = backoff
        self._ended.add(replica.ended)
        replica.ended.add_done_callback(self._ended.discard)
        return replica

    def _serve(self, replica: WorkerReplica) -> None:
        if replica.serves:
            self._backoffs[replica].serves(self._loop.time())
            self._broken = None
            self._model.hinder(self, hindered=False)
            self._live.append(replica)
            self.freed(replica)
            self.roomy()
        else:
            self.lost(replica)

    # -- requests ----------------------------------------------------------------------------------------------

    def admit(self) -> WorkerVisit:
        """Admit a request, or reject it on arrival if too many are waiting. Raises: InferError (OVERLOADED)."""
        waiting = len(self._waiters) + len(self._line)
        if waiting:
            self._check(waiting)
        return WorkerVisit(self, self._model, next(self._numbers))

    def take(self) -> Any:
        """Take a replica if one is free; if they are shared, any."""
        if not self.shared:
            return super().take()
        for replica in self._live:
            if replica.serves:
                return replica
        return None

    def idlest(self) -> WorkerReplica | None:
        """Return the replica with the fewest waiting calls."""
        serving = [replica for replica in self._live if replica.serves]
        return min(serving, key=waiting_of, default=None)

    def line_up(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Wait for a replica. Raises: InferError if the last attempt to load the file again has failed."""
        if self._broken is not None and not self._live:
            raise InferError(self._broken.code, self._broken.message)
        return super().line_up(deadline_ns)

    def put(self, call: HookCall) -> None:
        """Run a call on the first replica with room. Raises: MovedError if none would ever run it."""
        replica = None if self._line else self._roomiest()
        if replica is not None:
            replica.take(call)
        elif self.take() is not None:
            self._line.append(call)
        else:
            raise MovedError

    def roomy(self) -> None:
        """Distribute waiting calls, each to the replica with the fewest waiting calls."""
        while self._line and (replica := self._roomiest()) is not None:
            call = self._line.popleft()
            if not call.future.done():
                replica.take(call)

    def _roomiest(self) -> WorkerReplica | None:
        """Return the replica with room that has the fewest waiting calls."""
        found: WorkerReplica | None = None
        for replica in self._live:
            if replica.room > 0 and (found is None or replica.waiting < found.waiting) and replica.serves:
                found = replica
        return found

    # -- replacing replicas ------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Do nothing: all replicas exist, or are being started."""

    def lost(self, replica: WorkerReplica) -> None:
        """Replace a replica that has ended."""
        backoff = self._backoffs.pop(replica, None)
        if backoff is None:
            return
        for among in (self._live, self._free):
            if replica in among:
                among.remove(replica)
        if replica.proved:
            backoff.forget()  # a single call has ended it, and others should not wait because of that
        if not self._closing:
            after_s = max(backoff.ended(self._loop.time()), 0.001)  # uvloop does not make a timer for 0
            self._timers.add(self._loop.call_later(after_s, self._again, backoff))

    def _again(self, backoff: Backoff) -> None:
        now_s = self._loop.time()
        self._timers = {timer for timer in self._timers if timer.when() > now_s and not timer.cancelled()}
        if self._closing:
            return
        try:
            replica = self._open(backoff)
        except InferError as error:
            self._unmade(error)
            self._timers.add(self._loop.call_later(backoff.ended(now_s), self._again, backoff))
            return
        replica.ready.add_done_callback(lambda ready: self._reopened(replica, ready))

    def _reopened(self, replica: WorkerReplica, ready: asyncio.Future[None]) -> None:
        error = ready.exception()
        if self._closing:
            return
        if error is None:
            self._serve(replica)
            return
        if isinstance(error, InferError):
            log(error.message, {"model": self._model.name})
            # a file that has become invalid is not the client's mistake
            self._unmade(InferError(Code.NOT_READY, error.message))
        self.lost(replica)

    def _unmade(self, error: InferError) -> None:
        self._broken = error = self._told(error)
        if self._live:
            return
        self._model.hinder(self, hindered=True)
        self._refuse(error)
        line, self._line = self._line, deque()
        for call in line:
            if not call.future.done():
                call.future.set_exception(InferError(error.code, error.message))

    def close(self) -> None:
        """End all replicas; waiting requests are rejected."""
        super().close()
        for timer in self._timers:
            timer.cancel()
        self._unmade(InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded"))
        for replica in self._backoffs:
            replica.stop()

    def kill(self) -> None:
        """Kill the processes now; to be called after `close`."""
        for replica in self._backoffs:
            replica.kill()

    async def ended(self) -> None:
        """Wait until every process is gone, at most ENDED_S; to be called after `close`."""
        if self._ended:
            await asyncio.wait(set(self._ended), timeout=ENDED_S)


class WorkerVisit(Visit):
    """One request's use of the hooks in workers.

    If pre_inference may leave something for post_inference in the parameters, both run in one process.
    """

    __slots__ = ("_left", "_number")

    def __init__(self, replicas: WorkerReplicas, model: Model, number: int) -> None:
        self._replicas = replicas
        self._model = model
        self._replica = None
        self._begun = self._left = False
        self._number = number
        replicas.guests += 1

    def put(self, call: HookCall) -> bool:
        """Run one of the request's hooks: in the first worker with room, unless one holds what it needs."""
        call.number = self._number
        if call.hook == POST:
            self._left = False
        if not self._replicas.shared or self._is_bound():
            return self._put_on_one(call)
        try:
            self._replicas.put(call)
        except MovedError:
            return False
        return True

    def returned(self, call: HookCall) -> None:
        """Record that a hook has returned."""
        self._begun = True
        if call.replica.keeps and call.hook != POST:
            self._replica, self._left = call.replica, True

    def pull(self, outputs: list[Any], form: AnswerForm, request_id: str) -> WorkerPull:
        """Make the Pull for a hook that yields, for a model's outputs, which the worker converts."""
        pull = WorkerPull(outputs, form.code, request_id)
        pull.number = self._number
        self._left = False
        return pull

    async def next(self, pull: Pull) -> Answer | None:
        """Return what the request's hook yields next, None after the last. Raises: InferError."""
        if not pull.begun and self._replicas.shared and not self._is_bound():
            self._replica = self._replicas.idlest()
        return await super().next(pull)

    def _is_bound(self) -> bool:
        return self._begun and (not self._replicas.shared or (self._replica is not None and self._replica.keeps))

    def _gone(self) -> InferError:
        text = f"the hooks of model '{self._model.name}' ended, and what this request had left there with them"
        return InferError(Code.NOT_READY, text)

    def leave(self) -> None:
        """Give back the replica."""
        if self._left:
            self._replica.tell(FORGET, self._number)
        super().leave()
