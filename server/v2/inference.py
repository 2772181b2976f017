"""Inference: the Service that answers `infer` and `predict` on the fast lane, and the sink of their requests.

`claim` finds the route once per head, `begin` decodes and submits, `deliver` encodes and writes all answers of a batch.
For a plain request nothing here logs, starts a task or touches a metric.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.answering import (
    LARGE_BYTES,
    LargeJsonReader,
    answer_compressed,
    clear_task,
    internal_error,
    off_loop,
    start_task,
)
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_line
from penstock.server.http.coding import decompress, decompress_small
from penstock.server.http.head import HttpError
from penstock.server.listening.mapped_buffer import LargeAnswerEncoder
from penstock.server.restricted import RestrictedApis

from .call_parameters import Options, PerOutputPlan
from .claims import (
    InferenceClaim,
    ModelRoute,
    invalid_header,
    is_large,
    is_slow_to_read,
    json_size,
    may_answer_large,
    path_version,
)
from .decode import decode, decode_and_cache, decode_raw
from .encode import Encoder, encode_hook_outputs, encode_outputs
from .forwarding import Forwarding
from .layout import Layouts
from .predictions import Predictions
from .regions import INLINE_BYTES, InlineRegions, LargeRead, Regions
from .requested_outputs import select_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.server.engines import ServingEngine
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.limits import Limits
    from penstock.server.listening.mapped_buffer import Body

    from .call_parameters import Plan


# a target in absolute form has scheme and host before its path (RFC 9112, 3.2.2)
_PATH = re.compile(rb"(?:(?i:https?)://[^/]*)?/v2/models/([^/]+)(?:/versions/([0-9]+))?/(infer|predict)\Z")
_DECOUPLED_TEXT = "HTTP end point doesn't support models with decoupled transaction policy"


class Inference:
    """Answers inference for one server.

    Threads: the event loop's, except for decoding large JSON or shared memory, and encoding and compressing large
    answers.
    """

    def __init__(
        self, engine: ServingEngine, limits: Limits, hooks_of: Callable[[Model], Hooks], regions: Regions | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._limits = limits
        self._hooks_of = hooks_of
        self._regions = Regions() if regions is None else regions
        self._forwarding = forwarding
        self._texts, self._answers = LargeJsonReader(), LargeAnswerEncoder()
        self._predictions = Predictions(limits, hooks_of, self._texts, self._answer_body, self.answer_error)
        self._routes: dict[tuple[str, str], ModelRoute] = {}
        self.restricted = RestrictedApis()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> InferenceClaim | None:
        """Claim `POST .../infer` and `POST .../predict`."""
        match = _PATH.match(head.path) if head.method == b"POST" else None
        if match is None:
            return None
        self.restricted.require("inference", head.header)
        name = unquote_to_bytes(match[1]).decode("utf-8", "replace")
        version = path_version(match[2])
        route = self._routes.get((name, version)) or ModelRoute(name, version)
        return InferenceClaim(route, head, self._forwarding, predict=match[3] == b"predict")

    def early_rejection(self, head: Head) -> InferError | None:
        """Return the error of a request that would be rejected whatever its body, which then need not be kept."""
        route = head.route.route
        # another model may have the name by now, and its queue is the one that matters
        model = route.model if route.generation == self._engine.generation else None
        return None if model is None else self._engine.early_rejection(model)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Decode and submit one request, or answer with its error."""
        claim: InferenceClaim = head.route
        route = claim.route
        try:
            if route.generation != self._engine.generation:
                self._resolve(route)
            model: Model = route.model  # type: ignore[assignment]  # set by _resolve
            if not model.collects_arrivals and (model.scheduler.is_full() or model.scheduler.target_ns):
                rejection = self._engine.early_rejection(model)
                if rejection is not None:
                    raise rejection
            if not claim.is_simple or route.needs_task or (len(body) >= LARGE_BYTES and is_slow_to_read(claim, body)):
                self._begin_task(connection, claim, model, body)
                return
            decoded = route.layouts.find(model, body, claim.header_bytes, self)
            if decoded is None:
                if claim.header_bytes > len(body):
                    self._begin_task(connection, claim, model, body)
                    return
                depth = self._limits.max_json_depth
                decoded = decode_and_cache(model, body, claim.header_bytes, depth, self, route.layouts)
            self._submit(connection, decoded[0], decoded[1])
        except LargeRead:
            self._begin_task(connection, claim, route.model, body)  # type: ignore[arg-type]
        except InferError as error:
            self.answer_error(connection, error)
        except Exception as error:  # noqa: BLE001 - as in _run
            self.answer_error(connection, internal_error(error, route.name, claim.request_id))

    def abandon(self, connection: Connection) -> None:
        """Cancel the request of a disconnected client, and release its shared memory."""
        connection.plan = None
        if connection.request is not None:
            self._engine.cancel(connection.request)
        if connection.task is not None:
            connection.task.cancel()

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Encode and write the answers of one batch."""
        for request in requests:
            connection: FastLane = request.context
            if connection.request is not request:
                continue
            connection.request = None
            head = connection.head
            error = request.error
            if error is not None or head is None:
                connection.plan = None
                self.answer_error(connection, error or InferError(Code.INTERNAL, "request without a head"))
                continue
            claim: InferenceClaim = head.route
            try:
                route = claim.route
                # the route may lead to another version by now than the one that ran
                encoder = (route.encoder if route.model is request.model else None) or self._encoder(request.model)
                if connection.plan is None and not claim.answer_coding and not claim.route.may_answer_large:
                    connection.answer_ok(
                        encoder.encode_json(request.id, request.output_positions, request.outputs or [])
                    )
                else:
                    self._answer_outputs(connection, claim, encoder, request)
            except InferError as failed:
                self.answer_error(connection, failed)
            except Exception as failed:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
                self.answer_error(connection, internal_error(failed, request.model.name, request.id))

    # -- steps -------------------------------------------------------------------------------------------------

    def _resolve(self, route: ModelRoute) -> None:
        model = self._engine.model(route.name, route.version)
        route.model = model
        route.has_strings = any(spec.datatype == "BYTES" for spec in model.signature.inputs)
        max_copy_bytes = LARGE_BYTES if route.has_strings else INLINE_BYTES
        route.layouts = Layouts(InlineRegions(self._regions, max_copy_bytes))
        route.may_answer_large = may_answer_large(model)
        route.encoder = self._encoder(model)
        hooks = self._hooks_of(model)
        route.needs_task = hooks.has_pre or hooks.has_post or model.spec.decoupled
        route.decoupled = model.spec.decoupled
        route.generation = self._engine.generation
        # only paths of existing models are kept, so that scanning names does not fill memory
        self._routes[route.name, route.version] = route

    @staticmethod
    def _encoder(model: Model) -> Encoder:
        outputs = [(output.name, output.datatype) for output in model.signature.outputs]
        return Encoder(model.name, model.version, outputs)

    def _submit(self, connection: FastLane, request: InferRequest, options: Options) -> None:
        if options.affects_request or request.model.has_default_timeout:
            options.apply_to(request)
        request.context = connection
        connection.plan = options.plan
        connection.request = request
        try:
            submit = self._engine.submit_soon  # as a direct call it would first be looked up as a method
            submit(request)
        except InferError:
            connection.request = connection.plan = None
            raise

    def _answer_outputs(
        self, connection: FastLane, claim: InferenceClaim, encoder: Encoder, request: InferRequest
    ) -> None:
        plan, outputs = connection.plan, request.outputs or []
        if (claim.route.may_answer_large or type(plan) is PerOutputPlan) and is_large(plan, outputs):
            work = self._answer_on_thread(connection, claim, encoder, request, plan)
            connection.task = asyncio.get_running_loop().create_task(work)
        elif type(plan) is PerOutputPlan or type(outputs) is CustomOutputs:
            self._answer_body(connection, claim, *encode_outputs(encoder, request, plan, large=False))
        elif plan is None and not claim.answer_coding:
            connection.answer_ok(encoder.encode_json(request.id, request.output_positions, outputs))
        else:
            self._answer_body(
                connection, claim, *encoder.encode_mixed(request.id, request.output_positions, plan, outputs)
            )

    async def _answer_on_thread(
        self, connection: FastLane, claim: InferenceClaim, encoder: Encoder, request: InferRequest, plan: Plan
    ) -> None:
        """Answer with what a thread has encoded."""
        try:
            size = json_size(plan, request.outputs or [])
            encode = partial(encode_outputs, encoder, request, plan, large=True)
            body, json_bytes = await self._answers.encode(size, encode)
            self._answer_body(connection, claim, body, json_bytes)
        except InferError as error:
            self.answer_error(connection, error)
        except Exception as error:  # noqa: BLE001 - as in _run
            self.answer_error(connection, internal_error(error, request.model.name, request.id))
        finally:
            clear_task(connection)

    def _answer_body(self, connection: FastLane, claim: InferenceClaim, body: Body, json_bytes: int) -> None:
        if not claim.answer_coding:
            connection.answer_ok(body, json_bytes)
            return
        content_type = b"application/octet-stream" if json_bytes else b"application/json"
        extra = b"inference-header-content-length: %d\r\n" % json_bytes if json_bytes else b""
        answer_compressed(connection, body, content_type, extra, claim.answer_coding)

    @staticmethod
    def answer_error(connection: FastLane, error: InferError) -> None:
        """Answer with an error."""
        body, retry_after = error_body(without_traceback(error).message), retry_after_line(error)
        connection.answer(HTTP_STATUS[error.code], body, b"application/json", retry_after)

    # -- calls that take more than one step --------------------------------------------------------------------

    def _begin_task(self, connection: FastLane, claim: InferenceClaim, model: Model, body: bytes) -> None:
        if not claim.is_predict or not self._predictions.begin(connection, claim, model, body):
            start_task(connection, self._engine, model, self._run(connection, claim, model, body))

    async def _run(self, connection: FastLane, claim: InferenceClaim, model: Model, body: bytes) -> None:
        request_id = claim.request_id
        try:
            if claim.route.decoupled and not claim.is_predict:
                raise InferError(Code.UNSUPPORTED, _DECOUPLED_TEXT)
            if claim.is_predict:
                await self._predictions.run(connection, claim, model, body)
                return
            request, options = await self._decode(claim, model, body)
            if claim.forwarded:
                options = replace(options, parameters={**(options.parameters or {}), **claim.forwarded})
            request_id = request.id or request_id
            if claim.route.needs_task and options.hooks:
                await self._infer_with_hooks(connection, claim, request, options)
            else:
                self._submit(connection, request, options)
        except HttpError as error:
            extra = b"accept-encoding: gzip, deflate\r\n" if error.status == 501 else b""
            connection.answer(error.status, error_body(error.text), b"application/json", extra)
        except InferError as error:
            self.answer_error(connection, error)
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client always gets an answer
            self.answer_error(connection, internal_error(error, model.name, request_id))
        finally:
            clear_task(connection)

    async def _decode(self, claim: InferenceClaim, model: Model, body: bytes) -> tuple[InferRequest, Options]:
        """Decode inline, or on a thread if that would block the event loop."""
        if claim.error is not None:
            raise claim.error
        if claim.coding:
            decompressed = decompress_small(body, claim.coding, self._limits, LARGE_BYTES - 1)
            if decompressed is None:
                json_bytes = claim.header_bytes if claim.header_text else None
                return await self._texts.read(json_bytes, self._decompress_and_decode, claim, model, body)
            body = decompressed
        if claim.header_text and not 0 <= claim.header_bytes <= len(body):
            raise invalid_header(claim, body)
        if claim.header_text and not claim.header_bytes:
            return await off_loop(len(body) if claim.route.has_strings else 0, decode_raw, model, body, self)
        depth, header_bytes = self._limits.max_json_depth, claim.header_bytes
        if not is_slow_to_read(claim, body):
            try:
                return decode(model, body, header_bytes, depth, self, claim.route.layouts.regions)
            except LargeRead:
                pass
        work = partial(decode, model, body, header_bytes, depth, self, self._regions)
        return await self._texts.read(len(body) if header_bytes < 0 else header_bytes, work)

    def _decompress_and_decode(self, claim: InferenceClaim, model: Model, body: bytes) -> tuple[InferRequest, Options]:
        """Decompress and decode. Called on a thread."""
        body = decompress(body, claim.coding, self._limits)
        if claim.header_text and not 0 <= claim.header_bytes <= len(body):
            raise invalid_header(claim, body)
        if claim.header_text and not claim.header_bytes:
            return decode_raw(model, body, self)
        return decode(model, body, claim.header_bytes, self._limits.max_json_depth, self, self._regions)

    async def _infer_with_hooks(
        self, connection: FastLane, claim: InferenceClaim, request: InferRequest, options: Options
    ) -> None:
        model = request.model
        names = [spec.name for spec in model.signature.inputs]
        sample = {name: array for name, array in zip(names, request.inputs, strict=True) if array is not None}
        terms = options.terms(time.monotonic_ns(), model.spec.policy)
        request_id = request.id or claim.request_id
        outputs = await self._hooks_of(model).infer(sample, request_id, terms, options.parameters)
        modes = select_outputs(request, options.plan, outputs)
        plan, arrays = PerOutputPlan(tuple(modes.values())), [outputs[name] for name in modes]
        route = claim.route
        encoder = (route.encoder if route.model is model else None) or self._encoder(model)
        if is_large(plan, arrays):
            encode = partial(encode_hook_outputs, encoder, request, modes, outputs, large=True)
            body, json_bytes = await self._answers.encode(json_size(plan, arrays), encode)
        else:
            body, json_bytes = encode_hook_outputs(encoder, request, modes, outputs, large=False)
        self._answer_body(connection, claim, body, json_bytes)
