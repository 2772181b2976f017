"""Visit: one request's use of a model's replicas. Made by `replicas.py`, called on the event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.statistics import OTHER

from .call import AnswerFormat, HookCall, ReplicaGoneError
from .loading import POST
from .generator_call import Answer, GeneratorCall

if TYPE_CHECKING:
    import asyncio


class ReplicaLease:
    """One request's use of the replicas: the one it holds, from its first hook until `leave`."""

    __slots__ = ("_begun", "_model", "_replica", "_replicas")

    def __init__(self, replicas: Any, model: Model) -> None:
        self._replicas = replicas
        self._model = model
        self._replica: Any = None
        self._begun = False
        replicas.guests += 1

    def put(self, call: HookCall) -> bool:
        """Run one of the request's hooks, if a replica is available now; its future gets the result.

        Raises: InferError.
        """
        if self._replicas.shared:
            self._replica = self._replicas.take()
        return self._put_on_one(call)

    def _put_on_one(self, call: HookCall) -> bool:
        while True:
            if self._replica is None:
                self._replica = self._replicas.take()
            if self._replica is None:
                return False
            try:
                self._replica.put(call)
            except ReplicaGoneError:
                self.moved(call)
            else:
                return True

    def moved(self, call: HookCall) -> None:
        """Give up the replica that was to run a call, and is gone. Raises: InferError if no other one can."""
        if call.begun or self._is_bound():
            # what pre_inference has left in that replica's globals is lost
            raise self._gone() from None
        self._replica = None

    def line_up(self, deadline_ns: int) -> asyncio.Future[Any]:
        """Wait for a replica, which must be passed to `take` or `give_back`. Raises: InferError."""
        return self._replicas.line_up(deadline_ns)  # type: ignore[no-any-return]

    def take(self, replica: Any) -> None:
        """Hold a replica that was waited for."""
        self._replica = replica

    def give_back(self, replica: Any) -> None:
        """Return a replica that was waited for."""
        self._replicas.leave(replica)

    def returned(self, call: HookCall) -> None:
        """Record that a hook has returned."""
        self._begun = True

    def pull(self, outputs: list[Any], form: AnswerFormat, request_id: str) -> GeneratorCall:
        """Make the Pull for a hook that yields."""
        return GeneratorCall(outputs, form.code, request_id)

    def post(self, outputs: list[Any], form: AnswerFormat, request_id: str) -> HookCall:
        """Make the call of post_inference. A deadline is for waiting: once the model has run, a request is finished."""
        return HookCall(POST, outputs, form.code, 0, request_id)

    async def next(self, pull: GeneratorCall) -> Answer | None:
        """Return what the request's hook yields next, None after the last. Raises: InferError."""
        start_ns = time.monotonic_ns()
        try:
            while True:
                if self._replica is None:
                    self._replica = self._replicas.take() or await self._replicas.wait(pull.deadline_ns)
                try:
                    answer = await pull.next(self._replica)
                except ReplicaGoneError:
                    self.moved(pull)
                else:
                    self._begun = True
                    return answer
        except InferError:
            self._model.statistics.record_failure(OTHER, start_ns, time.monotonic_ns())
            raise

    def _is_bound(self) -> bool:
        """Whether no other replica can continue the request."""
        return self._begun and not self._replicas.shared

    def _gone(self) -> InferError:
        """Return the client's error if the replica it needs is gone."""
        return InferError(Code.INTERNAL, f"the hooks of model '{self._model.name}' ended their thread")

    def leave(self) -> None:
        """Give back the replica. To be called once."""
        if self._replica is not None:
            self._replicas.leave(self._replica)
            self._replica = None
        self._replicas.departed()
