"""ModelInfer: one message in, one answer out. Called by the gRPC lane; also the sink of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.backends.errors import InferError
from penstock.server.v2.regions import LargeRead

from .calls import Tasks, abort, client_error
from .encode import LargeAnswer, RpcEncoder
from .inference import LARGE_BYTES, RpcInference
from .model_route import DecodedRequest

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.server.grpc.method import Call
    from penstock.server.listening.mapped_buffer import Body


class ModelInfer:
    """The RPC. A call's `context` is the encoding of its answer; its deadline is the request's target."""

    def __init__(self, inference: RpcInference, tasks: Tasks) -> None:
        self._inference = inference
        self._tasks = tasks
        self._cancel = inference.engine.cancel

    def begin(self, call: Call, message: bytes) -> None:
        """Decode and submit a request. Raises: InferError."""
        inference = self._inference
        if inference.forwarding is not None:
            inference.check_forwarded(call.metadata)
        found = inference.find(message, self)
        if found is not None:
            route, request, options = found
            if route.direct:
                call.context = route.encoder if options.plan is None else route.encoding(options)
                request.target_ns = call.deadline_ns
                call.on_cancel = partial(self._cancel, request)
                inference.submit(request, options, call)
                return
            decoded = DecodedRequest(*found)
            inference.reject_decoupled(route.model)
        elif len(message) >= LARGE_BYTES:
            self._tasks.start(call, partial(self._begin_on_thread, call, message), "ModelInfer")
            return
        else:
            try:
                decoded = inference.decode(message, self, single_answer=True)
            except LargeRead:
                self._tasks.start(call, partial(self._begin_on_thread, call, message), "ModelInfer")
                return
        if decoded.hooked:
            task = self._tasks.start(call, partial(self._run_hooks, call, decoded), "ModelInfer")
            inference.hold(decoded.route.model, task)
        else:
            self._submit(call, decoded)

    def _submit(self, call: Call, decoded: DecodedRequest) -> None:
        call.context = decoded.encoding
        decoded.request.target_ns = call.deadline_ns
        call.on_cancel = partial(self._cancel, decoded.request)
        self._inference.submit(decoded.request, self._inference.options_of(decoded, call.metadata), call)

    async def _begin_on_thread(self, call: Call, message: bytes) -> None:
        decoded = await self._inference.decode_on_thread(message, self, single_answer=True)
        if decoded.hooked:
            await self._run_hooks(call, decoded)
        elif not call.ended:
            self._submit(call, decoded)

    async def _run_hooks(self, call: Call, decoded: DecodedRequest) -> None:
        call.answer(await self._inference.run_hooks(decoded, call.metadata, b""))

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Encode and send the answers of one batch."""
        for request in requests:
            call: Call = request.context
            # break the reference cycle between the call and its cancellation
            call.on_cancel = None
            try:
                if request.error is not None:
                    abort(call, request.error)
                    continue
                encoding = call.context
                if type(encoding) is RpcEncoder and not (request.id or encoding.has_own_outputs):
                    call.answer(encoding.encode_plain(request.output_positions, request.outputs or []))
                elif not call.ended:  # a client whose call has timed out may be reusing its shared memory
                    call.answer(self._inference.encode(encoding, request, b""))
            except LargeAnswer as large:
                self._tasks.start(call, partial(self._answer_on_thread, call, large.encode), "ModelInfer")
            except InferError as error:
                abort(call, error)
            except Exception as error:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
                abort(call, client_error(error, "ModelInfer", request.id))

    async def _answer_on_thread(self, call: Call, encode: Callable[[], Body]) -> None:
        call.answer(await self._inference.large.encode(0, encode))
