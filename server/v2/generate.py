"""The generate extension: tensors as plain members of a JSON object, in one answer or as server-sent events.

generate_stream sends an event for each answer as it arrives. Source: Triton's extension_generate.md, and http_server.cc
for the conversion of members to tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, TypeVarTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.batching.model import Model
from penstock.batching.scheduling.request_checks import check_shapes
from penstock.server.answering import LargeJsonReader
from penstock.server.errors import HTTP_STATUS, error_body
from penstock.server.http.uvicorn_answers import PARTS

from . import call_parameters
from .decode import inputs_mismatch
from .generate_encoder import GenerateEncoder
from .parsing import NOT_AN_OBJECT, parse
from .routes import JSON, Route, model_and_version, read_body, wait_disconnect
from .tensors import from_json

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.request import RequestOptions
    from penstock.server.engines import ServingEngine
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.limits import Limits
    from penstock.server.http.uvicorn_answers import BodyParts

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger("penstock.server")

_EVENTS = "text/event-stream; charset=utf-8"
_PARAMETERS = "parameters"
_ADMISSION_ERRORS = (Code.OVERLOADED, Code.NOT_READY)
"""Errors before inference begins are answered as JSON, also by generate_stream."""
_LARGE_BYTES = 256 << 10
_MAX_GROUP_BYTES = 64 << 10
"""Events available at the same time are sent together up to this many bytes."""
_REQUEST = {"type": "object", "properties": {_PARAMETERS: {"type": "object"}}, "additionalProperties": True}


class GenerateRequest(NamedTuple):
    """A parsed request: the arguments of `Hooks.infer` and `Hooks.stream`."""

    inputs: dict[str, Array]
    request_id: str
    terms: RequestOptions
    parameters: Mapping[str, Any] | None


class Events(NamedTuple):
    """Events available at the same time, and the status of an answer that begins with them."""

    texts: Sequence[bytes] = ()
    status: int = 200


class Generate:
    """The endpoints."""

    def __init__(self, engine: ServingEngine, limits: Limits, hooks_of: Callable[[Model], Hooks]) -> None:
        self._engine = engine
        self._limits = limits
        self._hooks_of = hooks_of
        self._texts = LargeJsonReader()

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        model = "/v2/models/{model}"
        paths = model + "/", model + "/versions/{version}/"
        codes = (400, 404, 501, 503)
        return (
            Route(
                "POST", tuple(path + "generate" for path in paths), self.generate,
                "Inference: tensors by name as members of the request and of the answer", _REQUEST, _REQUEST, codes,
            ),
            Route(
                "POST", tuple(path + "generate_stream" for path in paths), self.generate_stream,
                "The same, answered as server-sent events", {"type": "string"}, _REQUEST, codes, _EVENTS,
            ),
        )  # fmt: skip

    async def generate(self, request: Request) -> Response:
        """Answer with one object."""
        body = await self._body(request)
        model = self._engine.model(*model_and_version(request))
        self._engine.hold(model)
        try:
            answer = await _cancel_on_disconnect(request.receive, self._answer(model, await self._call(model, body)))
        finally:
            self._engine.release(model)
        return Response(answer, media_type=JSON)

    async def generate_stream(self, request: Request) -> Response:
        """Answer with one event per answer, and an error event if inference fails."""
        body = await self._body(request)
        model = self._engine.model(*model_and_version(request))
        async with contextlib.AsyncExitStack() as until_answered:
            self._engine.hold(model)
            until_answered.callback(self._engine.release, model)
            parsed = await self._call(model, body)
            answers = await until_answered.enter_async_context(contextlib.aclosing(self._answers(model, parsed)))
            try:
                # the status depends on the outcome, so it waits for the first answer
                first = await _cancel_on_disconnect(request.receive, _first(answers))
            except InferError as error:
                if error.code in _ADMISSION_ERRORS:
                    raise
                return Response(
                    _error_event(without_traceback(error)), HTTP_STATUS[error.code], headers={"content-type": _EVENTS}
                )
            return _Events(first, answers, until_answered.pop_all())
        raise InferError(Code.INTERNAL, "an exit stack that swallows errors")

    async def _body(self, request: Request) -> bytes:
        """Read a body before the model is held, because the client may be slow. Raises: InferError."""
        self._engine.model(*model_and_version(request))  # an unknown model is rejected before the body is read
        if request.headers.get("content-encoding", "identity") not in {"", "identity"}:
            raise call_parameters.invalid("Unsupported content-encoding, only 'identity' is supported.")
        return await read_body(request, self._limits.max_body_bytes)

    async def _call(self, model: Model, body: bytes) -> GenerateRequest:
        """Parse a request, and check its shapes against the model unless a hook may change them.

        Raises: InferError.
        """
        depth = self._limits.max_json_depth
        if len(body) < _LARGE_BYTES:
            request_id, inputs, options = parse_generate(model, body, depth)
        else:
            request_id, inputs, options = await self._texts.read(len(body), parse_generate, model, body, depth)
        if not self._hooks_of(model).has_pre:
            signature = model.signature
            shapes = [inputs[name].shape if name in inputs else None for name in signature.input]
            check_shapes(model.name, signature, model.max_request_rows, shapes, model.padding)
        terms = options.terms(time.monotonic_ns(), model.spec.policy)
        return GenerateRequest(inputs, request_id, terms, options.parameters)

    async def _answer(self, model: Model, parsed: GenerateRequest) -> bytes:
        outputs = await self._hooks_of(model).infer(*parsed)
        write, parameters = GenerateEncoder(model, parsed.request_id).write, getattr(outputs, "parameters", None)
        return await _on_thread(write, outputs, parameters) if _is_large(outputs) else write(outputs, parameters)

    async def _answers(self, model: Model, parsed: GenerateRequest) -> AsyncGenerator[Events, None]:
        """Yield the events as they come, grouping those available together. Raises: InferError, after those."""
        stream, write = self._hooks_of(model).stream(*parsed), GenerateEncoder(model, parsed.request_id).write
        texts: list[bytes] = []
        status = nbytes = 0
        try:
            async with contextlib.aclosing(stream) as answers:
                async for answer in answers:
                    large, error = _is_large(answer.outputs), answer.error
                    if large and texts:
                        yield Events(texts, status)
                        texts, nbytes = [], 0
                    if error is not None:
                        text = _error_event(error)
                    else:
                        args = answer.outputs, answer.parameters
                        text = _event(await _on_thread(write, *args) if large else write(*args))
                    if not texts:
                        status = 200 if error is None else HTTP_STATUS[error.code]
                    texts.append(text)
                    nbytes += len(text)
                    if not answer.more or nbytes >= _MAX_GROUP_BYTES:
                        yield Events(texts, status)
                        texts, nbytes = [], 0
        except Exception:
            if texts:
                yield Events(texts, status)
            raise


class _Events(Response):
    """Server-sent events: one per answer, as it comes and as the client reads. `answered` is closed at the end."""

    def __init__(
        self, first: Events, answers: AsyncGenerator[Events, None], answered: contextlib.AsyncExitStack
    ) -> None:
        # nginx with its default configuration would otherwise buffer them until the last one
        super().__init__(status_code=first.status, headers={"content-type": _EVENTS, "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._answers = answers
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them (called by the framework)."""
        parts: BodyParts | None = (scope.get("extensions") or {}).get(PARTS)
        send_events = partial(_send_each, send) if parts is None else parts.send
        async with self._answered:
            with contextlib.suppress(InferError):
                await _cancel_on_disconnect(receive, self._send(send, send_events))

    async def _send(self, send: Send, send_events: Callable[[Sequence[bytes]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first.texts:
            await send_events(self._first.texts)
        try:
            async for events in self._answers:
                await send_events(events.texts)
        except InferError as error:
            await send_events((_error_event(without_traceback(error)),))
        except Exception:
            number = secrets.token_hex(4)
            logger.exception("generate_stream failed", extra={"request_id": number})
            await send_events((_error_event(InferError(Code.INTERNAL, f"internal error, request id {number}")),))
        await send({"type": "http.response.body", "body": b""})


async def _send_each(send: Send, texts: Iterable[bytes]) -> None:
    for text in texts:
        await send({"type": "http.response.body", "body": text, "more_body": True})


async def _first(answers: AsyncGenerator[Events, None]) -> Events:
    async for events in answers:
        return events
    return Events()


def _event(text: bytes) -> bytes:
    return b"data: %b\n\n" % text


def _error_event(error: InferError) -> bytes:
    return _event(error_body(error.message))


def _is_large(outputs: Mapping[str, Array]) -> bool:
    """Return whether writing an answer would block the event loop."""
    return sum([array.nbytes for array in outputs.values()]) >= _LARGE_BYTES


async def _on_thread(write: Callable[[*Ts], bytes], *args: *Ts) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(None, write, *args)


async def _cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await an answer, or cancel it if its client disconnects. Raises: InferError (CANCELLED, which nobody reads)."""
    answer, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait((answer, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise InferError(Code.CANCELLED, "the client has closed the connection")
        return answer.result()
    finally:
        answer.cancel()
        disconnected.cancel()
        # so that it releases its resources before the caller continues
        await asyncio.wait((answer, disconnected))
        # breaks a reference cycle: a task holds its error, which holds this frame
        del answer, disconnected


def parse_generate(model: Model, body: bytes, max_depth: int) -> tuple[str, dict[str, Array], call_parameters.Options]:
    """Parse the members of a request: each is the values of an input or a parameter; `parameters` may hold both.

    Raises: InferError.
    """
    document = parse(body, max_depth, simd=False)
    if type(document) is not dict:
        raise call_parameters.invalid(NOT_AN_OBJECT)
    specs = model.signature.input
    _reject_repeated(specs, body)
    nested = document.pop(_PARAMETERS, {})
    if _PARAMETERS in specs and nested:
        raise call_parameters.invalid(f"Keyword '{_PARAMETERS}' for nested schema also given as input tensor name")
    if type(nested) is not dict:
        raise call_parameters.invalid(f"Expected JSON object for keyword: '{_PARAMETERS}'")
    request_id = "" if "id" in specs else document.pop("id", "")
    if type(request_id) is not str:
        raise call_parameters.invalid(call_parameters.NO_ID)
    inputs: dict[str, Array] = {}
    parameters: dict[str, Any] = {}
    _sort_members(specs, document, inputs, parameters)
    try:
        _sort_members(specs, nested, inputs, parameters)
    except InferError as error:
        raise call_parameters.invalid(f"Converting keyword: '{_PARAMETERS}': {error.message}") from error
    options, _ = call_parameters.parse_parameters(parameters)
    if any(name not in inputs and not spec.optional for name, spec in specs.items()):
        raise inputs_mismatch(model, list(inputs))
    return request_id, inputs, options


def _sort_members(
    specs: Mapping[str, TensorSpec], members: Mapping[str, Any], inputs: dict[str, Array], parameters: dict[str, Any]
) -> None:
    """Sort members into inputs and parameters. Raises: InferError (INVALID)."""
    for name, value in members.items():
        spec = specs.get(name)
        if spec is None:
            call_parameters.check_type(name, value)
            parameters[name] = value
        elif name in inputs:
            raise call_parameters.invalid(f"input '{name}' already exists in request")
        else:
            inputs[name] = _tensor(spec, value)


def _reject_repeated(input_names: Collection[str], body: bytes) -> None:
    """Reject a repeated member if it names an input; of repeated parameters the last one counts. Raises: InferError."""
    if b"\\" not in body and all(body.count(orjson.dumps(name)) < 2 for name in input_names):
        return
    seen: set[str] = set()
    for name, _ in json.loads(body.rstrip(b"\0"), object_pairs_hook=tuple):
        if name in input_names and name in seen:
            raise call_parameters.invalid(f"input '{name}' already exists in request")
        seen.add(name)


def _tensor(spec: TensorSpec, value: Any) -> Array:
    """Make a tensor from a value or a list of values: the innermost free dim takes what the fixed dims leave."""
    values = value if type(value) is list else [value]
    dims, remaining = list(spec.shape), len(values)
    fixed = math.prod(dim for dim in dims if dim != -1)
    mismatch = call_parameters.invalid(f"The schema can not convert input '{spec.name}' to tensor with proper shape")
    if remaining % fixed if fixed else remaining:
        raise mismatch
    remaining = remaining // fixed if fixed else 1
    for axis in reversed(range(len(dims))):
        if dims[axis] == -1:
            dims[axis], remaining = remaining, 1
    if remaining != 1:
        raise mismatch
    return from_json(spec, dims, len(values), values)
