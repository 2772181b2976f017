"""Inference over gRPC: from the bytes of a ModelInferRequest to an InferRequest, and from outputs to bytes.

Used by `model_infer.py` (one answer per call) and `stream.py` (many). A typical request is decoded by comparing it with
remembered ones; for it, nothing here logs, starts a task or makes a protobuf object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.listening.mapped_buffer import LargeAnswerEncoder
from penstock.server.protobuf import service_pb2
from penstock.server.v2.call_parameters import Options, PerOutputPlan, parse_version
from penstock.server.v2.regions import INLINE_BYTES, InlineRegions, Regions

from .calls import parse_message, parse_tensors
from .decode import decode
from .encode import (
    FINAL,
    MORE,
    LargeAnswer,
    RpcEncoder,
    encode_id_and_mark,
    encode_outputs,
    encode_parameters,
    encode_stream_answer,
    stream_answer,
)
from .layout import encode_names, read_head
from .model_route import DecodedRequest, PlannedEncoding, RpcModelRoute
from .outputs import OutputEncoder, is_large

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, RequestOptions, Sink
    from penstock.server.engines import ServingEngine
    from penstock.server.hooks.runner import Hooks
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.forwarding import Forwarding

LARGE_BYTES = 256 << 10
"""A message of at least this size that is not remembered is decoded on a thread."""
_MAX_CACHED_ROUTES = 4096
_DECOUPLED_TEXT = "ModelInfer RPC doesn't support models with decoupled transaction policy"
FailedAnswer = tuple[InferError, bytes]
"""Why one of several answers failed, and the mark that says whether it is the last."""


class RpcInference:
    """Decodes and encodes for one server; `large` are the threads for large answers.

    Threads: the event loop's, except for decoding large messages and shared memory, and encoding large answers.
    """

    def __init__(
        self, engine: ServingEngine, hooks_of: Callable[[Model], Hooks], regions: Regions | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._hooks_of = hooks_of
        self._regions = Regions() if regions is None else regions
        self.forwarding = forwarding
        self.large = LargeAnswerEncoder()
        self._checked_metadata: Any = None
        self._message_class = service_pb2().ModelInferRequest
        self._generation = -1
        self._routes: dict[bytes, RpcModelRoute] = {}
        self._by_name: dict[tuple[str, str], RpcModelRoute] = {}

    # -- decoding ----------------------------------------------------------------------------------------------

    def find(self, message: bytes, sink: Sink) -> tuple[RpcModelRoute, InferRequest, Options] | None:
        """Decode a message of a remembered layout; None if it is not remembered.

        Raises: InferError (OVERLOADED).
        """
        if self._generation != self.engine.generation:
            self._clear_routes()
        try:
            names_end, start, request_id = read_head(message)
        except (IndexError, UnicodeDecodeError):
            return None
        route = self._routes.get(message[:names_end])
        if route is None:
            return None
        model = route.model
        if (not model.collects_arrivals and model.scheduler.is_full()) or model.scheduler.target_ns:
            self._check_admission(model)
        found = route.layouts.find(model, message, start, request_id, sink)
        return None if found is None else (route, found[0], found[1])

    def decode(self, message: bytes, sink: Sink, *, single_answer: bool = False) -> DecodedRequest:
        """Decode and remember any message; `single_answer` rejects decoupled models. Raises: InferError; LargeRead."""
        parsed_message = parse_message(self._message_class, message)
        route = self._route(parsed_message)
        if single_answer:
            self.reject_decoupled(route.model)
        decoded = decode(route.model, parsed_message, sink, route.regions)
        return self._build_decoded(route, message, parsed_message, decoded)

    async def decode_on_thread(self, message: bytes, sink: Sink, *, single_answer: bool = False) -> DecodedRequest:
        """Decode on a thread. The result must be submitted before the loop's next turn. Raises: InferError."""
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(None, parse_tensors, self._message_class, message)
        route = self._route(request)
        if single_answer:
            self.reject_decoupled(route.model)
        self.engine.hold(route.model)
        try:
            decoded = await loop.run_in_executor(None, decode, route.model, request, sink, self._regions)
        finally:
            loop.call_soon(self.engine.release, route.model)
        return self._build_decoded(route, message, request, decoded)

    def may_be_in_sequence(self, message: bytes) -> bool:
        """Return whether a message not yet decoded may belong to a sequence, whose order must be kept."""
        try:
            route = self._routes.get(message[: read_head(message)[0]])
        except (IndexError, UnicodeDecodeError):
            return True
        return route is None or route.model.spec.sequence is not None

    @staticmethod
    def reject_decoupled(model: Model) -> None:
        """Reject a model that may give several answers. Raises: InferError (UNSUPPORTED)."""
        if model.spec.decoupled:
            raise InferError(Code.UNSUPPORTED, _DECOUPLED_TEXT)

    def id_of(self, message: bytes) -> str:
        """Return a request's id; for a large one only if it precedes the tensors. Raises: InferError (INVALID)."""
        if len(message) < LARGE_BYTES:
            return str(parse_message(self._message_class, message).id)
        try:
            return read_head(message)[2]
        except (IndexError, UnicodeDecodeError):
            return ""

    def _build_decoded(
        self, route: RpcModelRoute, message: bytes, parsed_message: Any, decoded: tuple[InferRequest, Options]
    ) -> DecodedRequest:
        request, options = decoded
        request.nbytes += len(message)
        try:
            names_end, start, _ = read_head(message)
        except (IndexError, UnicodeDecodeError):
            return DecodedRequest(route, *decoded)
        if self._generation == self.engine.generation:
            route.layouts.add(request, options, message, start, parsed_message)
            names = message[:names_end]
            # if a name is repeated the last one counts: only a message with exactly these fields identifies the model
            if (
                names not in self._routes
                and names == encode_names(parsed_message)
                and len(self._routes) < _MAX_CACHED_ROUTES
            ):
                self._routes[names] = route
        return DecodedRequest(route, *decoded)

    def _route(self, request: Any) -> RpcModelRoute:
        """Return the route of a request's model. Raises: InferError (NOT_FOUND, INVALID, OVERLOADED)."""
        if self._generation != self.engine.generation:
            self._clear_routes()
        name = (request.model_name, parse_version(request.model_version))
        route = self._by_name.get(name)
        if route is None:
            model = self.engine.model(*name)
            hooks = self._hooks_of(model)
            max_copy_bytes = (
                LARGE_BYTES if any(spec.datatype == "BYTES" for spec in model.signature.inputs) else INLINE_BYTES
            )
            regions = InlineRegions(self._regions, max_copy_bytes)
            hooked, forwards = hooks.has_pre or hooks.has_post, self.forwarding is not None
            route = self._by_name[name] = RpcModelRoute(model, regions, hooked=hooked, forwards=forwards)
        self._check_admission(route.model)
        return route

    def _check_admission(self, model: Model) -> None:
        """Reject a request that need not be decoded at all. Raises: InferError (OVERLOADED)."""
        error = self.engine.early_rejection(model)
        if error is not None:
            raise error

    def _clear_routes(self) -> None:
        self._routes.clear()
        self._by_name.clear()
        self._generation = self.engine.generation

    def check_forwarded(self, metadata: Mapping[str, str]) -> None:
        """Check the forwarded header fields. Raises: InferError (INVALID).

        ONNX Runtime models read none, so without hooks the check is all that is needed.
        """
        if self.forwarding is not None and metadata is not self._checked_metadata:
            self.forwarding.from_metadata(metadata)
            self._checked_metadata = metadata

    # -- passing requests --------------------------------------------------------------------------------------

    def options_of(self, decoded: DecodedRequest, metadata: Mapping[str, str]) -> Options:
        """Return a request's options, plus the header fields forwarded to user code. Raises: InferError."""
        if not decoded.route.forwards_headers or self.forwarding is None:
            return decoded.options
        parameters = {**(decoded.options.parameters or {}), **self.forwarding.from_metadata(metadata)}
        return replace(decoded.options, parameters=parameters)

    def submit(self, request: InferRequest, options: Options, context: Any) -> None:
        """Put a request in its queue; it is delivered to its sink with its context. Raises: InferError."""
        if options.affects_request or request.model.has_default_timeout:
            options.apply_to(request)
        request.context = context
        submit = self.engine.submit_soon  # as a direct call it would first be looked up as a method
        submit(request)

    def hold(self, model: Model, task: asyncio.Task[None]) -> None:
        """Keep a Model from being retired until a task that will use it has ended, even if the task never begins."""
        self.engine.hold(model)
        task.add_done_callback(lambda _: self.engine.release(model))

    async def run_hooks(self, decoded: DecodedRequest, metadata: Mapping[str, str], mark: bytes) -> Body:
        """Pass a request through the hooks and the model. Returns: the answer, with `mark`. Raises: InferError."""
        try:
            outputs = await self._hooks_of(decoded.request.model).infer(*self._hook_arguments(decoded, metadata))
            parameters = getattr(outputs, "parameters", None)
            return await self._encode_answer(decoded, self._output_encoder(decoded), outputs, mark, parameters)
        finally:
            _release_leases(decoded.options)

    async def answers(
        self, decoded: DecodedRequest, metadata: Mapping[str, str]
    ) -> AsyncGenerator[Body | FailedAnswer, None]:
        """Pass a request through the hooks and the model, and yield each answer for a stream, or why it failed.

        An empty final answer follows if it was requested and no answer was marked as final. A consumer that stops early
        must close the generator.
        Raises: InferError.
        """
        request, final, output_encoder = decoded.request, False, self._output_encoder(decoded)
        try:
            stream = self._hooks_of(request.model).stream(
                *self._hook_arguments(decoded, metadata), request.output_positions
            )
            async with aclosing(stream) as answers:
                async for answer in answers:
                    final, mark = answer.final, FINAL if answer.final else MORE
                    if answer.error is not None:
                        yield answer.error, mark
                    else:
                        yield await self._encode_answer(
                            decoded, output_encoder, answer.outputs, mark, answer.parameters
                        )
            if decoded.options.empty_final and not final:
                yield stream_answer(decoded.route.encoder.encode_empty(encode_id_and_mark(request.id, FINAL)))
        finally:
            _release_leases(decoded.options)

    def _hook_arguments(
        self, decoded: DecodedRequest, metadata: Mapping[str, str]
    ) -> tuple[dict[str, Array], str, RequestOptions, Mapping[str, Any] | None]:
        """Return the arguments for hooks: tensors by name, id, queueing terms and parameters."""
        request, options, model = decoded.request, decoded.options, decoded.request.model
        names = [spec.name for spec in model.signature.inputs]
        sample = {name: array for name, array in zip(names, request.inputs, strict=True) if array is not None}
        parameters = options.parameters
        if self.forwarding is not None:
            parameters = {**(parameters or {}), **self.forwarding.from_metadata(metadata)}
        request_id = request.id or metadata.get("x-request-id", "")[:128]
        return sample, request_id, options.terms(time.monotonic_ns(), model.spec.policy), parameters

    @staticmethod
    def _output_encoder(decoded: DecodedRequest) -> OutputEncoder:
        return OutputEncoder(decoded.route.encoder, decoded.request, decoded.options.plan)

    async def _encode_answer(
        self, decoded: DecodedRequest, output_encoder: OutputEncoder, outputs: Mapping[str, Array], mark: bytes,
        parameters: Mapping[str, Any] | None,
    ) -> Body:  # fmt: skip
        encode = partial(
            output_encoder.encode, outputs, encode_id_and_mark(decoded.request.id, mark + encode_parameters(parameters))
        )
        if mark:
            encode = partial(encode_stream_answer, encode)
        return await self.large.encode(0, encode) if output_encoder.prepare(outputs) else encode()

    # -- encoding ----------------------------------------------------------------------------------------------

    @staticmethod
    def encode(encoding: RpcEncoder | PlannedEncoding, request: InferRequest, mark: bytes) -> Body:
        """Encode a delivered request's outputs. Raises: InferError; LargeAnswer."""
        outputs = request.outputs or []
        id_and_mark = encode_id_and_mark(request.id, mark)
        encoder, plan = (encoding.encoder, encoding.plan) if isinstance(encoding, PlannedEncoding) else (encoding, None)
        if plan is None and type(outputs) is not CustomOutputs:
            return encoder.encode_plain(request.output_positions, outputs, id_and_mark)
        encode = partial(encode_outputs, encoder, plan, request, id_and_mark)
        if is_large(plan, outputs):
            raise LargeAnswer(encode)
        return encode()


def _release_leases(options: Options) -> None:
    """Release the shared memory of a request's outputs."""
    if isinstance(options.plan, PerOutputPlan):
        options.plan.release()
