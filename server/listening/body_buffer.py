"""BodyBuffer: receives a large body, written by the kernel directly if possible; it becomes `bytes`.

Used by the fast lane (`http/fastlane.py`) and the gRPC lane (`http2/connection.py`, `grpc/framing.py`). uvloop copies
what it passes to an ordinary protocol, and joining the pieces copies it again (docs/adr/0019-large-bodies.md;
perf/large_requests.py).
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, Protocol

LARGE_BYTES = 1 << 18
"""A body of at least this size is read directly. Smaller ones often arrive in one read, and the copies cost less than
the calls that avoid them: 230 kB over HTTP take 80 to 90 us of the loop either way, 300 kB 100 instead of 116
(perf/large_requests.py)."""
SCRATCH_BYTES = 1 << 16
"""The size of one read outside large bodies."""
_RESERVED_BYTES = 1 << 20
"""The most memory allocated for a body before any of it arrives: the announced length cannot be trusted."""

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # object.h: PyBUF_WRITE


class BodyBuffer:
    """The bytes of one body of known size, of which `received_bytes` have arrived.

    They are written into a `bytes` object that nothing else references yet, as CPython's C API permits for one created
    without a value; `finish` returns it. A bytearray would be zero-filled first, and could not be used as a key or
    parsed as protobuf. Ownership: a view from `free_space` refers to memory of the buffer, and must not be used once
    the buffer is gone or has grown.
    """

    __slots__ = ("_bytes", "_size", "_view", "received_bytes")

    def __init__(self, size: int) -> None:
        self._size = size
        self.received_bytes = 0
        self._reserve(min(size, _RESERVED_BYTES))

    @property
    def missing_bytes(self) -> int:
        """How many bytes are still to arrive."""
        return self._size - self.received_bytes

    def free_space(self) -> memoryview:
        """Return the space for the next bytes, up to the end of the body; the writer adds to `received_bytes`."""
        if self.received_bytes == len(self._view):
            self._grow(self.received_bytes + 1)
        return self._view[self.received_bytes :]

    def append(self, part: bytes | bytearray | memoryview) -> None:
        """Copy bytes from elsewhere, at most as many as are missing."""
        end = self.received_bytes + len(part)
        if end > len(self._view):
            self._grow(end)
        self._view[self.received_bytes : end] = part
        self.received_bytes = end

    def finish(self) -> bytes:
        """Return the complete body; the buffer must not be used after that."""
        return self._bytes

    def _reserve(self, size: int) -> None:
        if size < 2:
            raise ValueError("bytes of one letter or none are shared, and not to be written to")
        self._bytes: bytes = _new_bytes(None, size)
        self._view: memoryview = _view(_address(self._bytes), size, _WRITABLE)

    def _grow(self, min_size: int) -> None:
        before, view = self._bytes, self._view  # the view does not keep its bytes alive
        self._reserve(min(self._size, max(min_size, 2 * len(before))))
        self._view[: self.received_bytes] = view[: self.received_bytes]


class BufferOwner(Protocol):
    """A connection protocol that provides the buffer for incoming data."""

    def read_buffer(self) -> memoryview:
        """Return the buffer for the next read. Never empty."""

    def on_read(self, size: int) -> None:
        """Process `size` bytes written to that buffer."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As in asyncio.Protocol, like the methods below."""

    def eof_received(self) -> Any: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class DirectReader(asyncio.BufferedProtocol):
    """Wraps a BufferOwner for its transport, so that the kernel writes to the owner's buffer.

    A separate object, because a transport chooses how to read by the type of its protocol.
    """

    def __init__(self, owner: BufferOwner) -> None:
        self._read_buffer = owner.read_buffer
        self.buffer_updated = owner.on_read  # type: ignore[method-assign, assignment]  # saves a call
        self.connection_lost = owner.connection_lost  # type: ignore[method-assign]
        self.eof_received = owner.eof_received  # type: ignore[method-assign]
        self.pause_writing = owner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = owner.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self._read_buffer()
