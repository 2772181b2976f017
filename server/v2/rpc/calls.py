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
from penstock.server.errors import GRPC_STATUS, pushback_ms, shorten
from penstock.server.grpc.method import Call, Method

from .wire import has_more_elements, has_more_fields

logger = logging.getLogger("penstock.server")

_MAX_BYTES = 64 << 10
"""The same limit as for a body over HTTP (`v2/routes.py`)."""
_MAX_FIELDS = 1 << 16
"""An empty tensor takes 2 bytes of a message, a hundredth of that compressed, and 50 bytes of memory."""
_MAX_ELEMENTS = 1 << 22
"""A dim takes 1 byte of a message, 8 of memory when parsed, and 8 as a Python object; a string takes 2, 16 and 50."""


def parse_message(message_class: Any, message: bytes) -> Any:
    """Parse a message. Raises: InferError (INVALID)."""
    try:
        return message_class.FromString(message)
    except DecodeError:
        raise InferError(Code.INVALID, f"failed to parse the request as {message_class.DESCRIPTOR.full_name}") from None


def parse_small(message_class: Any, message: bytes) -> Any:
    """Parse a message that is never large, on the event loop. Raises: InferError (INVALID)."""
    if len(message) > _MAX_BYTES:
        text = f"request message of {len(message)} bytes exceeds the maximum of {_MAX_BYTES} for"
        raise InferError(Code.INVALID, f"{text} {message_class.DESCRIPTOR.name}")
    return parse_message(message_class, message)


def parse_large(message_class: Any, message: bytes) -> Any:
    """Parse a message that may have large fields, but not many. Raises: InferError (INVALID)."""
    _check_fields(message_class, message)
    return parse_message(message_class, message)


def parse_tensors(message_class: Any, message: bytes) -> Any:
    """Parse a large ModelInferRequest. Raises: InferError (INVALID)."""
    _check_fields(message_class, message)  # first, because it ends early if there are too many
    if len(message) > _MAX_ELEMENTS and has_more_elements(message, _MAX_ELEMENTS):
        text = f"the tensors of {message_class.DESCRIPTOR.name} have more dims, parameters and elements in 'contents'"
        raise InferError(Code.INVALID, f"{text} than can be parsed, send them in 'raw_input_contents'")
    return parse_message(message_class, message)


def _check_fields(message_class: Any, message: bytes) -> None:
    if has_more_fields(message, _MAX_FIELDS):
        raise InferError(Code.INVALID, f"{message_class.DESCRIPTOR.name} has more than {_MAX_FIELDS} fields")


def unary_method(path: str, message_class: Any, work: Callable[[Any], Any]) -> Method:
    """Make a Method that answers at once: `work` takes a small `message_class` message and returns the answer's."""

    def begin(call: Call, message: bytes) -> None:
        call.answer(work(parse_small(message_class, message)).SerializeToString())

    return Method(path, begin)


class Tasks:
    """Calls that take more than a moment, each on its own task.

    Invariant: a task that has begun ends its call, unless the call has already ended. `work` is called only when the
    task begins, since the task may be cancelled before.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def unary_method(
        self, path: str, message_class: Any, work: Callable[[Any], Awaitable[Any]], *, large: bool = False
    ) -> Method:
        """Make a Method that answers when `work` has ended. It is not cancelled: half a load helps nobody."""
        read = parse_large if large else parse_small

        async def answer(call: Call, message: bytes) -> None:
            call.answer((await work(read(message_class, message))).SerializeToString())

        def begin(call: Call, message: bytes) -> None:
            self._run(call, partial(answer, call, message), path)

        return Method(path, begin)

    def start(self, call: Call, work: Callable[[], Awaitable[None]], rpc_name: str) -> asyncio.Task[None]:
        """Run `work`, which must end `call`; an exception from it ends the call too, and the call's end cancels it."""
        task = self._run(call, work, rpc_name)
        call.on_cancel = partial(self._cancel, task)
        return task

    def _run(self, call: Call, work: Callable[[], Awaitable[None]], rpc_name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_guarded(call, work, rpc_name))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @staticmethod
    def _cancel(task: asyncio.Task[None]) -> None:
        task.cancel()

    async def _run_guarded(self, call: Call, work: Callable[[], Awaitable[None]], rpc_name: str) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client always gets an answer
            abort(call, client_error(error, rpc_name))


def abort(call: Call, error: InferError) -> None:
    """End a call with an error."""
    call.abort(GRPC_STATUS[error.code], shorten(error.message), pushback_ms(error))


def client_error(error: Exception, rpc_name: str, request_id: str = "") -> InferError:
    """Return the error for the client: an internal one is logged and replaced by its id.

    The result may be kept with the call, so it holds no frames, which would hold the call and its message.
    """
    if isinstance(error, InferError):
        return without_traceback(error)
    request_id = request_id or secrets.token_hex(4)
    logger.error("%s failed", rpc_name, exc_info=error, extra={"request_id": request_id})
    return InferError(Code.INTERNAL, f"internal error, request id {request_id}")
