"""Inference over gRPC: from the bytes of a ModelInferRequest to an InferRequest, and from outputs to bytes.

Used by `infer.py` (one answer per call) and `stream.py` (many). A typical request is decoded by comparing it with
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
from penstock.batching.running.own_outputs import OwnOutputs
from penstock.server.listening.mapped_buffer import LargeAnswerEncoder
from penstock.server.protobuf import service_pb2
from penstock.server.v2.call_parameters import Options, PerOutputPlan, version_of
from penstock.server.v2.finish import finish_all
from penstock.server.v2.regions import INLINE_BYTES, InlineRegions, Regions

from .calls import parsed, parsed_tensors
from .decode import decode
from .encode import FINAL, MORE, LargeAnswer, RpcEncoder, before, encode_own, said_of, stream_answer, stream_answer_of
from .layout import RpcLayouts, head_of, names_of
from .outputs import Outputs, is_large

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Sink, Terms
    from penstock.server.engines import ServingEngine
    from penstock.server.hooks.runner import Hooks
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.forwarding import Forwarding

LARGE_BYTES = 256 << 10
"""A message of at least this size that is not remembered is decoded on a thread."""
_KEPT_ROUTES = 4096
_SEVERAL = "ModelInfer RPC doesn't support models with decoupled transaction policy"
Failed = tuple[InferError, bytes]
"""Why one of several answers failed, and the mark that says whether it is the last."""


class RpcModelRoute:
    """One model as named in requests; dropped when the Engine's generation changes.

    `straight`: its requests go to the queue and get one answer, without hooks. `told`: forwarded header fields are
    passed to the model.
    """

    __slots__ = ("encoder", "hooked", "layouts", "model", "regions", "straight", "streams", "told")

    def __init__(self, model: Model, regions: InlineRegions, *, hooked: bool, forwards: bool) -> None:
        self.model = model
        self.encoder = RpcEncoder(model.name, model.version, model.signature, own=model.spec.takes_parameters)
        self.layouts = RpcLayouts(regions)
        self.hooked = hooked
        self.streams = model.spec.streams
        self.told = forwards and model.spec.takes_parameters
        self.straight = not (hooked or model.spec.decoupled or self.told)
        self.regions = regions

    def encoding(self, options: Options) -> RpcEncoder | Planned:
        """Return the encoding of a request's answer."""
        plan = options.plan
        return Planned(self.encoder, plan) if type(plan) is PerOutputPlan else self.encoder


class Planned:
    """The context of a request whose outputs are not all returned as they are."""

    __slots__ = ("encoder", "plan")

    def __init__(self, encoder: RpcEncoder, plan: PerOutputPlan) -> None:
        self.encoder = encoder
        self.plan = plan


class DecodedRequest:
    """One decoded request. `hooked`: it passes through hooks; `several`: it may have any number of answers."""

    __slots__ = ("encoding", "hooked", "options", "request", "route", "several")

    def __init__(self, route: RpcModelRoute, request: InferRequest, options: Options) -> None:
        self.route = route
        self.request = request
        self.options = options
        self.hooked = route.streams or (route.hooked and options.hooks)
        self.several = route.model.spec.decoupled
        self.encoding = route.encoding(options)


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
        self._forwarded: Any = None
        self._kind = service_pb2().ModelInferRequest
        self._generation = -1
        self._routes: dict[bytes, RpcModelRoute] = {}
        self._by_name: dict[tuple[str, str], RpcModelRoute] = {}

    # -- decoding ----------------------------------------------------------------------------------------------

    def find(self, message: bytes, sink: Sink) -> tuple[RpcModelRoute, InferRequest, Options] | None:
        """Decode a message of a remembered layout; None if it is not remembered.

        Raises: InferError (OVERLOADED).
        """
        if self._generation != self.engine.generation:
            self._forget()
        try:
            named, start, request_id = head_of(message)
        except (IndexError, UnicodeDecodeError):
            return None
        route = self._routes.get(message[:named])
        if route is None:
            return None
        model = route.model
        if (not model.gathers and model.scheduler.full()) or model.scheduler.target_ns:
            self._knock(model)
        found = route.layouts.find(model, message, start, request_id, sink)
        return None if found is None else (route, found[0], found[1])

    def decode(self, message: bytes, sink: Sink, *, one: bool = False) -> DecodedRequest:
        """Decode any message, and remember it; `one`: it must have just one answer. Raises: InferError; LargeRead."""
        request = parsed(self._kind, message)
        route = self._route(request)
        if one:
            self.demand_one(route.model)
        return self._decoded(route, message, request, decode(route.model, request, sink, route.regions))

    async def decode_slowly(self, message: bytes, sink: Sink, *, one: bool = False) -> DecodedRequest:
        """Decode on a thread. The result must be submitted before the loop's next turn. Raises: InferError."""
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(None, parsed_tensors, self._kind, message)
        route = self._route(request)
        if one:
            self.demand_one(route.model)
        self.engine.hold(route.model)
        try:
            found = await loop.run_in_executor(None, decode, route.model, request, sink, self._regions)
        finally:
            loop.call_soon(self.engine.release, route.model)
        return self._decoded(route, message, request, found)

    def may_be_ordered(self, message: bytes) -> bool:
        """Return whether a message not yet decoded may belong to a sequence, whose order must be kept."""
        try:
            route = self._routes.get(message[: head_of(message)[0]])
        except (IndexError, UnicodeDecodeError):
            return True
        return route is None or route.model.spec.sequence is not None

    @staticmethod
    def demand_one(model: Model) -> None:
        """Reject a model that may give several answers. Raises: InferError (UNSUPPORTED)."""
        if model.spec.decoupled:
            raise InferError(Code.UNSUPPORTED, _SEVERAL)

    def id_of(self, message: bytes) -> str:
        """Return a request's id; for a large one only if it precedes the tensors. Raises: InferError (INVALID)."""
        if len(message) < LARGE_BYTES:
            return str(parsed(self._kind, message).id)
        try:
            return head_of(message)[2]
        except (IndexError, UnicodeDecodeError):
            return ""

    def _decoded(
        self, route: RpcModelRoute, message: bytes, parsed_message: Any, found: tuple[InferRequest, Options]
    ) -> DecodedRequest:
        request, options = found
        request.nbytes += len(message)
        try:
            named, start, _ = head_of(message)
        except (IndexError, UnicodeDecodeError):
            return DecodedRequest(route, *found)
        if self._generation == self.engine.generation:
            route.layouts.remember(request, options, message, start, parsed_message)
            names = message[:named]
            # if a name is repeated the last one counts: only a message with exactly these fields identifies the model
            if names not in self._routes and names == names_of(parsed_message) and len(self._routes) < _KEPT_ROUTES:
                self._routes[names] = route
        return DecodedRequest(route, *found)

    def _route(self, request: Any) -> RpcModelRoute:
        """Return the route of a request's model. Raises: InferError (NOT_FOUND, INVALID, OVERLOADED)."""
        if self._generation != self.engine.generation:
            self._forget()
        name = (request.model_name, version_of(request.model_version))
        route = self._by_name.get(name)
        if route is None:
            model = self.engine.model(*name)
            hooks = self._hooks_of(model)
            most = LARGE_BYTES if any(spec.datatype == "BYTES" for spec in model.signature.inputs) else INLINE_BYTES
            regions = InlineRegions(self._regions, most)
            hooked, forwards = hooks.has_pre or hooks.has_post, self.forwarding is not None
            route = self._by_name[name] = RpcModelRoute(model, regions, hooked=hooked, forwards=forwards)
        self._knock(route.model)
        return route

    def _knock(self, model: Model) -> None:
        """Reject a request that need not be decoded at all. Raises: InferError (OVERLOADED)."""
        refusal = self.engine.turn_away(model)
        if refusal is not None:
            raise refusal

    def _forget(self) -> None:
        self._routes.clear()
        self._by_name.clear()
        self._generation = self.engine.generation

    def check_forwarded(self, metadata: Mapping[str, str]) -> None:
        """Check the forwarded header fields. Raises: InferError (INVALID).

        ONNX Runtime models read none, so without hooks the check is all that is needed.
        """
        if self.forwarding is not None and metadata is not self._forwarded:
            self.forwarding.parameters_of(metadata)
            self._forwarded = metadata

    # -- passing requests --------------------------------------------------------------------------------------

    def options_of(self, asked: DecodedRequest, metadata: Mapping[str, str]) -> Options:
        """Return a request's options, plus the header fields forwarded to user code. Raises: InferError."""
        if not asked.route.told or self.forwarding is None:
            return asked.options
        parameters = {**(asked.options.parameters or {}), **self.forwarding.parameters_of(metadata)}
        return replace(asked.options, parameters=parameters)

    def submit(self, request: InferRequest, options: Options, context: Any) -> None:
        """Put a request in its queue; it is delivered to its sink with its context. Raises: InferError."""
        if options.urgent or request.model.timed:
            options.impose(request)
        request.context = context
        submit = self.engine.submit_soon  # as a direct call it would first be looked up as a method
        submit(request)

    def hold(self, model: Model, task: asyncio.Task[None]) -> None:
        """Keep a Model from being retired until a task that will use it has ended, even if the task never begins."""
        self.engine.hold(model)
        task.add_done_callback(lambda _: self.engine.release(model))

    async def pass_hooks(self, asked: DecodedRequest, metadata: Mapping[str, str], mark: bytes) -> Body:
        """Pass a request through the hooks and the model. Returns: the answer, with `mark`. Raises: InferError."""
        try:
            outputs = await self._hooks_of(asked.request.model).infer(*self._said(asked, metadata))
            said = getattr(outputs, "parameters", None)
            return await self._encoded(asked, self._outputs(asked), outputs, mark, said)
        finally:
            _release(asked.options)

    async def answers(self, asked: DecodedRequest, metadata: Mapping[str, str]) -> AsyncGenerator[Body | Failed, None]:
        """Pass a request through the hooks and the model, and yield each answer for a stream, or why it failed.

        An empty final answer follows if it was requested and no answer was marked as final. A consumer that stops early
        must close the generator.
        Raises: InferError.
        """
        request, final, written = asked.request, False, self._outputs(asked)
        try:
            stream = self._hooks_of(request.model).stream(*self._said(asked, metadata), request.wanted)
            async with aclosing(stream) as answers:
                async for answer in answers:
                    final, mark = answer.final, FINAL if answer.final else MORE
                    if answer.error is not None:
                        yield answer.error, mark
                    else:
                        yield await self._encoded(asked, written, answer.outputs, mark, answer.parameters)
            if asked.options.empty_final and not final:
                yield stream_answer(asked.route.encoder.empty(before(request.id, FINAL)))
        finally:
            _release(asked.options)

    def _said(
        self, asked: DecodedRequest, metadata: Mapping[str, str]
    ) -> tuple[dict[str, Array], str, Terms, Mapping[str, Any] | None]:
        """Return the arguments for hooks: tensors by name, id, queueing terms and parameters."""
        request, options, model = asked.request, asked.options, asked.request.model
        names = [spec.name for spec in model.signature.inputs]
        sample = {name: array for name, array in zip(names, request.inputs, strict=True) if array is not None}
        parameters = options.parameters
        if self.forwarding is not None:
            parameters = {**(parameters or {}), **self.forwarding.parameters_of(metadata)}
        request_id = request.id or metadata.get("x-request-id", "")[:128]
        return sample, request_id, options.terms(time.monotonic_ns(), model.spec.policy), parameters

    @staticmethod
    def _outputs(asked: DecodedRequest) -> Outputs:
        return Outputs(asked.route.encoder, asked.request, asked.options.plan)

    async def _encoded(
        self, asked: DecodedRequest, written: Outputs, outputs: Mapping[str, Array], mark: bytes,
        said: Mapping[str, Any] | None,
    ) -> Body:  # fmt: skip
        encode = partial(written.encode, outputs, before(asked.request.id, mark + said_of(said)))
        if mark:
            encode = partial(stream_answer_of, encode)
        return await self.large.encode(0, encode) if written.take(outputs) else encode()

    # -- encoding ----------------------------------------------------------------------------------------------

    @staticmethod
    def encode(encoding: RpcEncoder | Planned, request: InferRequest, mark: bytes) -> Body:
        """Encode a delivered request's outputs. Raises: InferError; LargeAnswer."""
        outputs = request.outputs or []
        between = before(request.id, mark)
        encoder, plan = (encoding.encoder, encoding.plan) if isinstance(encoding, Planned) else (encoding, None)
        if type(outputs) is OwnOutputs:
            encode = partial(encode_own, encoder, plan, request, between)
        elif plan is not None:
            encode = partial(_encode_planned, encoder, plan, request, between)
        else:
            return encoder.plain(request.wanted, outputs, between)
        if is_large(plan, outputs):
            raise LargeAnswer(encode)
        return encode()


def _encode_planned(encoder: RpcEncoder, plan: PerOutputPlan, request: InferRequest, between: bytes) -> Body:
    if plan.stored:
        return encoder.stored(request, plan, between)
    return encoder.finished(finish_all(request.model, request.wanted, plan, request.outputs or []), between)


def _release(options: Options) -> None:
    """Release the shared memory of a request's outputs."""
    if isinstance(options.plan, PerOutputPlan):
        options.plan.release()
