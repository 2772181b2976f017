"""Channel: one end of a conversation with another process, for threads that may block: a worker's side."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Sequence

from penstock.backends.backend import Array

from .sockets import LINGER_S, READ_BYTES, prepare, receive_once, send_once
from .wire import ARENA_BYTES, Message, Wire

LOOK_S = 0.25
"""What a long wait is made of."""


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
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
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
        if wire.mirror.freed or wire.arena.dropped:
            wire.put_freed()
        out = wire.out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        sent = 0 if wire.descriptors else self._sock.send(data)
        while sent < len(data):
            sent += send_once(self._sock, memoryview(data)[sent:] if sent else data, wire.descriptors)

    def receive(self, timeout_s: float | None = None) -> list[Message]:
        """Wait for messages; none after `timeout_s`. Raises: EOFError when the other process has gone; WireError."""
        if self._wire.mirror.freed and (timeout_s is None or timeout_s > LINGER_S) and not self._waits(LINGER_S):
            self.release()
        messages: list[Message] = []
        while not messages:
            if timeout_s is not None and not self._waits(timeout_s):
                self.release()
                return []
            try:
                data, descriptors = receive_once(self._sock, self._buffer)
            except ConnectionError:
                raise EOFError from None
            if not data:
                raise EOFError
            with self._lock:
                messages = self._wire.feed(data, descriptors)
                if self._wire.arena.dropped and not messages:
                    with contextlib.suppress(OSError):  # it has ended: what it sent before is still to be read
                        self._flush()  # a segment is there for as long as the other side has it mapped
        return messages

    def _waits(self, timeout_s: float) -> bool:
        """Wait for so long, in parts: one in which this process stands still, the other with it, counts as any."""
        while timeout_s > LOOK_S:
            if self._readable.poll(LOOK_S * 1000):
                return True
            timeout_s -= LOOK_S
        return bool(self._readable.poll(timeout_s * 1000))

    def close(self) -> None:
        """End the conversation."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever receives or sends
        with self._lock:
            self._sock.close()
            self._wire.close()
