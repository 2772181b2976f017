"""ModelStreamInfer: requests in, answers out. Called by the gRPC lane.

Answers come in the order of the requests, except that answers of a decoupled model do not wait for other requests. An
invalid request is reported in its answer, and the stream continues; with the metadata `triton_grpc_error: true` the
stream ends with the error's status instead. Source: Triton server, stream_infer_handler.cc.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.errors import GRPC_STATUS, shorten
from penstock.server.grpc.method import Call, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import Health
from penstock.server.v2.regions import LargeRead

from .calls import client_error
from .encode import (
    FINAL,
    LargeAnswer,
    RpcEncoder,
    encode_id_and_mark,
    encode_stream_answer,
    stream_answer,
    stream_error,
)
from .inference import LARGE_BYTES, RpcInference
from .model_route import DecodedRequest
from .ticker import Ticker

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body

MAX_IN_FLIGHT = 4096
MAX_IN_FLIGHT_BYTES = 256 << 20
"""The most that one stream may have in flight: requests, and bytes of their messages. Others are rejected."""
MAX_ANSWERING = 256
"""The most requests to decoupled models per stream that produce answers at a time; further ones wait."""
ERROR_CLOSES_STREAM = "triton_grpc_error"


class ModelStreamInfer:
    """The RPC: opens streams, and is the sink of their requests."""

    def __init__(self, inference: RpcInference, health: Health, ticker: Ticker) -> None:
        self.inference = inference
        self.health = health
        self.ticker = ticker

    def open(self, call: Call) -> InferStream:
        """Open a stream. Raises: InferError."""
        self.inference.check_forwarded(call.metadata)
        return InferStream(self, call)

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Deliver the outputs of one batch."""
        for request in requests:
            slot: Slot = request.context
            slot.on_delivered(request)


class Slot:
    """One request's place in its stream. `answer` is sent after all earlier ones; it is b"" until known.

    `call` is the stream's. `empty_encoder`, set only for a decoupled model, encodes its empty answers.
    """

    __slots__ = ("answer", "empty_encoder", "encoding", "error", "id", "nbytes", "request", "stream", "task")

    def __init__(self, stream: InferStream, nbytes: int) -> None:
        self.stream = stream
        self.nbytes = nbytes
        self.id = ""
        self.answer: Body = b""
        self.error: InferError | None = None
        self.encoding: Any = None
        self.empty_encoder: RpcEncoder | None = None
        self.request: InferRequest | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def call(self) -> Call:
        """The call that the request came on."""
        return self.stream.call

    def on_delivered(self, request: InferRequest) -> None:
        """Encode the outputs of a delivered request."""
        self.request = None
        if self.stream.ended:
            return
        try:
            if request.error is not None:
                raise request.error
            self.answer = stream_answer(RpcInference.encode(self.encoding, request, FINAL))
        except LargeAnswer as large:
            self.start_task(partial(self._encode_on_thread, large.encode))
            return
        except Exception as error:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
            self.error = client_error(error, "ModelStreamInfer", self.id)
        self.stream.complete(self)

    def start_task(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do work that takes more than a moment on a task."""
        self.task = asyncio.get_running_loop().create_task(self._run_guarded(work))
        return self.task

    async def _run_guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client always gets an answer
            self.error = client_error(error, "ModelStreamInfer", self.id)
        self.task = None
        if self.request is None:
            self.stream.complete(self)

    async def _encode_on_thread(self, encode: Callable[[], Body]) -> None:
        self.answer = await self.stream.large.encode(0, encode_stream_answer, encode)

    @property
    def done(self) -> bool:
        """Whether there is an answer or an error to send."""
        return bool(self.answer) or self.error is not None


class InferStream:
    """One stream.

    Invariant: `_slots` are the unanswered requests, in order; answers are sent from the front. `_unordered` are
    requests to decoupled models, whose answers are sent as they come. `_waiting_messages` are messages that wait while
    an earlier one, possibly of the same sequence, is decoded on a thread (`_decoding`). `ended` is whether either side
    has ended the call. `large` encodes large answers.
    """

    def __init__(self, owner: ModelStreamInfer, call: Call) -> None:
        self.call = call
        self.large = owner.inference.large
        self.ended = False
        self._owner = owner
        self._slots: deque[Slot] = deque()
        self._unordered: dict[Slot, None] = {}
        self._waiting_messages: deque[tuple[Slot, bytes]] = deque()
        self._decoding = False
        self._producer_slots = asyncio.Semaphore(MAX_ANSWERING)
        self._nbytes = 0
        self._half_closed = False
        self._closes_on_error = call.metadata.get(ERROR_CLOSES_STREAM, "").strip().lower() == "true"
        call.on_cancel = self.cancel
        owner.ticker.add(self._check_health)

    # -- the Reader --------------------------------------------------------------------------------------------

    def on_message(self, message: bytes) -> None:
        """Begin one request; any error becomes its answer."""
        if self.ended:
            return
        slot = Slot(self, len(message))
        self._slots.append(slot)
        self._nbytes += slot.nbytes
        try:
            if self._owner.health.disconnecting:
                # nothing else notifies the stream: GOAWAY only concerns new streams
                raise InferError(Code.NOT_READY, SHUTTING_DOWN)
            count = len(self._slots) + len(self._unordered)
            if count > MAX_IN_FLIGHT or (self._nbytes > MAX_IN_FLIGHT_BYTES and count > 1):
                raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        except InferError as error:
            self._reject(slot, message, error)
            return
        if self._decoding:
            self._waiting_messages.append((slot, message))
        else:
            self._start(slot, message)

    def _start(self, slot: Slot, message: bytes) -> None:
        try:
            self._begin(slot, message)
        except Exception as error:  # noqa: BLE001 - it affects one request, and the stream continues
            self._reject(slot, message, error)

    def _reject(self, slot: Slot, message: bytes, error: Exception) -> None:
        slot.request = None
        slot.error = client_error(error, "ModelStreamInfer")
        slot.id = slot.id or _id_of(self._owner.inference, message)
        self.complete(slot)

    def _begin_waiting(self) -> None:
        """Begin the messages that waited for one to be decoded."""
        self._decoding = False
        while self._waiting_messages and not self._decoding and not self.ended:
            self._start(*self._waiting_messages.popleft())

    def on_half_close(self) -> None:
        """End once the last answer has been sent."""
        self._half_closed = True
        self._flush()

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin(self, slot: Slot, message: bytes) -> None:
        inference, sink = self._owner.inference, self._owner
        found = inference.find(message, sink)
        decoded = DecodedRequest(*found) if found is not None else None
        if decoded is None:
            with suppress(LargeRead):
                decoded = inference.decode(message, sink) if len(message) < LARGE_BYTES else None
            if decoded is None:
                self._decoding = inference.may_be_in_sequence(message)
                slot.start_task(partial(self._begin_on_thread, slot, message, self._decoding))
                return
        if decoded.decoupled:
            self._remove_from_order(slot, decoded)
        if decoded.hooked:
            slot.id = decoded.request.id
            inference.hold(decoded.route.model, slot.start_task(partial(self._run_hooks, slot, decoded)))
        else:
            self._submit(slot, decoded)

    def _remove_from_order(self, slot: Slot, decoded: DecodedRequest) -> None:
        """Remove a request from the order."""
        slot.empty_encoder = decoded.route.encoder
        if self._slots[-1] is slot:
            self._slots.pop()
        else:
            self._slots.remove(slot)
        self._unordered[slot] = None
        self._flush()

    def _submit(self, slot: Slot, decoded: DecodedRequest) -> None:
        slot.id = decoded.request.id
        slot.encoding = decoded.encoding
        slot.request = decoded.request
        inference = self._owner.inference
        inference.submit(decoded.request, inference.options_of(decoded, self.call.metadata), slot)

    async def _begin_on_thread(self, slot: Slot, message: bytes, ordered: bool) -> None:
        try:
            try:
                decoded = await self._owner.inference.decode_on_thread(message, self._owner)
            finally:
                if ordered:
                    # by then it is in its queue, or among its hooks' requests
                    asyncio.get_running_loop().call_soon(self._begin_waiting)
            if decoded.decoupled and not self.ended:
                self._remove_from_order(slot, decoded)
            if decoded.hooked:
                slot.id = decoded.request.id
                if slot.task is not None:  # it may have to wait for room
                    self._owner.inference.hold(decoded.route.model, slot.task)
                await self._run_hooks(slot, decoded)
            elif not self.ended:
                self._submit(slot, decoded)
        except Exception:
            slot.request = None
            slot.id = slot.id or _id_of(self._owner.inference, message)
            raise

    async def _run_hooks(self, slot: Slot, decoded: DecodedRequest) -> None:
        inference, call = self._owner.inference, self.call
        if not decoded.decoupled:
            slot.answer = await inference.run_hooks(decoded, call.metadata, FINAL)
            return
        async with self._producer_slots, aclosing(inference.answers(decoded, call.metadata)) as answers:
            # wait for a slow reader, before the first answer and after each
            await call.drain()
            async for answer in answers:
                await call.drain()
                if isinstance(answer, tuple):
                    self._send_error(slot, *answer)
                else:
                    call.send(answer)

    def complete(self, slot: Slot) -> None:
        """Send a request's result when its turn comes."""
        if slot in self._unordered:
            del self._unordered[slot]
            self._send(slot)
        self._flush()

    def _flush(self) -> None:
        """Send finished answers up to the first request that is not finished."""
        slots = self._slots
        while slots and slots[0].done and not self.ended:
            self._send(slots.popleft())
        if self._half_closed and not slots and not self._unordered and not self.ended:
            self._detach()
            self.call.finish()

    def _send(self, slot: Slot) -> None:
        self._nbytes -= slot.nbytes
        if slot.error is not None:
            self._send_error(slot, slot.error, FINAL)
        elif slot.answer:
            self.call.send(slot.answer)

    def _send_error(self, slot: Slot, error: InferError, mark: bytes) -> None:
        """Answer with an error."""
        text, id_and_mark = shorten(error.message), encode_id_and_mark(slot.id, mark)
        if self._closes_on_error:
            self._close(GRPC_STATUS[error.code], text)
        else:
            self.call.count_error(GRPC_STATUS[error.code])
            encoder = slot.empty_encoder
            self.call.send(stream_error(text, encoder.encode_empty(id_and_mark) if encoder else id_and_mark))

    # -- ending ------------------------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """End an idle stream when the server shuts down, since its client will not."""
        health = self._owner.health
        if not self._slots and not self._unordered and (health.disconnecting or health.device_lost):
            self._close(Status.UNAVAILABLE, SHUTTING_DOWN)

    def _close(self, status: Status, text: str) -> None:
        self.cancel()
        self.call.abort(status, text)

    def cancel(self) -> None:
        """Cancel everything in flight, because nobody waits for it."""
        self._detach()
        for slot in (*self._slots, *self._unordered):
            request, slot.request = slot.request, None
            if request is not None:
                self._owner.inference.engine.cancel(request)
            task, slot.task = slot.task, None
            if task is not None:  # it keeps its frames, which hold the slot
                task.cancel()
        self._slots.clear()
        self._unordered.clear()
        self._waiting_messages.clear()

    def _detach(self) -> None:
        self.ended = True
        self.call.on_cancel = None
        self._owner.ticker.remove(self._check_health)


def _id_of(inference: RpcInference, message: bytes) -> str:
    """Return the id of a rejected request, which is part of its error answer."""
    try:
        return inference.id_of(message)
    except InferError:
        return ""
