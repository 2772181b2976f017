"""Helpers shared by the Services of the fast lane.

They move work that would block the event loop to a thread, run tasks that hold on to a model, deliver answers through
promises, compress answers, and report internal errors.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple

from penstock.backends.errors import Code, InferError

from .http.coding import MIN_BYTES, compress, decompress, decompress_small
from .threads import ThreadPool, run_in_pool

if TYPE_CHECKING:
    from penstock.batching.model import Model

    from .engines import ServingEngine
    from .http.fastlane import FastLane
    from .http.limits import Limits
    from .listening.mapped_buffer import Body

LARGE_BYTES = 256 << 10
"""JSON of at least this size is decoded on a thread, and bodies of at least this size are compressed on one."""

_DEDICATED_BYTES = 1 << 20

logger = logging.getLogger("penstock.server")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def off_loop(size: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call the function inline if the input is small, or on a thread if it would block the event loop."""
    if size < LARGE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


class LargeJsonReader:
    """Reads large JSON texts one at a time, because each takes many times its size as Python objects.

    Threads: one of its own, which takes the next text only after it has finished with the previous one.
    """

    def __init__(self) -> None:
        self._thread = ThreadPool(1, "penstock-json")

    async def read(self, size: int | None, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call on a thread: the dedicated one if `size` is large or None (not known yet), a pool thread otherwise."""
        executor = self._thread if size is None or size >= _DEDICATED_BYTES else None
        return await run_in_pool(executor, function, *args)


async def read_compressed(
    body: bytes, coding: bytes, limits: Limits, read: Callable[[bytes], T], texts: LargeJsonReader | None = None
) -> T:
    """Decompress a body and read it: inline if it is small, on a thread if that would block the event loop.

    One thread does both, so compressed bodies wait in order of arrival and at most one per thread is unpacked at a
    time; with `texts`, only one in all.
    Raises: HttpError, and whatever `read` raises.
    """
    decompressed = decompress_small(body, coding, limits, LARGE_BYTES - 1)
    if decompressed is not None:
        return read(decompressed)
    if texts is not None:
        return await texts.read(None, lambda: read(decompress(body, coding, limits)))
    return await asyncio.get_running_loop().run_in_executor(None, lambda: read(decompress(body, coding, limits)))


def start_task(connection: FastLane, engine: ServingEngine, model: Model, work: Coroutine[Any, Any, None]) -> None:
    """Start work that takes more than one step; a version that is replaced meanwhile stays loaded until it ends."""
    engine.hold(model)
    connection.task = task = connection.loop.create_task(work)
    task.add_done_callback(lambda _: engine.release(model))


def clear_task(connection: FastLane) -> None:
    """Record that the current task has answered; the answer may already have begun the connection's next request."""
    if connection.task is asyncio.current_task(connection.loop):
        connection.task = None


class Promise(Generic[*Ts]):
    """The future-like object through which a HookedRequest answers one request of a connection.

    `answer` and `fail` are called with the connection, the arguments in `args`, and the result or the error. If
    `answer` raises, `fail` is called as well.
    """

    __slots__ = ("_answer", "_args", "_connection", "_fail")

    def __init__(
        self,
        answer: Callable[[FastLane, *Ts, Any], None],
        fail: Callable[[FastLane, *Ts, BaseException], None],
        connection: FastLane,
        *args: *Ts,
    ) -> None:
        self._answer = answer
        self._fail = fail
        self._connection = connection
        self._args = args

    def done(self) -> bool:
        """Return whether the client has gone, which would cancel the HookedRequest; here always False."""
        return False

    def set_result(self, result: Any, /) -> None:
        """Answer with the result of the hooks."""
        self._connection.task = None  # first: the answer may begin the connection's next request
        try:
            self._answer(self._connection, *self._args, result)
        except Exception as error:  # noqa: BLE001 - the client always gets an answer
            self._fail(self._connection, *self._args, error)

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with the error."""
        self._connection.task = None
        self._fail(self._connection, *self._args, error)


def answer_compressed(connection: FastLane, body: Body, content_type: bytes, extra: bytes, coding: bytes) -> None:
    """Answer 200, compressed if a coding is given and the body is large enough to benefit."""
    if not coding or len(body) < MIN_BYTES:
        connection.answer(200, body, content_type, extra)
        return
    if len(body) < LARGE_BYTES:
        connection.answer(200, compress(body, coding), content_type, extra + b"content-encoding: %b\r\n" % coding)
        return
    CompressedAnswer(connection, body, content_type, extra, coding).begin()


class CompressedAnswer:
    """A large answer that is being compressed on a thread.

    Invariants: `_body` is set, and counted in `shared.unread`, until the answer is sent.
    Threads: the event loop's, except for the compression.
    """

    __slots__ = ("_body", "_coding", "_connection", "_content_type", "_extra")

    def __init__(self, connection: FastLane, body: Body, content_type: bytes, extra: bytes, coding: bytes) -> None:
        self._connection = connection
        self._body: Body | None = body
        self._content_type = content_type
        self._extra = extra
        self._coding = coding

    def begin(self) -> None:
        """Start compression; send the body uncompressed if no thread is available."""
        body = self._body
        try:
            future = asyncio.get_running_loop().run_in_executor(None, self._compress)
        except RuntimeError:
            self.shed()
            return
        future.add_done_callback(self._on_compressed)
        if body is not None:
            self._connection.shared.unread.grow(self, len(body))

    def shed(self) -> None:
        """Send the body uncompressed: too much is waiting, and it then counts as waiting for the client."""
        body = self._take_body()
        if body is not None:
            self._connection.answer(200, body, self._content_type, self._extra)

    def _take_body(self) -> Body | None:
        body, self._body = self._body, None
        self._connection.shared.unread.shrink(self)
        return body

    def _on_compressed(self, future: asyncio.Future[bytes]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
        if error is not None or future.cancelled():
            self.shed()
        elif self._take_body() is not None:
            extra = self._extra + b"content-encoding: %b\r\n" % self._coding
            self._connection.answer(200, future.result(), self._content_type, extra)

    def _compress(self) -> bytes:
        body = self._body
        return b"" if body is None else compress(body, self._coding)


def internal_error(error: BaseException, model: str, request_id: str) -> InferError:
    """Log the error under an id, and give the client only the id."""
    request_id = request_id or uuid.uuid4().hex
    logger.error("request failed", exc_info=error, extra={"request_id": request_id, "model": model})
    return InferError(Code.INTERNAL, f"internal error, request id {request_id}")
