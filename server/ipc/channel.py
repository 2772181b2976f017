"""Channel: one end of a conversation with another process, for threads that may block: a worker's side."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence

from penstock.backends.backend import Array

from .link import READ_BYTES, prepare, receive_once, send_once
from .wire import ARENA_BYTES, Message, Wire


class Channel:
    """A Wire on a Unix socket. What is sent has left when `send` returns.

    Threads: any may send; one at a time may receive.
    """

    def __init__(self, sock: socket.socket, arena_bytes: int = ARENA_BYTES) -> None:
        self._sock = sock
        self._wire = Wire(lambda: None, arena_bytes)
        self._buffer = bytearray(READ_BYTES)
        # a slot may die, and be told of, wherever the collector runs: also in `send`
        self._lock = threading.RLock()
        self._arrived: list[Message] = []
        prepare(sock)
        sock.setblocking(True)

    def fileno(self) -> int:
        """Give the socket's descriptor, for an event loop to look at."""
        return self._sock.fileno()

    def send(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a message. Raises: TypeError or ValueError for what cannot travel; OSError when nobody is there."""
        with self._lock:
            self._wire.put(kind, number, body, arrays, descriptors)
            self._flush()

    def release(self) -> None:
        """Tell the other side which of its slots nobody here looks at any more."""
        if self._wire.mirror.freed:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        wire = self._wire
        wire.put_freed()
        view = memoryview(b"".join(wire.out))
        wire.out.clear()
        while view:
            view = view[send_once(self._sock, view, wire.descriptors) :]

    def receive(self, timeout_s: float | None = None) -> list[Message]:
        """Wait for messages; none after `timeout_s`. Raises: EOFError when the other process has gone; WireError."""
        self.release()
        messages: list[Message] = []
        while not messages:
            if timeout_s is not None and not select.select([self._sock], [], [], timeout_s)[0]:
                return []
            try:
                data, descriptors = receive_once(self._sock, self._buffer)
            except ConnectionError:
                raise EOFError from None
            if not data:
                raise EOFError
            with self._lock:
                messages = self._wire.feed(data, descriptors)
        return messages

    def close(self) -> None:
        """End the conversation."""
        with self._lock:
            self._sock.close()
            self._wire.close()
