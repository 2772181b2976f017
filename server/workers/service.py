"""WorkerService: what runs in a worker process, and CallQueue, the loop that calls it. `child.py` calls `serve`."""

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
from penstock.server.ipc.errors import write_error
from penstock.server.ipc.wire import Message

from .kinds import CLOSE, ERROR, FIRST_CALL, FIRST_MESSAGE, OPEN, PING, REPLY

if TYPE_CHECKING:
    import asyncio

Reply = tuple[bytes, Sequence[Array | None] | None]
"""A body and tensors."""
EXIT_GRACE_S = 0.5
"""How long a call may continue after the server has gone."""
_MADV_WIPEONFORK = 18
_NUMBER = struct.Struct("<Q")


class WorkerService(Protocol):
    """The service that a module provides through `open_service(settings: dict, channel: Channel) -> WorkerService`.

    An InferError raised by `open_service`, `on_open` or `call` reaches the caller unchanged; any other exception
    becomes INTERNAL, with its traceback in the log. A worker that fails to open ends. `concurrent_messages`: a separate
    thread calls `on_message` while a call runs. Otherwise `on_message` is called between calls. `is_async` (optional):
    `call` is a coroutine function, run on an asyncio loop that lives from opening until the process ends, so tasks that
    a call leaves behind continue. Calls are awaited one at a time. Everything except `open_service` and `on_open` runs
    on the loop, `on_message` whenever the loop reaches it; no thread listens. `on_descriptors` (optional): receives
    messages with descriptors, as (number, body, descriptors). The service closes them.
    """

    concurrent_messages: bool

    def on_open(self) -> Reply:
        """Return the answer to OPEN."""

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Run a call. Calls run one at a time."""

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Handle a message that has no answer. Must not raise."""

    def close(self) -> None:
        """End; no further calls follow."""


class CallQueue:
    """The waiting calls, read by this thread when it is idle, or by a thread that listens.

    `begun` is a word of shared memory with the number of the last call begun, which the server reads when this process
    is gone.
    """

    def __init__(self, channel: Channel, begun: mmap.mmap) -> None:
        self._channel = channel
        self._begun = begun
        self._pid = os.getpid()
        self._fork_mark = _fork_mark()
        self._service: Any = None
        self._pending: deque[Message | None] = deque()
        self._early_messages: list[Message] = []
        self._listener_queue: SimpleQueue[Message | None] | None = None

    def serve(self) -> None:
        """Run calls until CLOSE, or until the server has gone."""
        waiting, begin, begun, mark = self._pending, _NUMBER.pack_into, self._begun, self._fork_mark
        while (message := waiting.popleft() if waiting else self._next_call()) is not None:
            kind, number, body, arrays, _ = message
            del message
            begin(begun, 0, number)
            try:
                if kind >= FIRST_CALL:
                    reply = self._service.call(kind, number, body, arrays)
                else:
                    reply = self._run_call(kind, number, body, arrays)
            except BaseException as error:  # noqa: BLE001 - sys.exit in user code fails only its own call
                self._end_fork(error)
                self._send_error(number, error)
                if kind == OPEN:
                    return
            else:
                if not mark[0]:
                    self._end_fork()
                self._send_reply(number, reply)
                del reply
            del arrays
            if kind >= FIRST_CALL:
                continue
            if kind == CLOSE:
                return
            if kind == OPEN and getattr(self._service, "is_async", False):
                self._serve_on_a_loop()
                return

    def _serve_on_a_loop(self) -> None:
        import asyncio  # a sixth of a worker's start time; only this kind of service needs it

        async def serve() -> None:
            await self._serve_async(asyncio.get_running_loop(), asyncio.Event())

        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(serve())

    async def _serve_async(self, loop: asyncio.AbstractEventLoop, received: asyncio.Event) -> None:
        loop.add_reader(self._channel, self._readable, loop, received)
        while (message := await self._next_call_async(received)) is not None:
            kind, number, body, arrays, _ = message
            del message
            _NUMBER.pack_into(self._begun, 0, number)
            try:
                reply = self._run_call(kind, number, body, arrays)
                if isinstance(reply, Coroutine):
                    reply = await reply
                self._end_fork()
            except BaseException as error:  # noqa: BLE001 - as in serve
                self._end_fork(error)
                self._send_error(number, error)
            else:
                self._send_reply(number, reply)
                del reply
            del arrays
            if kind == CLOSE:
                return

    def _end_fork(self, error: BaseException | None = None) -> None:
        """End a child that user code forked and that returned from the call: only its parent may answer."""
        if os.getpid() == self._pid:
            return
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        code = error.code if isinstance(error, SystemExit) else error is not None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else code is not None)

    def _send_reply(self, number: int, reply: Reply) -> None:
        # send at once: batching replies would save 3 us of 33 per call here and as many in the server, but a long call
        # would delay the answers before it, and a call that ends the process would lose them
        try:
            self._channel.send(REPLY, number, *reply)
        except OSError:
            raise  # the server has gone
        except Exception as error:  # noqa: BLE001 - also from the user's own string types
            self._send_error(number, error)

    def _send_error(self, number: int, error: BaseException) -> None:
        failure = error if isinstance(error, InferError) else _internal_error(error)
        self._channel.send(ERROR, number, write_error(failure))

    def _run_call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Any:
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
        request = json.loads(body)
        if request["path"]:
            # import before the user's folder is on the path: a file there named logging or string would shadow Python's
            import asyncio  # noqa: F401
        sys.path[:0] = request["path"]
        service = importlib.import_module(request["service"]).open_service(request["settings"], self._channel)
        self._service = service
        for message in self._early_messages:
            self._deliver_message(message)
        self._early_messages.clear()
        if service.concurrent_messages:
            queue = self._listener_queue = SimpleQueue()
            while self._pending:  # those read together with OPEN
                queue.put(self._pending.popleft())
            threading.Thread(target=self._listen, args=(queue,), name="listener", daemon=True).start()
        return service.on_open()

    # -- incoming messages; None: the server has gone --------------------------------------------------------------

    def _next_call(self) -> Message | None:
        if self._listener_queue is not None:
            self._channel.report_freed()
            return self._listener_queue.get()
        while not self._pending:
            try:
                self._dispatch(self._channel.receive(), self._pending.append)
            except EOFError:
                return None
        return self._pending.popleft()

    def _listen(self, queue: SimpleQueue[Message | None]) -> None:
        try:
            while True:
                self._dispatch(self._channel.receive(), queue.put)
        except EOFError:
            queue.put(None)
            time.sleep(EXIT_GRACE_S)
        except BaseException as error:  # noqa: BLE001 - nobody would read the messages that follow
            traceback.print_exception(error)
        os._exit(1)

    async def _next_call_async(self, received: asyncio.Event) -> Message | None:
        while not self._pending:
            received.clear()
            self._channel.report_freed()
            await received.wait()
        return self._pending.popleft()

    def _readable(self, loop: asyncio.AbstractEventLoop, received: asyncio.Event) -> None:
        try:
            self._dispatch(self._channel.receive(0.0), self._pending.append)
        except EOFError:
            loop.remove_reader(self._channel)
            self._pending.append(None)
            loop.call_later(EXIT_GRACE_S, os._exit, 1)
        received.set()

    def _dispatch(self, messages: list[Message], enqueue: Callable[[Message], None]) -> None:
        """Keep calls, and dispatch messages that need no answer."""
        for message in messages:
            if message[0] < FIRST_MESSAGE:
                enqueue(message)
            elif self._service is not None:
                self._deliver_message(message)
            else:
                self._early_messages.append(message)

    def _deliver_message(self, message: Message) -> None:
        kind, number, body, arrays, descriptors = message
        if descriptors:
            self._service.on_descriptors(number, body, descriptors)
        else:
            self._service.on_message(kind, number, body, arrays)


def _fork_mark() -> mmap.mmap | bytes:
    """Return memory whose first byte becomes 0 in a child of this process; always 0 if the system cannot do that.

    Reading the process id on each call would cost 0.2 us more. Source: madvise(2).
    """
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except (OSError, AttributeError):
        return bytes(1)
    memory[0] = 1
    return memory


def _internal_error(error: BaseException) -> InferError:
    name, text = type(error).__name__, ""
    with contextlib.suppress(Exception):  # user code may have closed stderr or define its own errors
        traceback.print_exception(error)
    with contextlib.suppress(Exception):
        text = str(error)
    return InferError(Code.INTERNAL, f"{name}: {text}" if text else name)
