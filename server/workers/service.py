"""WorkerService: what a worker process does, and the loop that does it, in the worker; `child.py` calls `serve`."""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.refusals import write_error
from penstock.server.ipc.wire import Message

from .kinds import CLOSE, ERROR, FIRST_CALL, FIRST_TOLD, OPEN, PING, REPLY

if TYPE_CHECKING:
    import asyncio

Reply = tuple[bytes, Sequence[Array | None] | None]
"""A body and tensors."""
GRACE_S = 0.5
"""For how long a call may run on when the server has gone."""
_MADV_WIPEONFORK = 18
_NUMBER = struct.Struct("<Q")


class WorkerService(Protocol):
    """What a service module gives: `open_service(settings: dict, channel: Channel) -> WorkerService`.

    An InferError that `open_service`, `opened` or `call` raises is the caller's as it is; anything else is INTERNAL,
    with its traceback in the log. A worker that could not be opened ends.
    `listens`: `told` is to be called while a call runs, on a thread of its own; otherwise between calls.
    `awaits`, which may be missing: `call` is a coroutine function, on an asyncio loop that runs from when it is open
    until the process ends, so that tasks which a call leaves behind live on. Calls are awaited one at a time; all but
    `open_service` and `opened` is called on the loop, `told` whenever the loop gets to it; it does not listen.
    `told_with`, which may be missing too: what is told with descriptors comes there, as (number, body, descriptors);
    they are the service's to close.
    """

    listens: bool

    def opened(self) -> Reply:
        """Give the answer to being opened."""

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Do what is called, one call at a time."""

    def told(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take what is told. Must not raise."""

    def close(self) -> None:
        """End: no call will come."""


class CallQueue:
    """The calls that wait, and what reads them: this thread when it has nothing to do, or one that listens.

    `begun` is a word of memory that the server reads when this process is gone: the number of the last call begun.
    """

    def __init__(self, channel: Channel, begun: mmap.mmap) -> None:
        self._channel = channel
        self._begun = begun
        self._pid = os.getpid()
        self._mark = _mark()
        self._service: Any = None
        self._waiting: deque[Message | None] = deque()
        self._early: list[Message] = []
        self._heard: SimpleQueue[Message | None] | None = None

    def serve(self) -> None:
        """Do what is called until CLOSE is, or the server has gone."""
        waiting, begin, begun, mark = self._waiting, _NUMBER.pack_into, self._begun, self._mark
        while (message := waiting.popleft() if waiting else self._next()) is not None:
            kind, number, body, arrays, _ = message
            del message
            begin(begun, 0, number)
            try:
                if kind >= FIRST_CALL:
                    reply = self._service.call(kind, number, body, arrays)
                else:
                    reply = self._done(kind, number, body, arrays)
            except BaseException as error:  # noqa: BLE001 - sys.exit in user code harms its own call only
                self._end_fork(error)
                self._refuse(number, error)
                if kind == OPEN:
                    return
            else:
                if not mark[0]:
                    self._end_fork()
                self._answer(number, reply)
                del reply
            del arrays
            if kind >= FIRST_CALL:
                continue
            if kind == CLOSE:
                return
            if kind == OPEN and getattr(self._service, "awaits", False):
                self._serve_on_a_loop()
                return

    def _serve_on_a_loop(self) -> None:
        import asyncio  # a sixth of a worker's start, which no other service waits for

        async def serve() -> None:
            await self._serve_awaited(asyncio.get_running_loop(), asyncio.Event())

        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(serve())

    async def _serve_awaited(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
        loop.add_reader(self._channel, self._readable, loop, arrived)
        while (message := await self._next_awaited(arrived)) is not None:
            kind, number, body, arrays, _ = message
            del message
            _NUMBER.pack_into(self._begun, 0, number)
            try:
                reply = self._done(kind, number, body, arrays)
                if isinstance(reply, Coroutine):
                    reply = await reply
                self._end_fork()
            except BaseException as error:  # noqa: BLE001 - as in serve
                self._end_fork(error)
                self._refuse(number, error)
            else:
                self._answer(number, reply)
                del reply
            del arrays
            if kind == CLOSE:
                return

    def _end_fork(self, error: BaseException | None = None) -> None:
        """End a child that user code has forked and that comes back from the call: its parent is who answers."""
        if os.getpid() == self._pid:
            return
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        code = error.code if isinstance(error, SystemExit) else error is not None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else code is not None)

    def _answer(self, number: int, reply: Reply) -> None:
        # at once: replies that wait for others would save 3 us a call here and as many in the server, of 33 in all, but
        # a call that takes long would keep the answers of those before it, and one that ends the process lose them
        try:
            self._channel.send(REPLY, number, *reply)
        except OSError:
            raise  # nobody is there
        except Exception as error:  # noqa: BLE001 - also what a string that is the user's own says
            self._refuse(number, error)

    def _refuse(self, number: int, error: BaseException) -> None:
        refused = error if isinstance(error, InferError) else _failed(error)
        self._channel.send(ERROR, number, write_error(refused))

    def _done(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Any:
        if kind >= FIRST_CALL:
            return self._service.call(kind, number, body, arrays)
        if kind == OPEN:
            return self._open(body)
        if kind == CLOSE:
            self._service.close()
        elif kind != PING:
            raise InferError(Code.INTERNAL, f"no call is of kind {kind}")
        return b"", None

    def _open(self, body: bytes) -> Any:
        asked = json.loads(body)
        if asked["path"]:
            # before the user's folder is looked at: a file there that is called logging or string is not Python's
            import asyncio  # noqa: F401
        sys.path[:0] = asked["path"]
        service = importlib.import_module(asked["service"]).open_service(asked["settings"], self._channel)
        self._service = service
        for message in self._early:
            self._tell(message)
        self._early.clear()
        if service.listens:
            heard = self._heard = SimpleQueue()
            while self._waiting:  # read together with OPEN
                heard.put(self._waiting.popleft())
            threading.Thread(target=self._listen, args=(heard,), name="ear", daemon=True).start()
        return service.opened()

    # -- what comes; None: the server has gone -----------------------------------------------------------------

    def _next(self) -> Message | None:
        if self._heard is not None:
            self._channel.release()
            return self._heard.get()
        while not self._waiting:
            try:
                self._sort(self._channel.receive(), self._waiting.append)
            except EOFError:
                return None
        return self._waiting.popleft()

    def _listen(self, heard: SimpleQueue[Message | None]) -> None:
        try:
            while True:
                self._sort(self._channel.receive(), heard.put)
        except EOFError:
            heard.put(None)
            time.sleep(GRACE_S)
        except BaseException as error:  # noqa: BLE001 - nobody would hear what comes
            traceback.print_exception(error)
        os._exit(1)

    async def _next_awaited(self, arrived: asyncio.Event) -> Message | None:
        while not self._waiting:
            arrived.clear()
            self._channel.release()
            await arrived.wait()
        return self._waiting.popleft()

    def _readable(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> None:
        try:
            self._sort(self._channel.receive(0.0), self._waiting.append)
        except EOFError:
            loop.remove_reader(self._channel)
            self._waiting.append(None)
            loop.call_later(GRACE_S, os._exit, 1)
        arrived.set()

    def _sort(self, messages: list[Message], keep: Callable[[Message], None]) -> None:
        """Keep calls, and pass on what is told."""
        for message in messages:
            if message[0] < FIRST_TOLD:
                keep(message)
            elif self._service is not None:
                self._tell(message)
            else:
                self._early.append(message)

    def _tell(self, message: Message) -> None:
        kind, number, body, arrays, descriptors = message
        if descriptors:
            self._service.told_with(number, body, descriptors)
        else:
            self._service.told(kind, number, body, arrays)


def _mark() -> mmap.mmap | bytes:
    """Give memory whose first byte is 0 in a child of this process; 0 everywhere, where the system cannot do that.

    To ask it for the process's id at each call costs 0.2 us more. Source: madvise(2).
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except (OSError, AttributeError):
        return bytes(1)
    memory[0] = 1
    return memory


def _failed(error: BaseException) -> InferError:
    name, text = type(error).__name__, ""
    with contextlib.suppress(Exception):  # user code may have closed stderr, and have errors of its own
        traceback.print_exception(error)
    with contextlib.suppress(Exception):
        text = str(error)
    return InferError(Code.INTERNAL, f"{name}: {text}" if text else name)
