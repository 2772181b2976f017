"""ReplicaLease: one request's use of a model's replicas. Made by `replicas.py`, called on the event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.statistics import OTHER

from .call import AnswerFormat, HookCall, ReplicaGoneError
from .generator_call import Answer, GeneratorCall

if TYPE_CHECKING:
    import asyncio


class ReplicaLease:
    """One request's use of the replicas: the one it holds, from its first hook until `end`."""

    __slots__ = ("_hook_ran", "_model", "_replica", "_replicas")

    def __init__(self, replicas: Any, model: Model) -> None:
        self._replicas = replicas
        self._model = model
        self._replica: Any = None
        self._hook_ran = False
        replicas.active_requests += 1

    def dispatch(self, call: HookCall) -> bool:
        """Run one of the request's hooks, if a replica is available now; its future gets the result.

        Raises: InferError.
        """
        if self._replicas.shared:
            self._replica = self._replicas.acquire()
        return self._dispatch_to_held(call)

    def _dispatch_to_held(self, call: HookCall) -> bool:
        while True:
            if self._replica is None:
                self._replica = self._replicas.acquire()
            if self._replica is None:
                return False
            try:
                self._replica.dispatch(call)
            except ReplicaGoneError:
                self.on_replica_gone(call)
            else:
                return True

    def on_replica_gone(self, call: HookCall) -> None:
        """Give up the replica that was to run a call, and is gone. Raises: InferError if no other one can."""
        if call.started or self._is_pinned():
            # what pre_inference has left in that replica's globals is lost
            raise self._replica_gone_error() from None
        self._replica = None

    def request_replica(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Wait for a replica, which must be passed to `hold` or `return_unused`. Raises: InferError."""
        return self._replicas.request_replica(deadline_ns)  # type: ignore[no-any-return]

    def hold(self, replica: Any) -> None:
        """Hold a replica that was waited for."""
        self._replica = replica

    def return_unused(self, replica: Any) -> None:
        """Return a replica that was waited for."""
        self._replicas.release(replica)

    def on_hook_returned(self, call: HookCall) -> None:
        """Record that a hook has returned."""
        self._hook_ran = True

    def make_generator_call(self, outputs: list[Any], answer_format: AnswerFormat, request_id: str) -> GeneratorCall:
        """Make the call for a hook that yields."""
        return GeneratorCall(outputs, answer_format.conversion, request_id)

    async def next_answer(self, generator: GeneratorCall) -> Answer | None:
        """Return what the request's hook yields next, None after the last. Raises: InferError."""
        start_ns = time.monotonic_ns()
        try:
            while True:
                if self._replica is None:
                    self._replica = self._replicas.acquire() or await self._replicas.wait(generator.deadline_ns)
                try:
                    answer = await generator.next_answer(self._replica)
                except ReplicaGoneError:
                    self.on_replica_gone(generator)
                else:
                    self._hook_ran = True
                    return answer
        except InferError:
            self._model.statistics.record_failure(OTHER, start_ns, time.monotonic_ns())
            raise

    def _is_pinned(self) -> bool:
        """Whether no other replica can continue the request."""
        return self._hook_ran and not self._replicas.shared

    def _replica_gone_error(self) -> InferError:
        """Return the client's error if the replica it needs is gone."""
        return InferError(Code.INTERNAL, f"the hooks of model '{self._model.name}' ended their thread")

    def end(self) -> None:
        """Give back the replica. To be called once."""
        if self._replica is not None:
            self._replicas.release(self._replica)
            self._replica = None
        self._replicas.on_request_ended()
