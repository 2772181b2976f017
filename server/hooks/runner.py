"""Hooks: passes requests through pre_inference, the Engine and post_inference. Called by the dialects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from typing import Any, Self

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.answer_statistics import AnswerStatistics
from penstock.batching.model import Model
from penstock.batching.request import DEFAULT_REQUEST_OPTIONS, InferRequest, RequestOptions, SoonSubmitter
from penstock.batching.running.custom_outputs import CustomAnswer, CustomOutputs, require_matching
from penstock.batching.scheduling.request_checks import make_request
from penstock.batching.stream import open_stream
from penstock.server.workers.order import Interpreters

from .call import AnswerFormat, FutureLike
from .conversions import conversions_for
from .convert import to_inputs
from .generator_call import Answer
from .hooked_request import HookedRequest
from .packing import JSON, TENSORS
from .placement import HookPlacement, configured_interpreter
from .plain_values import MAX_SMALL_BYTES
from .replica_lease import ReplicaLease
from .sequence_turns import SequenceTurns

Parameters = Mapping[str, Any] | None
"""A request's own parameters and forwarded headers."""

_NOT_ONE_RESPONSE = (
    "expects model to produce exactly 1 response, use generate stream for model that generates various number of "
    "responses"
)
"""Source: Triton server, http_server.cc."""


class Hooks:
    """One loaded model with its hooks; without hooks, a sample goes to the model as it is.

    Invariant: a replica that writes globals handles one request at a time, from before pre_inference until after
    post_inference or its last answer, while other replicas' requests share the model's batches.
    `yields`: post_inference is a generator function, so a request may have any number of answers.
    Threads: the event loop's; hooks run on their replicas' threads, except inline ones.
    """

    def __init__(self, engine: SoonSubmitter, model: Model) -> None:
        self.engine = engine
        self.model = model
        self.takes_parameters = model.spec.reads_parameters
        self.all_output_indices = tuple(range(len(model.signature.outputs)))
        self._placement: HookPlacement | None = None
        names = [spec.name for spec in model.signature.outputs]
        conversions = conversions_for(model, for_hooks=False)
        self._json_format = AnswerFormat(
            "predict",
            JSON,
            conversions.to_inputs,
            lambda outputs, parameters: conversions.encode_answer(
                conversions.to_prediction(require_matching(outputs), parameters), parameters
            ),
            None,
        )
        self._tensor_format = AnswerFormat(
            "generate",
            TENSORS,
            lambda tensors, _: to_inputs(tensors, model.signature),
            lambda outputs, _: _outputs_by_name([names[at] for at in model.all_outputs], outputs),
            model.all_outputs,
        )
        self._answer_statistics = AnswerStatistics()
        self.sequence_turns = SequenceTurns()
        self._in_flight = 0
        self._drained: asyncio.Event | None = None
        self.has_pre = False
        self.has_post = False
        self.yields = False
        self.streams = model.spec.is_streaming
        if self.streams:
            model.statistics.answers = self._answer_statistics

    @classmethod
    async def load(
        cls, engine: SoonSubmitter, model: Model, interpreters: Interpreters = configured_interpreter
    ) -> Hooks:
        """Load the hooks in the model's spec; errors in the file are raised here.

        `interpreters` returns the Python for workers. Raises: InferError (INVALID; EXPIRED if loading the file takes
        too long; NOT_READY if a worker ends while loading the file).
        """
        hooks = cls(engine, model)
        if model.spec.hooks is not None and model.spec.hooks.has_file:
            placement = HookPlacement(model, model.spec.hooks, interpreters)
            first = await placement.open()
            hooks._placement = placement
            hooks.has_pre, hooks.has_post, hooks.yields = first.has_pre, first.has_post, first.yields
            model.hooks_name_outputs = hooks.has_post
            if hooks.yields:
                model.statistics.answers = hooks._answer_statistics
        return hooks

    async def close(self) -> None:
        """Finish accepted requests, then end the replicas; if cancelled, end them and their generators at once.

        To be called before the model is unloaded.
        """
        if self._drained is None:
            self._drained = asyncio.Event()
        placement, at_once = self._placement, True
        try:
            if self._in_flight:
                await self._drained.wait()
            at_once = False
        finally:
            self._placement = None
            if placement is not None:
                placement.close()
                await (placement.kill() if at_once else placement.wait_ended())

    def enforce_limits(self, now_ns: int) -> None:
        """Fail calls that have exceeded their limit at `now_ns`; otherwise a timer does so."""
        if self._placement is not None:
            self._placement.enforce_limits(now_ns)

    def start(
        self, promise: FutureLike, sample: Any, request_id: str, terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        parameters: Parameters = None, *, nbytes: int,
    ) -> HookedRequest:  # fmt: skip
        """Do the same as `predict` without a task, and complete a promise unless it is cancelled. Not if it `yields`.

        `nbytes`: the size of the sample as sent.
        Raises: InferError (OVERLOADED, NOT_READY); the promise is then not completed.
        """
        request = HookedRequest(self, self._json_format, promise)
        request.begin(sample, request_id, terms, parameters, is_small=nbytes <= MAX_SMALL_BYTES)
        return request

    def predict(
        self,
        sample: Any,
        request_id: str = "",
        terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        parameters: Parameters = None,
    ) -> Coroutine[Any, Any, bytes]:
        """Take any JSON value; return the result of post_inference, or without it the list of outputs, as JSON.

        Raises: InferError.
        """
        return self._run(self._json_format, sample, request_id, terms, parameters)

    def infer(
        self,
        inputs: Mapping[str, Array],
        request_id: str = "",
        terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        parameters: Parameters = None,
    ) -> Coroutine[Any, Any, dict[str, Array]]:
        """Take tensors by name; return the result of post_inference as tensors by name, or without it the outputs.

        Ownership: the arrays are passed to the hook as they are, and may be views of the request's body.
        Raises: InferError.
        """
        return self._run(self._tensor_format, dict(inputs), request_id, terms, parameters)

    async def stream(
        self, inputs: Mapping[str, Array], request_id: str = "", terms: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        parameters: Parameters = None, requested_outputs: tuple[int, ...] | None = None,
    ) -> AsyncGenerator[Answer, None]:  # fmt: skip
        """Take tensors by name; yield each answer as it comes: those that post_inference yields, or the single one.

        `requested_outputs`: the requested outputs of a model that streams, None for all. Hooks get all, and name their
        own. A consumer that stops early must close it, which closes the user's generator too.
        Ownership: as `infer`. Raises: InferError, after the earlier answers.
        """
        if self.streams:
            lease = self.admit()
            try:
                wanted = self.model.all_outputs if requested_outputs is None else requested_outputs
                tensors = to_inputs(dict(inputs), self.model.signature)
                request = make_request(self.model, tensors, wanted, terms, parameters)
                request.id = request_id
                async with contextlib.aclosing(self._stream_model(request)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                self.release(lease)
            return
        if not self.yields:
            outputs = await self.infer(inputs, request_id, terms, parameters)
            yield Answer(outputs, final=True, parameters=getattr(outputs, "parameters", None))
            return
        stream = self._stream_answers(self._tensor_format, dict(inputs), request_id, terms, parameters)
        async with contextlib.aclosing(stream) as answers:
            async for answer in answers:
                yield answer

    async def _stream_model(self, request: InferRequest) -> AsyncGenerator[Answer, None]:
        """Submit a request to a model that streams, and yield and count its answers."""
        with (
            _AnswerCount(self.model, self._answer_statistics, time.monotonic_ns()) as count,
            open_stream(self.engine, request) as answers,
        ):
            while (each := await answers.next()) is not None:
                answer = Answer(
                    each.outputs, each.error, each.final, each.infer_ns, 0, 0, each.parameters, answers.has_next
                )
                count.add(answer)
                yield answer
            count.add_end(time.monotonic_ns() - count.since_ns)

    async def _stream_answers(self, answer_format: AnswerFormat, *arguments: Any) -> AsyncGenerator[Answer, None]:
        """Pass one request from its sample to the answers that post_inference yields."""
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = HookedRequest(self, answer_format, promise, includes_post=False)
        try:
            outputs = await _await_result(promise, request, *arguments)
            async with contextlib.aclosing(self._pull_answers(outputs, answer_format, request)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self.release(request.lease)

    async def _pull_answers(
        self, outputs: list[Any], answer_format: AnswerFormat, request: HookedRequest
    ) -> AsyncGenerator[Answer, None]:
        """Yield what post_inference yields for a prediction, and count it."""
        generator = request.active_lease.make_generator_call(outputs, answer_format, request.request_id)
        generator.parameters = request.parameters
        try:
            with _AnswerCount(self.model, self._answer_statistics, request.start_ns) as count:
                while (answer := await request.active_lease.next_answer(generator)) is not None:
                    count.add(answer)
                    yield answer
                count.add_end(generator.exhausted_ns)
        finally:
            generator.close()

    async def _run(self, answer_format: AnswerFormat, *arguments: Any) -> Any:
        """Pass one request from its sample to its answer. `arguments`: the arguments of HookedRequest.begin."""
        if self.yields:
            return await self._single_answer(answer_format, *arguments)
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            return await _await_result(promise, HookedRequest(self, answer_format, promise), *arguments)
        finally:
            del promise  # if it is an error, it holds this frame

    async def _single_answer(self, answer_format: AnswerFormat, *arguments: Any) -> Any:
        """Return the single answer of a post_inference that yields. Raises: InferError if there are several or none."""
        only: Answer | None = None
        not_one_error = InferError(Code.INTERNAL, f"{answer_format.method} {_NOT_ONE_RESPONSE}")
        async with contextlib.aclosing(self._stream_answers(answer_format, *arguments)) as answers:
            async for answer in answers:
                if answer.error is not None:
                    raise answer.error
                if only is not None:
                    raise not_one_error
                only = answer
        if only is None:
            raise not_one_error
        return only.outputs

    def admit(self) -> ReplicaLease | None:
        """Count a request in, and return its ReplicaLease if there are hooks. Raises: InferError."""
        if self._drained is not None:
            raise InferError(Code.NOT_READY, f"model '{self.model.name}' is being unloaded")
        lease = None if self._placement is None else self._placement.admit()
        self._in_flight += 1
        return lease

    def release(self, lease: ReplicaLease | None) -> None:
        """Count a request out that `admit` has counted in."""
        if lease is not None:
            lease.end()
        self._in_flight -= 1
        if self._drained is not None and not self._in_flight:
            self._drained.set()


class _AnswerCount:
    """Counts the answers of one request, and how it ends. `since_ns`: when the current answer began to be awaited."""

    def __init__(self, model: Model, statistics: AnswerStatistics, start_ns: int) -> None:
        self._model = model
        self._statistics = statistics
        self._start_ns = start_ns
        self._number = 0
        self.since_ns = time.monotonic_ns()

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        if not self._number:
            self._model.statistics.record_first_response(time.monotonic_ns() - self._start_ns)
        self._statistics.record(self._number, answer.infer_ns, answer.output_ns, failed=answer.error is not None)
        self._number += 1
        self.since_ns = time.monotonic_ns()

    def add_end(self, infer_ns: int) -> None:
        """Count the end, where another answer might have come."""
        self._statistics.record_empty(self._number, infer_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        elapsed_ns = time.monotonic_ns() - self.since_ns
        if isinstance(error, InferError):
            self._statistics.record(self._number, elapsed_ns, 0, failed=True)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._statistics.record_cancelled(self._number, elapsed_ns)


def _outputs_by_name(names: list[str], outputs: list[Any]) -> dict[str, Any]:
    """Return outputs by name; for user code only those present, with its parameters."""
    named_outputs = zip(names, outputs, strict=True)
    if type(outputs) is not CustomOutputs:
        return dict(named_outputs)
    return CustomAnswer([(name, output) for name, output in named_outputs if output is not None], outputs.parameters)


async def _await_result(promise: asyncio.Future[Any], request: HookedRequest, *arguments: Any) -> Any:
    """Begin a HookedRequest, and wait for its promise."""
    request.begin(*arguments)
    try:
        return await promise
    except asyncio.CancelledError:
        request.cancel()
        raise
    finally:
        del promise


async def close_all(all_hooks: Iterable[Hooks], grace_s: float) -> int:
    """Close the Hooks of all models, which finish their requests. Returns: how many had not after `grace_s`."""
    closing = [asyncio.ensure_future(hooks.close()) for hooks in all_hooks]
    if not closing:
        return 0
    _, pending = await asyncio.wait(closing, timeout=grace_s)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    return len(pending)
