"""Unary calls whose message is parsed and whose answer is a message: everything but inference.

Made by the RPC modules beside it; called by the gRPC lane.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.server.errors import GRPC_STATUS, MAX_TEXT_CHARS, pushback_ms
from penstock.server.grpc.method import Call, Method

from .wire import has_more_elements, has_more_fields

logger = logging.getLogger("penstock.server")

_MOST_BYTES = 64 << 10
"""The same limit as for a body over HTTP (`v2/routes.py`)."""
_MOST_FIELDS = 1 << 16
"""An empty tensor takes 2 bytes of a message, a hundredth of that compressed, and 50 bytes of memory."""
_MOST_ELEMENTS = 1 << 22
"""A dim takes 1 byte of a message, 8 of memory when parsed, and 8 as a Python object; a string takes 2, 16 and 50."""


def parsed(kind: Any, message: bytes) -> Any:
    """Parse a message. Raises: InferError (INVALID)."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise InferError(Code.INVALID, f"failed to parse the request as {kind.DESCRIPTOR.full_name}") from None


def parsed_small(kind: Any, message: bytes) -> Any:
    """Parse a message that is never large, on the event loop. Raises: InferError (INVALID)."""
    if len(message) > _MOST_BYTES:
        text = (
            f"request message of {len(message)} bytes exceeds the maximum of {_MOST_BYTES} for {kind.DESCRIPTOR.name}"
        )
        raise InferError(Code.INVALID, text)
    return parsed(kind, message)


def parsed_large(kind: Any, message: bytes) -> Any:
    """Parse a message that may have large fields, but not many. Raises: InferError (INVALID)."""
    _check_fields(kind, message)
    return parsed(kind, message)


def parsed_tensors(kind: Any, message: bytes) -> Any:
    """Parse a large ModelInferRequest. Raises: InferError (INVALID)."""
    _check_fields(kind, message)  # first, because it ends early if there are too many
    if len(message) > _MOST_ELEMENTS and has_more_elements(message, _MOST_ELEMENTS):
        text = f"the tensors of {kind.DESCRIPTOR.name} have more dims, parameters and elements in 'contents' than are"
        raise InferError(Code.INVALID, f"{text} parsed, send them in 'raw_input_contents'")
    return parsed(kind, message)


def _check_fields(kind: Any, message: bytes) -> None:
    if has_more_fields(message, _MOST_FIELDS):
        raise InferError(Code.INVALID, f"{kind.DESCRIPTOR.name} has more than {_MOST_FIELDS} fields")


def answering(path: str, kind: Any, work: Callable[[Any], Any]) -> Method:
    """Make a Method that answers at once: `work` takes a small message of type `kind` and returns the answer's."""

    def begin(call: Call, message: bytes) -> None:
        call.answer(work(parsed_small(kind, message)).SerializeToString())

    return Method(path, begin)


class Tasks:
    """Calls that take more than a moment, each on its own task.

    Invariant: a task that has begun ends its call, unless the call has already ended. `work` is called only when the
    task begins, since the task may be cancelled before.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def answering(self, path: str, kind: Any, work: Callable[[Any], Awaitable[Any]], *, large: bool = False) -> Method:
        """Make a Method that answers when `work` has ended. It is not cancelled: half a load helps nobody."""
        read = parsed_large if large else parsed_small

        async def answer(call: Call, message: bytes) -> None:
            call.answer((await work(read(kind, message))).SerializeToString())

        def begin(call: Call, message: bytes) -> None:
            self._run(call, partial(answer, call, message), path)

        return Method(path, begin)

    def start(self, call: Call, work: Callable[[], Awaitable[None]], what: str) -> asyncio.Task[None]:
        """Run `work`, which must end `call`; an exception from it ends the call too, and the call's end cancels it."""
        task = self._run(call, work, what)
        call.on_cancel = partial(self._cancel, task)
        return task

    def _run(self, call: Call, work: Callable[[], Awaitable[None]], what: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(call, work, what))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @staticmethod
    def _cancel(task: asyncio.Task[None]) -> None:
        task.cancel()

    async def _guarded(self, call: Call, work: Callable[[], Awaitable[None]], what: str) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client always gets an answer
            refuse(call, as_refusal(error, what))


def refuse(call: Call, error: InferError) -> None:
    """End a call with an error."""
    call.abort(GRPC_STATUS[error.code], brief(error.message), pushback_ms(error))


def brief(text: str) -> str:
    """Leave out the middle of a very long text, which may quote what the client sent."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"


def as_refusal(error: Exception, what: str, request_id: str = "") -> InferError:
    """Return the error for the client: an internal one is logged and replaced by its id.

    The result may be kept with the call, so it holds no frames, which would hold the call and its message.
    """
    if isinstance(error, InferError):
        return without_traceback(error)
    request_id = request_id or secrets.token_hex(4)
    logger.error("%s failed", what, exc_info=error, extra={"request_id": request_id})
    return InferError(Code.INTERNAL, f"internal error, request id {request_id}")
