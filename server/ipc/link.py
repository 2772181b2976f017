"""Link: one end of a connection to another process, on an event loop. Created by the owner of that process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.backends.backend import Array

from .arena import WireError
from .sockets import LINGER_S, READ_BYTES, receive_once, send_once, set_buffer_sizes
from .wire import ARENA_BYTES, Message, Wire

_COUNT = struct.Struct("i")

logger = logging.getLogger("penstock.ipc")


class Link:
    """A Wire on a Unix socket. Everything sent in one turn of the loop leaves in one write.

    `on_messages` is called with the messages of each read. `on_lost` is called once, in a later turn, if the other
    process has gone or has sent something invalid, such as messages for which `on_messages` raises; not after `close`.
    Messages sent before the process went are handled first. A closed Link refers to neither callback.
    Ownership: a descriptor that arrives with a message is closed after `on_messages`, unless that removes it from the
    message's list.
    Invariant: sending never blocks. `unsent_bytes` is how much the other side has not read yet; callbacks passed to
    `when_drained` are called when that is 0 again.
    Threads: the event loop's.
    """

    def __init__(
        self, sock: socket.socket, on_messages: Callable[[list[Message]], None], on_lost: Callable[[str], None],
        arena_bytes: int = ARENA_BYTES,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._wire = Wire(self._on_slot_freed, arena_bytes)
        self._buffer = bytearray(READ_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._drain_callbacks: list[Callable[[], None]] = []
        self._flush_scheduled = False
        self._release_scheduled = False
        self._peer_closed = False
        self.closed = False
        set_buffer_sizes(sock)
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    @property
    def arena(self) -> Any:
        """The leases in shared memory for the other side: `leases`, `leased_bytes`, `total_bytes`."""
        return self._wire.arena

    @property
    def unsent_bytes(self) -> int:
        """The bytes of earlier loop turns that the other side has not read; cheap in the usual case, 0."""
        return sum(map(len, self._unsent)) if self._unsent else 0

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the other side has read everything unsent; not after `close`."""
        self._drain_callbacks.append(callback)

    def send(
        self, kind: int, number: int, body: bytes = b"", arrays: Sequence[Array | None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send a message at the end of this loop turn; does nothing on a closed link.

        Raises: TypeError or ValueError for values that cannot be sent; OSError if `descriptors` cannot be duplicated.
        """
        if self.closed or self._peer_closed:
            return
        self._wire.put(kind, number, body, arrays, descriptors)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _on_slot_freed(self) -> None:
        # on any thread, and wherever the collector runs: only threadsafe methods of the loop may be called here
        if not self._release_scheduled and not self.closed:
            self._release_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits for the slot
                self._loop.call_soon_threadsafe(self._schedule_release)

    def _schedule_release(self) -> None:
        if not self.closed:
            self._loop.call_later(LINGER_S, self._send_releases)

    def _send_releases(self) -> None:
        self._release_scheduled = False
        self._flush()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.closed or self._peer_closed:
            return
        wire = self._wire
        wire.put_freed()
        if not wire.out:
            return
        is_blocked = bool(self._unsent)
        data = b"".join(wire.out) if len(wire.out) > 1 else wire.out[0]
        wire.out.clear()
        if is_blocked:
            self._unsent.append(memoryview(data))
            return
        sent = self._write(data)
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._loop.add_writer(self._sock, self._writable)

    def _write(self, data: bytes | memoryview) -> int:
        """Write what the socket accepts. Returns: the number of bytes; all, if nobody will read the rest."""
        try:
            return send_once(self._sock, data, self._wire.descriptors)
        except (BlockingIOError, InterruptedError):
            return 0
        except ConnectionError:
            # it has gone; what it sent before is still to be read, and then its end
            self._peer_closed = True
            self._unsent.clear()
            self._loop.remove_writer(self._sock)
        except OSError as error:
            self._fail(error.strerror or str(error))
        return len(data)

    def _writable(self) -> None:
        data = self._unsent[0]
        sent = self._write(data)
        if sent < len(data):
            self._unsent[0] = data[sent:]
        elif self._unsent:  # otherwise it has gone
            self._unsent.popleft()
            if not self._unsent:
                self._loop.remove_writer(self._sock)
                callbacks, self._drain_callbacks = self._drain_callbacks, []
                for callback in callbacks:
                    self._loop.call_soon(callback)

    def _readable(self) -> int:
        """Read once. Returns: the number of bytes read."""
        try:
            data, descriptors = receive_once(self._sock, self._buffer)
            if not data:
                self._fail("the process is gone")
                return 0
            messages = self._wire.feed(data, descriptors)
            if self._wire.arena.removed_segments:
                self._on_slot_freed()  # a segment occupies memory until the other side unmaps it
        except (BlockingIOError, InterruptedError):
            return 0
        except (OSError, WireError) as error:
            self._fail(str(error))
            return 0
        try:
            if messages:
                self._on_messages(messages)
        except Exception:
            logger.exception("a message from another process could not be handled")
            self._fail("it sent a message that could not be handled")
        finally:
            if self._wire.claimed:
                self._wire.close_claimed()
        return len(data)

    def read_remaining(self) -> None:
        """Read what has arrived from a process that has ended: its children may still hold its socket open.

        They may also keep writing to it, so only what is there now is read.
        """
        if self.closed:
            return
        (remaining,) = _COUNT.unpack(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(_COUNT.size)))
        while remaining > 0 and (read := self._readable()) and not self.closed:
            remaining -= read
        if not self.closed:
            self._readable()  # the end of the stream, if nobody else holds the socket

    def _fail(self, reason: str) -> None:
        if not self.closed:
            on_lost = self._on_lost
            self.close()
            self._on_lost = on_lost
            self._loop.call_soon(self._report_lost, reason)

    def _report_lost(self, reason: str) -> None:
        on_lost, self._on_lost = self._on_lost, _ignore
        on_lost(reason)

    def close(self) -> None:
        """End the connection; what was sent in this loop turn still leaves, if the socket accepts it at once."""
        if self.closed:
            self._on_lost = _ignore
            return
        if not self._unsent and self._wire.out and not self._peer_closed:
            with contextlib.suppress(OSError):
                send_once(self._sock, b"".join(self._wire.out), self._wire.descriptors)
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        self._drain_callbacks.clear()
        self._wire.close()
        # drop the references to the owner, which refers to this Link: the cycle would wait for the garbage collector
        self._on_messages = self._on_lost = _ignore
        self._buffer = bytearray()


def _ignore(_: Any) -> None:
    """Ignore a call for a closed link."""
