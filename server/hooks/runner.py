"""Hooks: passes requests through pre_inference, the Engine and post_inference. Called by the dialects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.answer_statistics import AnswerStatistics
from penstock.batching.model import Model
from penstock.batching.request import DEFAULT_OPTIONS, RequestOptions, SoonSubmitter
from penstock.batching.running.custom_outputs import CustomAnswer, CustomOutputs, require_matching

from .call import AnswerForm, FutureLike
from .coded import HookRequest, told
from .conversions import of_model
from .convert import to_inputs
from .packing import JSON, TENSORS
from .placement import HookPlacement, own_interpreter
from .pull import Answer
from .swift import SMALL_BYTES
from .trip import Trip
from .turns import SequenceTurns
from .visit import Visit
from .worker_replicas import Interpreters

Parameters = Mapping[str, Any] | None
"""A request's own parameters and forwarded headers."""

_NOT_ONE = (
    "expects model to produce exactly 1 response, use generate stream for model that generates various number of "
    "responses"
)
"""Source: Triton server, http_server.cc."""


class Hooks:
    """One loaded model with its hooks; without hooks, a sample goes to the model as it is.

    Invariant: a replica that writes globals handles one request at a time, from before pre_inference until after
    post_inference or its last answer, while other replicas' requests share the model's batches.
    `yields`: post_inference is a generator function, so a request may have any number of answers.
    Threads: the event loop's; hooks run on their replicas' threads, except swift ones.
    """

    def __init__(self, engine: SoonSubmitter, model: Model) -> None:
        self.engine = engine
        self.model = model
        self.takes_parameters = model.spec.reads_parameters
        self.every = tuple(range(len(model.signature.outputs)))
        self._place: HookPlacement | None = None
        names = [spec.name for spec in model.signature.outputs]
        rules = of_model(model, for_hooks=False)
        self._as_json = AnswerForm(
            "predict",
            JSON,
            rules.inputs,
            lambda outputs, parameters: rules.answer(
                rules.prediction(require_matching(outputs), parameters), parameters
            ),
            None,
        )
        self._as_tensors = AnswerForm(
            "generate",
            TENSORS,
            lambda tensors, _: to_inputs(tensors, model.signature),
            lambda outputs, _: _named([names[at] for at in model.all_outputs], outputs),
            model.all_outputs,
        )
        self._counted = AnswerStatistics()
        self.turns = SequenceTurns()
        self._in_flight = 0
        self._drained: asyncio.Event | None = None
        self.has_pre = False
        self.has_post = False
        self.yields = False
        self.streams = model.spec.is_streaming
        if self.streams:
            model.statistics.answers = self._counted

    @classmethod
    async def load(cls, engine: SoonSubmitter, model: Model, interpreters: Interpreters = own_interpreter) -> Hooks:
        """Load the hooks in the model's spec; errors in the file are raised here.

        `interpreters` returns the Python for workers. Raises: InferError (INVALID; EXPIRED if loading the file takes
        too long; NOT_READY if a worker ends while loading the file).
        """
        hooks = cls(engine, model)
        if model.spec.hooks is not None and model.spec.hooks.has_file:
            place = HookPlacement(model, model.spec.hooks, interpreters)
            first = await place.open()
            hooks._place = place
            hooks.has_pre, hooks.has_post, hooks.yields = first.has_pre, first.has_post, first.yields
            model.hooks_name_outputs = hooks.has_post
            if hooks.yields:
                model.statistics.answers = hooks._counted
        return hooks

    async def close(self) -> None:
        """Finish accepted requests, then end the replicas; if cancelled, end them and their generators at once.

        To be called before the model is unloaded.
        """
        if self._drained is None:
            self._drained = asyncio.Event()
        place, at_once = self._place, True
        try:
            if self._in_flight:
                await self._drained.wait()
            at_once = False
        finally:
            self._place = None
            if place is not None:
                place.close()
                await (place.kill() if at_once else place.ended())

    def watch(self, now_ns: int) -> None:
        """Fail calls that have exceeded their limit at `now_ns`; otherwise a timer does so."""
        if self._place is not None:
            self._place.watch(now_ns)

    def start(
        self, promise: FutureLike, sample: Any, request_id: str, terms: RequestOptions = DEFAULT_OPTIONS,
        parameters: Parameters = None, *, nbytes: int,
    ) -> Trip:  # fmt: skip
        """Do the same as `predict` without a task, and complete a promise unless it is cancelled. Not if it `yields`.

        `nbytes`: the size of the sample as sent.
        Raises: InferError (OVERLOADED, NOT_READY); the promise is then not completed.
        """
        trip = Trip(self, self._as_json, promise)
        trip.begin(sample, request_id, terms, parameters, small=nbytes <= SMALL_BYTES)
        return trip

    def predict(
        self, sample: Any, request_id: str = "", terms: RequestOptions = DEFAULT_OPTIONS, parameters: Parameters = None
    ) -> Coroutine[Any, Any, bytes]:
        """Take any JSON value; return the result of post_inference, or without it the list of outputs, as JSON.

        Raises: InferError.
        """
        return self._pass(self._as_json, sample, request_id, terms, parameters)

    def infer(
        self,
        inputs: Mapping[str, Array],
        request_id: str = "",
        terms: RequestOptions = DEFAULT_OPTIONS,
        parameters: Parameters = None,
    ) -> Coroutine[Any, Any, dict[str, Array]]:
        """Take tensors by name; return the result of post_inference as tensors by name, or without it the outputs.

        Ownership: the arrays are passed to the hook as they are, and may be views of the request's body.
        Raises: InferError.
        """
        return self._pass(self._as_tensors, dict(inputs), request_id, terms, parameters)

    async def stream(
        self, inputs: Mapping[str, Array], request_id: str = "", terms: RequestOptions = DEFAULT_OPTIONS,
        parameters: Parameters = None, wanted: tuple[int, ...] | None = None,
    ) -> AsyncGenerator[Answer, None]:  # fmt: skip
        """Take tensors by name; yield each answer as it comes: those that post_inference yields, or the single one.

        `wanted`: the requested outputs of a model that streams, None for all. Hooks get all, and name their own. A
        consumer that stops early must close it, which closes the user's generator too.
        Ownership: as `infer`. Raises: InferError, after the earlier answers.
        """
        if self.streams:
            call = HookRequest(dict(inputs), request_id, terms, parameters, wanted)
            visit = self.admit()
            try:
                async with contextlib.aclosing(told(self.engine, self.model, call, self._counted)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                self.leave(visit)
            return
        if not self.yields:
            outputs = await self.infer(inputs, request_id, terms, parameters)
            yield Answer(outputs, final=True, parameters=getattr(outputs, "parameters", None))
            return
        several = self._several(self._as_tensors, dict(inputs), request_id, terms, parameters)
        async with contextlib.aclosing(several) as answers:
            async for answer in answers:
                yield answer

    async def _several(self, form: AnswerForm, *said: Any) -> AsyncGenerator[Answer, None]:
        """Pass one request from its sample to the answers that post_inference yields."""
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trip = Trip(self, form, promise, whole=False)
        try:
            outputs = await _kept(promise, trip, *said)
            async with contextlib.aclosing(self._pull(outputs, form, trip)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self.leave(trip.visit)

    async def _pull(self, outputs: list[Any], form: AnswerForm, trip: Trip) -> AsyncGenerator[Answer, None]:
        """Yield what post_inference yields for a prediction, and count it."""
        counted, number = self._counted, 0
        pull = trip.held.pull(outputs, form, trip.request_id)
        pull.parameters = trip.parameters
        since_ns = time.monotonic_ns()
        try:
            while (answer := await trip.held.next(pull)) is not None:
                if not number:
                    self.model.statistics.record_first_response(time.monotonic_ns() - trip.start_ns)
                counted.record(number, answer.infer_ns, answer.output_ns, failed=answer.error is not None)
                number += 1
                since_ns = time.monotonic_ns()
                yield answer
            counted.record_empty(number, pull.ended_ns)
        except InferError:
            counted.record(number, time.monotonic_ns() - since_ns, 0, failed=True)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            counted.record_cancelled(number, time.monotonic_ns() - since_ns)
            raise
        finally:
            pull.close()

    async def _pass(self, form: AnswerForm, *said: Any) -> Any:
        """Pass one request from its sample to its answer. `said`: the arguments of Trip.begin."""
        if self.yields:
            return await self._only(form, *said)
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            return await _kept(promise, Trip(self, form, promise), *said)
        finally:
            del promise  # if it is an error, it holds this frame

    async def _only(self, form: AnswerForm, *said: Any) -> Any:
        """Return the single answer of a post_inference that yields. Raises: InferError if there are several or none."""
        found: Answer | None = None
        not_one = InferError(Code.INTERNAL, f"{form.asked_as} {_NOT_ONE}")
        async with contextlib.aclosing(self._several(form, *said)) as answers:
            async for answer in answers:
                if answer.error is not None:
                    raise answer.error
                if found is not None:
                    raise not_one
                found = answer
        if found is None:
            raise not_one
        return found.outputs

    def admit(self) -> Visit | None:
        """Count a request in, and return its Visit if there are hooks. Raises: InferError."""
        if self._drained is not None:
            raise InferError(Code.NOT_READY, f"model '{self.model.name}' is being unloaded")
        visit = None if self._place is None else self._place.admit()
        self._in_flight += 1
        return visit

    def leave(self, visit: Visit | None) -> None:
        """Count a request out that `admit` has counted in."""
        if visit is not None:
            visit.leave()
        self._in_flight -= 1
        if self._drained is not None and not self._in_flight:
            self._drained.set()


def _named(names: list[str], outputs: list[Any]) -> dict[str, Any]:
    """Return outputs by name; for user code only those present, with its parameters."""
    named = zip(names, outputs, strict=True)
    if type(outputs) is not CustomOutputs:
        return dict(named)
    return CustomAnswer([(name, output) for name, output in named if output is not None], outputs.parameters)


async def _kept(promise: asyncio.Future[Any], trip: Trip, *said: Any) -> Any:
    """Begin a Trip, and wait for its promise."""
    trip.begin(*said)
    try:
        return await promise
    except asyncio.CancelledError:
        trip.cancel()
        raise
    finally:
        del promise


async def close_all(every: Iterable[Hooks], grace_s: float) -> int:
    """Close the Hooks of all models, which finish their requests. Returns: how many had not after `grace_s`."""
    closing = [asyncio.ensure_future(hooks.close()) for hooks in every]
    if not closing:
        return 0
    _, pending = await asyncio.wait(closing, timeout=grace_s)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    return len(pending)
