"""Predictions: `predict` on the fast lane, which passes any JSON through a model's hooks. Called by `inference.py`.

Small samples need no task: a HookedRequest reports its result to a Promise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.backends.errors import InferError
from penstock.batching.request import DEFAULT_REQUEST_OPTIONS, RequestOptions
from penstock.server.answering import LARGE_BYTES, LargeJsonReader, Promise, internal_error, read_compressed

from .call_parameters import DEFAULT_OPTIONS
from .parsing import parse

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.limits import Limits
    from penstock.server.listening.mapped_buffer import Body

    from .claims import InferenceClaim

WriteAnswer = Callable[["FastLane", "InferenceClaim", "Body", int], None]
WriteError = Callable[["FastLane", InferError], None]


class Predictions:
    """Answers `predict` for one server. `write` and `answer_error` answer a connection."""

    def __init__(
        self,
        limits: Limits,
        hooks_of: Callable[[Model], Hooks],
        texts: LargeJsonReader,
        write: WriteAnswer,
        answer_error: WriteError,
    ) -> None:
        self._limits = limits
        self._hooks_of = hooks_of
        self._texts = texts
        self._write = write
        self._answer_error = answer_error

    def begin(self, connection: FastLane, claim: InferenceClaim, model: Model, body: bytes) -> bool:
        """Start a prediction, to be answered later. Returns: False if it needs a task. Raises: InferError."""
        if claim.coding or len(body) >= LARGE_BYTES:
            return False
        hooks = self._hooks_of(model)
        if hooks.yields:
            return False
        sample = parse(body, self._limits.max_json_depth, simd=False)
        promise = Promise(self._answer, self._fail, connection, claim)
        args = sample, claim.request_id, _terms(model), claim.forwarded
        request = hooks.start(promise, *args, nbytes=len(body))
        if not request.done():
            connection.task = request
        return True

    async def run(self, connection: FastLane, claim: InferenceClaim, model: Model, body: bytes) -> None:
        """Answer a prediction. Raises: InferError, HttpError."""
        read = partial(parse, max_depth=self._limits.max_json_depth, simd=False)
        if claim.coding:
            sample = await read_compressed(body, claim.coding, self._limits, read, self._texts)
        elif len(body) < LARGE_BYTES:
            sample = read(body)
        else:
            sample = await self._texts.read(len(body), read, body)
        answer = await self._hooks_of(model).predict(sample, claim.request_id, _terms(model), claim.forwarded)
        self._answer(connection, claim, answer)

    def _answer(self, connection: FastLane, claim: InferenceClaim, answer: bytes) -> None:
        self._write(connection, claim, answer, 0)

    def _fail(self, connection: FastLane, claim: InferenceClaim, error: BaseException) -> None:
        if not isinstance(error, InferError):  # logged under an id, and the client always gets an answer
            error = internal_error(error, claim.route.name, claim.request_id)
        self._answer_error(connection, error)


def _terms(model: Model) -> RequestOptions:
    if not model.has_default_timeout:
        return DEFAULT_REQUEST_OPTIONS
    return DEFAULT_OPTIONS.terms(time.monotonic_ns(), model.spec.policy)
