"""Channel: one end of a connection to another process, for threads that may block, such as a worker's."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Sequence

from penstock.backends.backend import Array

from .sockets import LINGER_S, READ_BYTES, receive_once, send_once, set_buffer_sizes
from .wire import ARENA_BYTES, Message, Wire

WAIT_INTERVAL_S = 0.25
"""The interval into which long waits are divided."""


class Channel:
    """A Wire on a Unix socket. `send` returns when the message has left.

    Threads: any may send; one at a time may receive.
    """

    def __init__(self, sock: socket.socket, arena_bytes: int = ARENA_BYTES) -> None:
        self._sock = sock
        self._wire = Wire(lambda: None, arena_bytes)
        self._buffer = bytearray(READ_BYTES)
        # the collector may free a slot, and report it, at any point, also in `send`
        self._lock = threading.RLock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        set_buffer_sizes(sock)
        sock.setblocking(True)

    def fileno(self) -> int:
        """Return the socket's descriptor, for an event loop to watch."""
        return self._sock.fileno()

    def send(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a message. Raises: TypeError or ValueError for values that cannot be sent; OSError if nobody reads."""
        with self._lock:
            self._wire.put(kind, number, body, arrays, descriptors)
            self._flush()

    def report_freed(self) -> None:
        """Report freed slots to the other side."""
        if self._wire.mirror.freed:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        wire = self._wire
        if wire.mirror.freed or wire.arena.removed_segments:
            wire.put_freed()
        out = wire.out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        sent = 0 if wire.descriptors else self._sock.send(data)
        while sent < len(data):
            sent += send_once(self._sock, memoryview(data)[sent:] if sent else data, wire.descriptors)

    def receive(self, timeout_s: float | None = None) -> list[Message]:
        """Wait for messages; none after `timeout_s`. Raises: EOFError if the other process has gone; WireError."""
        if (
            self._wire.mirror.freed
            and (timeout_s is None or timeout_s > LINGER_S)
            and not self._wait_readable(LINGER_S)
        ):
            self.report_freed()
        messages: list[Message] = []
        while not messages:
            if timeout_s is not None and not self._wait_readable(timeout_s):
                self.report_freed()
                return []
            try:
                data, descriptors = receive_once(self._sock, self._buffer)
            except ConnectionError:
                raise EOFError from None
            if not data:
                raise EOFError
            with self._lock:
                messages = self._wire.feed(data, descriptors)
                if self._wire.arena.removed_segments and not messages:
                    with contextlib.suppress(OSError):  # it has ended, but what it sent before must still be read
                        self._flush()  # a segment occupies memory until the other side unmaps it
        return messages

    def _wait_readable(self, timeout_s: float) -> bool:
        """Wait in intervals: one during which both processes are suspended counts no more than any other."""
        while timeout_s > WAIT_INTERVAL_S:
            if self._readable.poll(WAIT_INTERVAL_S * 1000):
                return True
            timeout_s -= WAIT_INTERVAL_S
        return bool(self._readable.poll(timeout_s * 1000))

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes blocked receivers and senders
        with self._lock:
            self._sock.close()
            self._wire.close()
