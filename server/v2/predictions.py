"""Predictions: `predict` on the fast lane, any JSON through a model's hooks. Called by `inference.py`.

A sample that is small goes its way without a task: a Trip tells an Answer what it has come to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.batching.request import NO_TERMS, Terms
from penstock.server.answering import LARGE_BYTES, LargeTexts, internal, unpacked

from .parsing import parse
from .said import PLAIN

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.limits import Limits

    from .claims import Claim

Answers = Callable[["FastLane", "Claim", bytes, int], None]
Refuses = Callable[["FastLane", InferError], None]


class Predictions:
    """Answers `predict` for one server. `answer` and `refuse` write what a connection is waiting for."""

    def __init__(
        self, limits: Limits, hooks_of: Callable[[Model], Hooks], texts: LargeTexts, answer: Answers, refuse: Refuses
    ) -> None:
        self._limits = limits
        self._hooks_of = hooks_of
        self._texts = texts
        self.answer = answer
        self.refuse = refuse

    def begin(self, connection: FastLane, claim: Claim, model: Model, body: bytes) -> bool:
        """Begin one here and now, to be answered later. Returns: False where it takes a task. Raises: InferError."""
        if claim.coding or len(body) >= LARGE_BYTES:
            return False
        hooks = self._hooks_of(model)
        if hooks.yields:
            return False
        sample = parse(body, self._limits.max_json_depth, simd=False)
        answer = _Answer(self, connection, claim)
        trip = hooks.start(answer, sample, claim.request_id, _terms(model), claim.forwarded)
        if not trip.done():
            connection.task = trip
        return True

    async def run(self, connection: FastLane, claim: Claim, model: Model, body: bytes) -> None:
        """Answer one. Raises: InferError, HttpError."""
        read = partial(parse, max_depth=self._limits.max_json_depth, simd=False)
        if claim.coding:
            sample = await unpacked(body, claim.coding, self._limits, read, self._texts)
        elif len(body) < LARGE_BYTES:
            sample = read(body)
        else:
            sample = await self._texts.read(len(body), read, body)
        answer = await self._hooks_of(model).predict(sample, claim.request_id, _terms(model), claim.forwarded)
        self.answer(connection, claim, answer, 0)


class _Answer:
    """The promise of one answer."""

    __slots__ = ("_claim", "_connection", "_predictions")

    def __init__(self, predictions: Predictions, connection: FastLane, claim: Claim) -> None:
        self._predictions = predictions
        self._connection = connection
        self._claim = claim

    def done(self) -> bool:
        """Whether nobody waits any more: its Trip is cancelled then."""
        return False

    def set_result(self, result: Any, /) -> None:
        """Answer with what the hooks have made."""
        self._connection.task = None  # first: the answer may begin the connection's next request
        try:
            self._predictions.answer(self._connection, self._claim, result, 0)
        except Exception as error:  # noqa: BLE001 - as below
            self.set_exception(error)

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with why there is nothing."""
        self._connection.task = None
        if not isinstance(error, InferError):  # logged under an id, and the client gets an answer whatever it is
            error = internal(error, self._claim.route.name, self._claim.request_id)
        self._predictions.refuse(self._connection, error)


def _terms(model: Model) -> Terms:
    return PLAIN.terms(time.monotonic_ns(), model.spec.policy) if model.timed else NO_TERMS
