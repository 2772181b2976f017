"""ChunkedBody: decodes the chunked transfer coding of a body as it arrives. Source: RFC 9112 section 7.1."""

from __future__ import annotations

import re
from collections.abc import Callable

from .head import HttpError, TooLargeError
from .limits import Limits

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(;[^\x00-\x08\x0a-\x1f\x7f]*)?\Z")
_MAX_LINE = 4096
_MAX_TRAILERS = 64
_STEPS_PER_FEED = range(3 * 64)
"""The number of lines and parts processed at a time; a chunk has three."""


class ChunkedBody:
    """Decodes what `feed` is given; `done` once the last chunk and the trailers have arrived.

    `body` is what has been decoded so far. Body size, number of chunks, and length of each line are limited. Trailers
    are read and dropped.
    """

    def __init__(self, limits: Limits) -> None:
        self.body = bytearray()
        self.size = 0
        self.done = False
        self._limits = limits
        self._chunks = 0
        self._remaining_bytes = 0
        self._trailers = 0
        # not a bound method, which would keep this object and the body alive until a garbage collection
        self._state: Callable[[ChunkedBody, bytearray, int], int] = ChunkedBody._read_size

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return self.size - self._remaining_bytes

    def feed(self, buffer: bytearray) -> int:
        """Decode from the front of `buffer`, a few lines at a time. Returns: the bytes consumed, 0 if more are needed.

        Raises: HttpError.
        """
        position = 0
        for _ in _STEPS_PER_FEED:
            step = -1 if self.done else self._state(self, buffer, position)
            if step < 0:
                break
            position = step
        return position

    def _read_line(self, buffer: bytearray, position: int) -> tuple[bytes, int] | None:
        end = buffer.find(b"\r\n", position)
        if end < 0 and len(buffer) - position <= _MAX_LINE:
            if buffer.find(b"\n", position) >= 0:
                raise HttpError(400, "invalid HTTP request: a line of the chunked body ends in LF without CR")
            return None
        if end < 0 or end - position > _MAX_LINE:
            raise HttpError(400, "invalid HTTP request: a line of the chunked body is too long")
        return bytes(buffer[position:end]), end + 2

    def _read_size(self, buffer: bytearray, position: int) -> int:
        line = self._read_line(buffer, position)
        if line is None:
            return -1
        match = _SIZE.match(line[0])
        if match is None:
            raise HttpError(400, "invalid HTTP request: bad chunk size")
        size = int(match[1], 16)
        if not size:
            self._state = ChunkedBody._read_trailer
            return line[1]
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            text = (
                f"Chunked request body exceeds maximum of {self._limits.max_chunks} non-empty chunks. "
                "Send fewer or larger HTTP chunks."
            )
            raise HttpError(400, text)
        self.size += size
        if self.size > self._limits.max_body_bytes:
            raise TooLargeError(too_large_text(self.size, self._limits))
        self._remaining_bytes = size
        self._state = ChunkedBody._read_bytes
        return line[1]

    def _read_bytes(self, buffer: bytearray, position: int) -> int:
        if position == len(buffer):
            return -1
        part = buffer[position : position + self._remaining_bytes]
        self.body += part
        self._remaining_bytes -= len(part)
        if not self._remaining_bytes:
            self._state = ChunkedBody._read_end
        return position + len(part)

    def _read_end(self, buffer: bytearray, position: int) -> int:
        if len(buffer) - position < 2:
            return -1
        if buffer[position : position + 2] != b"\r\n":
            raise HttpError(400, "invalid HTTP request: a chunk is longer than its size")
        self._state = ChunkedBody._read_size
        return position + 2

    def _read_trailer(self, buffer: bytearray, position: int) -> int:
        line = self._read_line(buffer, position)
        if line is None:
            return -1
        if not line[0]:
            self.done = True
        self._trailers += 1
        if self._trailers > _MAX_TRAILERS:
            raise HttpError(431, "request has too many trailer fields")
        return line[1]


def too_large_text(size: int, limits: Limits) -> str:
    """Return Triton's error text for a body that is too large."""
    return (
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limits.max_body_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
