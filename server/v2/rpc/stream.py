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
from penstock.server.errors import GRPC_STATUS
from penstock.server.grpc.method import Call, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import Health
from penstock.server.v2.regions import LargeRead

from .calls import as_refusal, brief
from .encode import FINAL, LargeAnswer, RpcEncoder, before, stream_answer, stream_answer_of, stream_error
from .inference import LARGE_BYTES, DecodedRequest, RpcInference
from .pulse import Pulse

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body

MAX_UNDER_WAY = 4096
MAX_UNDER_WAY_BYTES = 256 << 20
"""The most one stream may have in flight: requests, and bytes of their messages. Further ones are rejected one by
one."""
MAX_ANSWERED = 256
"""The most requests to decoupled models per stream that produce answers at a time; further ones wait."""
CLOSES = "triton_grpc_error"


class ModelStreamInfer:
    """The RPC: opens streams, and is the sink of their requests."""

    def __init__(self, inference: RpcInference, health: Health, pulse: Pulse) -> None:
        self.inference = inference
        self.health = health
        self.pulse = pulse

    def open(self, call: Call) -> InferStream:
        """Open a stream. Raises: InferError."""
        self.inference.check_forwarded(call.metadata)
        return InferStream(self, call)

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Deliver the outputs of one batch."""
        for request in requests:
            slot: Slot = request.context
            slot.delivered(request)


class Slot:
    """One request's place in its stream. `answer` is sent after all earlier ones; it is b"" until known.

    `call` is the stream's. `names`, set only for a decoupled model, encodes its empty answers.
    """

    __slots__ = ("answer", "encoding", "error", "id", "names", "nbytes", "request", "stream", "task")

    def __init__(self, stream: InferStream, nbytes: int) -> None:
        self.stream = stream
        self.nbytes = nbytes
        self.id = ""
        self.answer: Body = b""
        self.error: InferError | None = None
        self.encoding: Any = None
        self.names: RpcEncoder | None = None
        self.request: InferRequest | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def call(self) -> Call:
        """The call that the request came on."""
        return self.stream.call

    def delivered(self, request: InferRequest) -> None:
        """Encode the outputs of a delivered request."""
        self.request = None
        if self.stream.ended:
            return
        try:
            if request.error is not None:
                raise request.error
            self.answer = stream_answer(RpcInference.encode(self.encoding, request, FINAL))
        except LargeAnswer as large:
            self.work(partial(self._encode_slowly, large.encode))
            return
        except Exception as error:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
            self.error = as_refusal(error, "ModelStreamInfer", self.id)
        self.stream.settle(self)

    def work(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do work that takes more than a moment on a task."""
        self.task = asyncio.get_running_loop().create_task(self._guarded(work))
        return self.task

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client always gets an answer
            self.error = as_refusal(error, "ModelStreamInfer", self.id)
        self.task = None
        if self.request is None:
            self.stream.settle(self)

    async def _encode_slowly(self, encode: Callable[[], Body]) -> None:
        self.answer = await self.stream.large.encode(0, stream_answer_of, encode)

    @property
    def done(self) -> bool:
        """Whether there is an answer or an error to send."""
        return bool(self.answer) or self.error is not None


class InferStream:
    """One stream.

    Invariant: `_slots` are the unanswered requests, in order; answers are sent from the front. `_loose` are requests to
    decoupled models, whose answers are sent as they come. `_held` are messages that wait while an earlier one, possibly
    of the same sequence, is decoded on a thread (`_reading`).
    `ended` is whether either side has ended the call. `large` encodes large answers.
    """

    def __init__(self, owner: ModelStreamInfer, call: Call) -> None:
        self.call = call
        self.large = owner.inference.large
        self.ended = False
        self._owner = owner
        self._slots: deque[Slot] = deque()
        self._loose: dict[Slot, None] = {}
        self._held: deque[tuple[Slot, bytes]] = deque()
        self._reading = False
        self._room = asyncio.Semaphore(MAX_ANSWERED)
        self._nbytes = 0
        self._half_closed = False
        self._closes = call.metadata.get(CLOSES, "").strip().lower() == "true"
        call.on_cancel = self.cancel
        owner.pulse.add(self._look)

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
                # the stream is not told in any other way: GOAWAY only concerns new streams
                raise InferError(Code.NOT_READY, SHUTTING_DOWN)
            count = len(self._slots) + len(self._loose)
            if count > MAX_UNDER_WAY or (self._nbytes > MAX_UNDER_WAY_BYTES and count > 1):
                raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
        except InferError as error:
            self._refuse(slot, message, error)
            return
        if self._reading:
            self._held.append((slot, message))
        else:
            self._start(slot, message)

    def _start(self, slot: Slot, message: bytes) -> None:
        try:
            self._begin(slot, message)
        except Exception as error:  # noqa: BLE001 - it affects one request, and the stream continues
            self._refuse(slot, message, error)

    def _refuse(self, slot: Slot, message: bytes, error: Exception) -> None:
        slot.request = None
        slot.error = as_refusal(error, "ModelStreamInfer")
        slot.id = slot.id or _id_of(self._owner.inference, message)
        self.settle(slot)

    def _go_on(self) -> None:
        """Begin the messages that waited for one to be decoded."""
        self._reading = False
        while self._held and not self._reading and not self.ended:
            self._start(*self._held.popleft())

    def on_half_close(self) -> None:
        """End once the last answer has been sent."""
        self._half_closed = True
        self._flush()

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin(self, slot: Slot, message: bytes) -> None:
        inference, sink = self._owner.inference, self._owner
        found = inference.find(message, sink)
        asked = DecodedRequest(*found) if found is not None else None
        if asked is None:
            with suppress(LargeRead):
                asked = inference.decode(message, sink) if len(message) < LARGE_BYTES else None
            if asked is None:
                self._reading = inference.may_be_ordered(message)
                slot.work(partial(self._begin_slowly, slot, message, self._reading))
                return
        if asked.several:
            self._loosen(slot, asked)
        if asked.hooked:
            slot.id = asked.request.id
            inference.hold(asked.route.model, slot.work(partial(self._pass_hooks, slot, asked)))
        else:
            self._submit(slot, asked)

    def _loosen(self, slot: Slot, asked: DecodedRequest) -> None:
        """Remove a request from the order."""
        slot.names = asked.route.encoder
        if self._slots[-1] is slot:
            self._slots.pop()
        else:
            self._slots.remove(slot)
        self._loose[slot] = None
        self._flush()

    def _submit(self, slot: Slot, asked: DecodedRequest) -> None:
        slot.id = asked.request.id
        slot.encoding = asked.encoding
        slot.request = asked.request
        inference = self._owner.inference
        inference.submit(asked.request, inference.options_of(asked, self.call.metadata), slot)

    async def _begin_slowly(self, slot: Slot, message: bytes, ordered: bool) -> None:
        try:
            try:
                asked = await self._owner.inference.decode_slowly(message, self._owner)
            finally:
                if ordered:
                    # by then it is in its queue, or among its hooks' requests
                    asyncio.get_running_loop().call_soon(self._go_on)
            if asked.several and not self.ended:
                self._loosen(slot, asked)
            if asked.hooked:
                slot.id = asked.request.id
                if slot.task is not None:  # it may have to wait for room
                    self._owner.inference.hold(asked.route.model, slot.task)
                await self._pass_hooks(slot, asked)
            elif not self.ended:
                self._submit(slot, asked)
        except Exception:
            slot.request = None
            slot.id = slot.id or _id_of(self._owner.inference, message)
            raise

    async def _pass_hooks(self, slot: Slot, asked: DecodedRequest) -> None:
        inference, call = self._owner.inference, self.call
        if not asked.several:
            slot.answer = await inference.pass_hooks(asked, call.metadata, FINAL)
            return
        async with self._room, aclosing(inference.answers(asked, call.metadata)) as answers:
            # wait for a slow reader, before the first answer and after each
            await call.drain()
            async for answer in answers:
                await call.drain()
                if isinstance(answer, tuple):
                    self._tell(slot, *answer)
                else:
                    call.send(answer)

    def settle(self, slot: Slot) -> None:
        """Send a request's result when its turn comes."""
        if slot in self._loose:
            del self._loose[slot]
            self._send(slot)
        self._flush()

    def _flush(self) -> None:
        """Send finished answers up to the first request that is not finished."""
        slots = self._slots
        while slots and slots[0].done and not self.ended:
            self._send(slots.popleft())
        if self._half_closed and not slots and not self._loose and not self.ended:
            self._leave()
            self.call.finish()

    def _send(self, slot: Slot) -> None:
        self._nbytes -= slot.nbytes
        if slot.error is not None:
            self._tell(slot, slot.error, FINAL)
        elif slot.answer:
            self.call.send(slot.answer)

    def _tell(self, slot: Slot, error: InferError, mark: bytes) -> None:
        """Answer with an error."""
        text, between = brief(error.message), before(slot.id, mark)
        if self._closes:
            self._close(GRPC_STATUS[error.code], text)
        else:
            self.call.count_error(GRPC_STATUS[error.code])
            self.call.send(stream_error(text, slot.names.empty(between) if slot.names is not None else between))

    # -- ending ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """End an idle stream when the server shuts down, since its client will not."""
        health = self._owner.health
        if not self._slots and not self._loose and (health.disconnecting or health.device_lost):
            self._close(Status.UNAVAILABLE, SHUTTING_DOWN)

    def _close(self, status: Status, text: str) -> None:
        self.cancel()
        self.call.abort(status, text)

    def cancel(self) -> None:
        """Cancel everything in flight, because nobody waits for it."""
        self._leave()
        for slot in (*self._slots, *self._loose):
            request, slot.request = slot.request, None
            if request is not None:
                self._owner.inference.engine.cancel(request)
            task, slot.task = slot.task, None
            if task is not None:  # it keeps its frames, which hold the slot
                task.cancel()
        self._slots.clear()
        self._loose.clear()
        self._held.clear()

    def _leave(self) -> None:
        self.ended = True
        self.call.on_cancel = None
        self._owner.pulse.remove(self._look)


def _id_of(inference: RpcInference, message: bytes) -> str:
    """Return the id of a rejected request, which is part of its error answer."""
    try:
        return inference.id_of(message)
    except InferError:
        return ""
