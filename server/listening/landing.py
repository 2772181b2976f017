"""Landing: where a large body is put as it comes, by the kernel itself where that is possible; it becomes `bytes`.

Called by the fast lane (`http/fastlane.py`) and the gRPC lane (`http2/connection.py`, `grpc/framing.py`). What uvloop
hands to an ordinary protocol it has copied once, and what is put together of such pieces is copied again
(docs/adr/0019-large-bodies.md; perf/bodies.py).
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, Protocol

LARGE_BYTES = 1 << 18
"""A body from here on is read straight. Below it often comes in one read, and the copies cost less than the calls that
save them: 230 kB over HTTP take 80 to 90 us of the loop either way, 300 kB 100 for 116 (perf/bodies.py)."""
SCRATCH_BYTES = 1 << 16
"""What is read at once of what is no body."""
_RESERVED_BYTES = 1 << 20
"""What a body may take before any of it has come: what its sender says of its length is only a word."""

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # object.h: PyBUF_WRITE


class Landing:
    """The bytes of one body of known size: `have` of them are there.

    They are written into an object of type `bytes` that nobody else has yet, as CPython's C API allows for one made
    without a value; `whole` hands it over. A bytearray would be filled with zeros first, and could be no key, nor be
    parsed as protobuf. Ownership: a view that `room` gives is of memory that the landing keeps: it is not to be used
    once the landing is gone or has grown.
    """

    __slots__ = ("_bytes", "_size", "_view", "have")

    def __init__(self, size: int) -> None:
        self._size = size
        self.have = 0
        self._reserve(min(size, _RESERVED_BYTES))

    @property
    def missing(self) -> int:
        """How many bytes are still to come."""
        return self._size - self.have

    def room(self) -> memoryview:
        """Give where the next bytes belong. It ends with the body, or before; whoever writes there adds to `have`."""
        if self.have == len(self._view):
            self._grow(self.have + 1)
        return self._view[self.have :]

    def put(self, part: bytes | bytearray | memoryview) -> None:
        """Take bytes that are elsewhere, no more than are missing."""
        end = self.have + len(part)
        if end > len(self._view):
            self._grow(end)
        self._view[self.have : end] = part
        self.have = end

    def whole(self) -> bytes:
        """Give the body, once nothing is missing; the landing is not to be used after that."""
        return self._bytes

    def _reserve(self, size: int) -> None:
        if size < 2:
            raise ValueError("bytes of one letter or none are shared, and not to be written to")
        self._bytes: bytes = _new_bytes(None, size)
        self._view: memoryview = _view(_address(self._bytes), size, _WRITABLE)

    def _grow(self, least: int) -> None:
        before, view = self._bytes, self._view  # the view does not keep its bytes alive
        self._reserve(min(self._size, max(least, 2 * len(before))))
        self._view[: self.have] = view[: self.have]


class Lander(Protocol):
    """A connection's protocol that can say where what comes is to be written."""

    def room(self) -> memoryview:
        """Give where what comes next is written. Never empty."""

    def filled(self, size: int) -> None:
        """Learn that so many bytes have been written there."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As of asyncio.Protocol, like the others below."""

    def eof_received(self) -> Any: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Straight(asyncio.BufferedProtocol):
    """Stands in for a Lander at its transport: the kernel then writes where the Lander says.

    An object of its own: a transport asks by type which way a protocol is read for.
    """

    def __init__(self, lander: Lander) -> None:
        self._room = lander.room
        self.buffer_updated = lander.filled  # type: ignore[method-assign, assignment]  # one call less
        self.connection_lost = lander.connection_lost  # type: ignore[method-assign]
        self.eof_received = lander.eof_received  # type: ignore[method-assign]
        self.pause_writing = lander.pause_writing  # type: ignore[method-assign]
        self.resume_writing = lander.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give where what comes next is written."""
        return self._room()
