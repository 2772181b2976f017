"""HTTP/1.1 answers, parsed from pieces of any size. Source: RFC 9112, sections 4 to 7."""

from __future__ import annotations

import re
from collections.abc import Callable

TEXT_BYTES = 200
_HEAD_BYTES = 1 << 18
_HEX = re.compile(rb"[0-9a-f]{1,15}", re.IGNORECASE)
_DIGITS = re.compile(rb"[0-9]{1,18}")
_BODILESS = frozenset({204, 304})
_SWITCHING = 101


class BadAnswerError(Exception):
    """The bytes received are not a valid answer."""


class Answer:
    """One answer. Of its body, whatever its size, only the beginning is kept, without decoding.

    `head`: in lower case; `keeps_alive`: whether the connection can be reused; `plain_bytes`: the length of the head if
    it had a Content-Length and nothing preceded it, else 0.
    """

    __slots__ = ("_partial", "_remaining", "_step", "head", "keeps_alive", "plain_bytes", "status", "text")

    def __init__(self) -> None:
        self.status = 0
        self.head = b""
        self.keeps_alive = True
        self.text = b""
        self.plain_bytes = 0
        self._partial = b""
        self._remaining = 0
        self._step: Callable[[bytes, int], int] | None = self._head

    def feed(self, data: bytes) -> bytes | None:
        """Feed received bytes. Returns: the bytes after the answer's end, None before it. Raises: BadAnswerError."""
        data = self._partial + data if self._partial else data
        position = 0
        while self._step is not None:
            after = self._step(data, position) if position < len(data) else -1
            if after < 0:
                self._partial = data[position:]
                if len(self._partial) > _HEAD_BYTES:
                    raise BadAnswerError("a head without an end")
                return None
            position = after
        return data[position:]

    def ends_with_connection(self) -> bool:
        """Return whether the end of the connection ends the answer."""
        return self._step == self._unsized_body

    # -- steps: each takes the bytes from `position`, and returns where the next continues, or -1 if it needs more ----

    def _head(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            return -1
        head = data[position:end].lower()
        if not (head.startswith(b"http/1.") and head[8:9] == b" " and head[9:12].isdigit()):
            raise BadAnswerError(f"no head of HTTP/1.1: {data[position : position + 40]!r}")
        self.status = status = int(head[9:12])
        if 100 <= status < 200 and status != _SWITCHING:
            return end + 4
        self.head = head
        options = field_in(head, b"\r\nconnection:")
        self.keeps_alive = b"close" not in options if head[7:8] != b"0" else b"keep-alive" in options
        if status in _BODILESS:
            self._step = None
        elif coding := field_in(head, b"\r\ntransfer-encoding:"):
            self._step = self._chunk_size if coding.endswith(b"chunked") else self._unsized_body
        elif length := field_in(head, b"\r\ncontent-length:"):
            self._length(length)
            self.plain_bytes = end + 4 if position == 0 else 0
        else:
            self._step = self._unsized_body
        self.keeps_alive = self.keeps_alive and self._step != self._unsized_body
        return end + 4

    def _length(self, length: bytes) -> None:
        if not _DIGITS.fullmatch(length):
            raise BadAnswerError(f"a content-length of {length!r}")
        self._remaining = int(length)
        self._step = self._sized_body if self._remaining else None

    def _sized_body(self, data: bytes, position: int) -> int:
        after = self._body(data, position)
        if not self._remaining:
            self._step = None
        return after

    def _unsized_body(self, data: bytes, position: int) -> int:
        self._remaining = len(data) - position
        return self._body(data, position)

    def _chunk_size(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return -1
        size = data[position:end].partition(b";")[0].strip()
        if not _HEX.fullmatch(size):
            raise BadAnswerError(f"a chunk of size {size!r}")
        self._remaining = int(size, 16)
        self._step = self._chunk if self._remaining else self._trailer
        return end + 2

    def _chunk(self, data: bytes, position: int) -> int:
        after = self._body(data, position)
        if not self._remaining:
            self._step = self._chunk_end
        return after

    def _chunk_end(self, data: bytes, position: int) -> int:
        if len(data) - position < 2:
            return -1
        if data[position : position + 2] != b"\r\n":
            raise BadAnswerError("a chunk longer than it said")
        self._step = self._chunk_size
        return position + 2

    def _trailer(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end == position:
            self._step = None
        return end + 2 if end >= 0 else -1

    def _body(self, data: bytes, position: int) -> int:
        after = min(position + self._remaining, len(data))
        self._remaining -= after - position
        if len(self.text) < TEXT_BYTES:
            self.text += data[position : min(after, position + TEXT_BYTES - len(self.text))]
        return after


def field_in(head: bytes, name: bytes) -> bytes:
    """Return a field of a head in lower case, or empty. `name` includes the preceding line end and the colon."""
    position = head.find(name)
    if position < 0:
        return b""
    position += len(name)
    end = head.find(b"\r\n", position)
    return head[position:end].strip() if end >= 0 else head[position:].strip()
