"""ModelStreamInfer: requests in, answers out, in the order of the requests. Called by the gRPC lane.

What is wrong with a request is said in its answer, and the stream goes on; metadata `triton_grpc_error: true` asks for
the stream to end with the error's status instead. Source: Triton server, stream_infer_handler.cc.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.errors import GRPC_STATUS
from penstock.server.grpc.method import Call, Status
from penstock.server.health import Health
from penstock.server.v2.regions import LargeRead

from .calls import as_refusal, brief
from .encode import stream_answer, stream_error
from .health import SHUTTING_DOWN
from .inference import LARGE_BYTES, Asked, RpcInference
from .pulse import Pulse

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest

MAX_UNDER_WAY = 4096
MAX_UNDER_WAY_BYTES = 256 << 20
"""What one stream may have under way: requests, and the bytes of their messages. More is refused, one by one."""
CLOSES = "triton_grpc_error"


class ModelStreamInfer:
    """The RPC: opens streams, and is the sink of their requests."""

    def __init__(self, inference: RpcInference, health: Health, pulse: Pulse) -> None:
        self.inference = inference
        self.health = health
        self.pulse = pulse

    def open(self, call: Call) -> Stream:
        """Open a stream. Raises: InferError."""
        self.inference.check_forwarded(call.metadata)
        return Stream(self, call)

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take the outputs of one batch."""
        for request in requests:
            slot: Slot = request.context
            slot.delivered(request)


class Slot:
    """One request's place in its stream. `answer` is what is to be sent once all before it has been; b"" until then.

    `call` is the stream's.
    """

    __slots__ = ("answer", "encoding", "error", "id", "nbytes", "request", "stream", "task")

    def __init__(self, stream: Stream, nbytes: int) -> None:
        self.stream = stream
        self.nbytes = nbytes
        self.id = ""
        self.answer = b""
        self.error: InferError | None = None
        self.encoding: Any = None
        self.request: InferRequest | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def call(self) -> Call:
        """Give the call that the request came on."""
        return self.stream.call

    def delivered(self, request: InferRequest) -> None:
        """Encode what has come back."""
        self.request = None
        if self.stream.ended:
            return
        try:
            if request.error is not None:
                raise request.error
            answer = RpcInference.encode(self.encoding, request, final=True)
            if isinstance(answer, partial):
                self.work(partial(self._encode_slowly, answer))
                return
            self.answer = stream_answer(answer)
        except Exception as error:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
            self.error = as_refusal(error, "ModelStreamInfer", self.id)
        self.stream.flush()

    def work(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do on a task what takes more than a moment."""
        self.task = asyncio.get_running_loop().create_task(self._guarded(work))
        return self.task

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client gets an answer whatever it is
            self.error = as_refusal(error, "ModelStreamInfer", self.id)
        self.task = None
        if self.request is None:
            self.stream.flush()

    async def _encode_slowly(self, encode: partial[bytes]) -> None:
        self.answer = stream_answer(await asyncio.get_running_loop().run_in_executor(None, encode))

    @property
    def done(self) -> bool:
        """Whether there is something to send."""
        return bool(self.answer) or self.error is not None


class Stream:
    """One stream. Invariant: `_slots` are the requests that have no answer yet, in order; answers leave from its front.

    `ended` is whether the call has ended, by whichever side.
    """

    def __init__(self, owner: ModelStreamInfer, call: Call) -> None:
        self.call = call
        self.ended = False
        self._owner = owner
        self._slots: deque[Slot] = deque()
        self._nbytes = 0
        self._half_closed = False
        self._closes = call.metadata.get(CLOSES, "").strip().lower() == "true"
        call.cancelled = self.cancel
        owner.pulse.add(self._look)

    # -- the Reader --------------------------------------------------------------------------------------------

    def message(self, message: bytes) -> None:
        """Begin one request; whatever is wrong with it becomes its answer."""
        if self.ended:
            return
        slot = Slot(self, len(message))
        self._slots.append(slot)
        self._nbytes += slot.nbytes
        try:
            if len(self._slots) > MAX_UNDER_WAY or (self._nbytes > MAX_UNDER_WAY_BYTES and len(self._slots) > 1):
                raise InferError(Code.OVERLOADED, "Exceeds maximum queue size")
            self._begin(slot, message)
        except Exception as error:  # noqa: BLE001 - it concerns one request, and the stream goes on
            slot.request = None
            slot.error = as_refusal(error, "ModelStreamInfer")
            slot.id = slot.id or _id_of(self._owner.inference, message)
            self.flush()

    def half_closed(self) -> None:
        """End when the last answer has left."""
        self._half_closed = True
        self.flush()

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin(self, slot: Slot, message: bytes) -> None:
        inference, sink = self._owner.inference, self._owner
        found = inference.find(message, sink)
        if found is not None:
            asked = Asked(*found)
        else:
            if len(message) >= LARGE_BYTES:
                slot.work(partial(self._begin_slowly, slot, message))
                return
            try:
                asked = inference.decode(message, sink)
            except LargeRead:
                slot.work(partial(self._begin_slowly, slot, message))
                return
        if asked.hooked:
            slot.id = asked.request.id
            inference.hold(asked.route.model, slot.work(partial(self._pass_hooks, slot, asked)))
        else:
            self._submit(slot, asked)

    def _submit(self, slot: Slot, asked: Asked) -> None:
        slot.id = asked.request.id
        slot.encoding = asked.encoding
        slot.request = asked.request
        self._owner.inference.submit(asked.request, asked.options, slot)

    async def _begin_slowly(self, slot: Slot, message: bytes) -> None:
        try:
            asked = await self._owner.inference.decode_slowly(message, self._owner)
            if asked.hooked:
                slot.id = asked.request.id
                await self._pass_hooks(slot, asked)
            elif not self.ended:
                self._submit(slot, asked)
        except InferError:
            slot.request = None
            slot.id = slot.id or _id_of(self._owner.inference, message)
            raise

    async def _pass_hooks(self, slot: Slot, asked: Asked) -> None:
        slot.answer = stream_answer(await self._owner.inference.pass_hooks(asked, self.call.metadata, final=True))

    def flush(self) -> None:
        """Send what is done, up to the first request that is not."""
        slots = self._slots
        while slots and slots[0].done and not self.ended:
            slot = slots.popleft()
            self._nbytes -= slot.nbytes
            error = slot.error
            if error is None:
                self.call.send(slot.answer)
            elif self._closes:
                self._close(GRPC_STATUS[error.code], brief(error.message))
            else:
                self.call.send(stream_error(brief(error.message), slot.id))
        if self._half_closed and not slots and not self.ended:
            self._leave()
            self.call.finish()

    # -- endings -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """End an idle stream when the server is on its way out: its client will not."""
        if not self._slots and not self._owner.health.live():
            self._close(Status.UNAVAILABLE, SHUTTING_DOWN)

    def _close(self, status: Status, text: str) -> None:
        self.cancel()
        self.call.refuse(status, text)

    def cancel(self) -> None:
        """Cancel all that is under way: nobody waits for it any more."""
        self._leave()
        for slot in self._slots:
            request, slot.request = slot.request, None
            if request is not None:
                self._owner.inference.engine.cancel(request)
            if slot.task is not None:
                slot.task.cancel()
        self._slots.clear()

    def _leave(self) -> None:
        self.ended = True
        self.call.cancelled = None
        self._owner.pulse.remove(self._look)


def _id_of(inference: RpcInference, message: bytes) -> str:
    """Give the id of a request that was refused; it is part of the answer that says so."""
    try:
        return inference.id_of(message)
    except InferError:
        return ""
