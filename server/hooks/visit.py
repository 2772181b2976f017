"""Visit: one request's way through the hooks of its model. Made by `replicas.py`, called on the event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.statistics import OTHER

from .call import Call, Form, MovedError
from .loading import POST
from .pull import Answer, Pull

T = TypeVar("T")


class Visit:
    """One request's way through the hooks: the replica it holds, from its first hook until `leave`."""

    __slots__ = ("_begun", "_model", "_replica", "_replicas")

    def __init__(self, replicas: Any, model: Model) -> None:
        self._replicas = replicas
        self._model = model
        self._replica: Any = None
        self._begun = False
        replicas.guests += 1

    async def call(self, call: Call) -> Any:
        """Run one of the request's hooks, on the replica it holds or on the first that is free.

        Raises: InferError.
        """
        replicas = self._replicas
        if self._replica is None or replicas.shared:
            self._replica = replicas.take()
        if self._replica is None:
            return await self._on_replica(call, lambda replica: replica.submit(call))
        start_ns = time.monotonic_ns()
        try:
            # as `_on_replica`, less the time that it takes
            result = await self._replica.submit(call)
        except MovedError:
            return await self._on_replica(call, lambda replica: replica.submit(call))
        except InferError:
            self._model.statistics.record_failure(OTHER, start_ns, time.monotonic_ns())
            raise
        self._begun = True
        return result

    def pull(self, outputs: list[Any], form: Form, request_id: str) -> Pull:
        """Make the Pull of what the request's hook yields for a prediction."""
        return Pull(outputs, form.code, request_id)

    def post(self, outputs: list[Any], form: Form, request_id: str) -> Call:
        """Make the call of post_inference. A deadline is for waiting: what the model has run for is finished."""
        return Call(POST, outputs, form.code, 0, request_id)

    async def next(self, pull: Pull) -> Answer | None:
        """Give what the request's hook yields next, None after the last. Raises: InferError."""
        return await self._on_replica(pull, pull.next)

    async def _on_replica(self, call: Call, work: Callable[[Any], Awaitable[T]]) -> T:
        start_ns = time.monotonic_ns()
        try:
            while True:
                if self._replica is None:
                    self._replica = self._replicas.take() or await self._replicas.wait(call.deadline_ns)
                try:
                    result = await work(self._replica)
                except MovedError:
                    if call.begun or self._is_bound():
                        # what pre_inference left in that replica's globals has gone with it
                        raise self._gone() from None
                    self._replica = None
                else:
                    self._begun = True
                    return result
        except InferError:
            self._model.statistics.record_failure(OTHER, start_ns, time.monotonic_ns())
            raise

    def _is_bound(self) -> bool:
        """Whether no other replica can go on with the request."""
        return self._begun and not self._replicas.shared

    def _gone(self) -> InferError:
        """Make what the client is told when the replica that it needs is gone."""
        return InferError(Code.INTERNAL, f"the hooks of model '{self._model.name}' ended their thread")

    def leave(self) -> None:
        """Give back what is held. To be called once."""
        if self._replica is not None:
            self._replicas.leave(self._replica)
            self._replica = None
        self._replicas.departed()
