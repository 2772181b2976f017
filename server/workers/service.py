"""Service: what a worker process does, and the loop that does it. Runs in the worker; `child.py` calls `serve`."""

from __future__ import annotations

import importlib
import json
import mmap
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.wire import Message

from .kinds import CLOSE, ERROR, FIRST_TOLD, OPEN, PING, REPLY

Reply = tuple[bytes, Sequence[Array | None] | None]
"""A body and tensors."""
_NUMBER = struct.Struct("<Q")


class Service(Protocol):
    """What a service module gives: `open_service(settings: dict, channel: Channel) -> Service`.

    `listens`: `told` is to be called while a call runs, on a thread of its own; otherwise between calls.
    """

    listens: bool

    def opened(self) -> Reply:
        """Give the answer to being opened."""

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Do what is called, one call at a time. An InferError that it raises is the caller's as it is."""

    def told(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Take what is told. Must not raise."""

    def close(self) -> None:
        """End: no call will come."""


class Calls:
    """The calls that wait, and what reads them: this thread when it has nothing to do, or one that listens.

    `begun` is a word of memory that the server reads when this process is gone: the number of the last call begun.
    """

    def __init__(self, channel: Channel, begun: mmap.mmap) -> None:
        self._channel = channel
        self._begun = begun
        self._service: Service | None = None
        self._waiting: deque[Message] = deque()
        self._arrived = threading.Semaphore(0)
        self._ear: threading.Thread | None = None
        self._ended = False

    def serve(self) -> None:
        """Do what is called until CLOSE is, or the server has gone."""
        while (message := self._next()) is not None:
            kind, number, body, arrays, _ = message
            del message
            _NUMBER.pack_into(self._begun, 0, number)
            try:
                reply = self._done(kind, number, body, arrays)
            except BaseException as error:  # noqa: BLE001 - sys.exit in user code harms its own call only
                refused = error if isinstance(error, InferError) else _failed(error)
                self._channel.send(ERROR, number, error_body(refused))
            else:
                self._answer(number, reply)
                del reply
            del arrays
            if kind == CLOSE:
                return

    def _answer(self, number: int, reply: Reply) -> None:
        try:
            self._channel.send(REPLY, number, *reply)
        except (TypeError, ValueError) as error:
            self._channel.send(ERROR, number, error_body(InferError(Code.INTERNAL, str(error))))

    def _done(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        if kind == OPEN:
            return self._open(body)
        if kind == PING or self._service is None:
            return b"", None
        if kind == CLOSE:
            self._service.close()
            return b"", None
        return self._service.call(kind, number, body, arrays)

    def _open(self, body: bytes) -> Reply:
        asked = json.loads(body)
        sys.path[:0] = asked["path"]
        service = self._service = importlib.import_module(asked["service"]).open_service(
            asked["settings"], self._channel
        )
        if service.listens:
            self._ear = threading.Thread(target=self._listen, name="ear", daemon=True)
            self._ear.start()
        return service.opened()  # type: ignore[no-any-return]

    def _next(self) -> Message | None:
        while not self._waiting or self._ear is not None:
            if self._ear is not None:
                self._channel.release()
                self._arrived.acquire()
                return None if self._ended and not self._waiting else self._waiting.popleft()
            try:
                self._sort(self._channel.receive())
            except EOFError:
                return None
        return self._waiting.popleft()

    def _listen(self) -> None:
        # what was read together with OPEN waits already
        for _ in range(len(self._waiting)):
            self._arrived.release()
        try:
            while True:
                for _ in range(self._sort(self._channel.receive())):
                    self._arrived.release()
        except EOFError:
            self._ended = True
            self._arrived.release()

    def _sort(self, messages: list[Message]) -> int:
        """Keep calls, and pass on what is told. Returns: how many calls there were."""
        before = 0
        for message in messages:
            if message[0] < FIRST_TOLD:
                self._waiting.append(message)
                before += 1
            elif self._service is not None:
                self._service.told(*message[:4])
        return before


def error_body(error: InferError) -> bytes:
    """Write an error for the server."""
    said = {"code": error.code.name, "message": error.message, "retry_after_ns": error.retry_after_ns}
    return json.dumps(said).encode()


def _failed(error: BaseException) -> InferError:
    traceback.print_exception(error)
    return InferError(Code.INTERNAL, f"{type(error).__name__}: {error}")
