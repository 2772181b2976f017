"""Answering: what the Services of the fast lane share.

Work that would hold the loop, tasks that hold on to a model, promised answers, compressed ones, and failures that are
our own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.errors import Code, InferError

from .http.coding import MIN_BYTES, compress, decompress, decompress_little
from .threads import Threads, begin

if TYPE_CHECKING:
    from penstock.batching.model import Model

    from .engines import Serves
    from .http.fastlane import FastLane
    from .http.limits import Limits
    from .listening.mapped import Body

LARGE_BYTES = 256 << 10
"""JSON from this size on is decoded on a thread, and bodies from this size on are compressed on one."""

_ALONE_BYTES = 1 << 20

logger = logging.getLogger("penstock.server")
T = TypeVar("T")


async def off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call here when there is little to do, on a thread when it would hold the loop."""
    if size < LARGE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


class LargeTexts:
    """Has large JSON read, one text after another: as Python objects each takes many times its size.

    Threads: one of its own, which has the next text when it has made of the last whatever it is wanted for.
    """

    def __init__(self) -> None:
        self._thread = Threads(1, "penstock-json")

    async def read(self, size: int | None, function: Callable[..., T], *args: Any) -> T:
        """Call on a thread, on that one unless a text of `size` is not that large; None for a size not known yet."""
        executor = self._thread if size is None or size >= _ALONE_BYTES else None
        return await begin(executor, function, *args)


async def unpacked(
    body: bytes, coding: bytes, limits: Limits, read: Callable[[bytes], T], texts: LargeTexts | None = None
) -> T:
    """Take a coding off a body and read it: here if there is little, on a thread if it would hold the loop.

    Both at once: bodies wait for a thread as they came, and there are no more of them unpacked than threads; only one
    of `texts`.
    Raises: HttpError, and what `read` does.
    """
    plain = decompress_little(body, coding, limits, LARGE_BYTES - 1)
    if plain is not None:
        return read(plain)
    if texts is not None:
        return await texts.read(None, lambda: read(decompress(body, coding, limits)))
    return await asyncio.get_running_loop().run_in_executor(None, lambda: read(decompress(body, coding, limits)))


def on_task(connection: FastLane, engine: Serves, model: Model, work: Coroutine[Any, Any, None]) -> None:
    """Begin what takes more than one step; a version that is swapped meanwhile stays until it is through."""
    engine.hold(model)
    connection.task = task = connection.loop.create_task(work)
    task.add_done_callback(lambda _: engine.release(model))


def off_task(connection: FastLane) -> None:
    """Note that this task has given its answer, which may have begun the next request of the connection."""
    if connection.task is asyncio.current_task(connection.loop):
        connection.task = None


class Promise:
    """The promise of one answer of a connection, which a Trip keeps.

    `answer` and `fail` are told the connection, what is `said` here, and what has come of it; of an answer that fails
    both are.
    """

    __slots__ = ("_answer", "_connection", "_fail", "_said")

    def __init__(
        self, answer: Callable[..., None], fail: Callable[..., None], connection: FastLane, *said: Any
    ) -> None:
        self._answer = answer
        self._fail = fail
        self._connection = connection
        self._said = said

    def done(self) -> bool:
        """Whether nobody waits any more: its Trip is cancelled then."""
        return False

    def set_result(self, result: Any, /) -> None:
        """Answer with what the hooks have made."""
        self._connection.task = None  # first: the answer may begin the connection's next request
        try:
            self._answer(self._connection, *self._said, result)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            self._fail(self._connection, *self._said, error)

    def set_exception(self, error: BaseException, /) -> None:
        """Answer with why there is nothing."""
        self._connection.task = None
        self._fail(self._connection, *self._said, error)


def answer_coded(connection: FastLane, body: Body, content_type: bytes, extra: bytes, coding: bytes) -> None:
    """Answer 200, compressed if a coding is given and it is worth it."""
    if not coding or len(body) < MIN_BYTES:
        connection.answer(200, body, content_type, extra)
        return
    if len(body) < LARGE_BYTES:
        connection.answer(200, compress(body, coding), content_type, extra + b"content-encoding: %b\r\n" % coding)
        return
    CodedAnswer(connection, body, content_type, extra, coding).begin()


class CodedAnswer:
    """A large answer that waits for a thread which compresses it.

    Invariants: `_body` is the answer for as long as that is of use, and counted in `shared.untaken` so long.
    Threads: the event loop's, but for the compression.
    """

    __slots__ = ("_body", "_coding", "_connection", "_content_type", "_extra")

    def __init__(self, connection: FastLane, body: Body, content_type: bytes, extra: bytes, coding: bytes) -> None:
        self._connection = connection
        self._body: Body | None = body
        self._content_type = content_type
        self._extra = extra
        self._coding = coding

    def begin(self) -> None:
        """Have it compressed; where no thread is to be had it goes as it is."""
        body = self._body
        try:
            packed = asyncio.get_running_loop().run_in_executor(None, self._compress)
        except RuntimeError:
            self.give_up()
            return
        packed.add_done_callback(self._packed)
        if body is not None:
            self._connection.shared.untaken.keep(self, len(body))

    def give_up(self) -> None:
        """Answer with what there is: too much waits, and from then on it is the client's to take."""
        body = self._let_go()
        if body is not None:
            self._connection.answer(200, body, self._content_type, self._extra)

    def _let_go(self) -> Body | None:
        body, self._body = self._body, None
        self._connection.shared.untaken.lessen(self)
        return body

    def _packed(self, packed: asyncio.Future[bytes]) -> None:
        error = None if packed.cancelled() else packed.exception()
        if error is not None:
            logger.error("an answer could not be compressed", exc_info=error)
        if error is not None or packed.cancelled():
            self.give_up()
        elif self._let_go() is not None:
            extra = self._extra + b"content-encoding: %b\r\n" % self._coding
            self._connection.answer(200, packed.result(), self._content_type, extra)

    def _compress(self) -> bytes:
        body = self._body
        return b"" if body is None else compress(body, self._coding)


def internal(error: BaseException, model: str, request_id: str) -> InferError:
    """Log what happened under an id, and tell the client the id only."""
    request_id = request_id or uuid.uuid4().hex
    logger.error("request failed", exc_info=error, extra={"request_id": request_id, "model": model})
    return InferError(Code.INTERNAL, f"internal error, request id {request_id}")
