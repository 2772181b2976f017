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

    `head`: in lower case; `keep`: whether the connection can be reused; `plain_bytes`: the length of the head if it had
    a Content-Length and nothing preceded it, else 0.
    """

    __slots__ = ("_kept", "_left", "_step", "head", "keep", "plain_bytes", "status", "text")

    def __init__(self) -> None:
        self.status = 0
        self.head = b""
        self.keep = True
        self.text = b""
        self.plain_bytes = 0
        self._kept = b""
        self._left = 0
        self._step: Callable[[bytes, int], int] | None = self._head

    def take(self, came: bytes) -> bytes | None:
        """Feed received bytes. Returns: the bytes after the answer's end, None before it. Raises: BadAnswerError."""
        came = self._kept + came if self._kept else came
        at = 0
        while self._step is not None:
            after = self._step(came, at) if at < len(came) else -1
            if after < 0:
                self._kept = came[at:]
                if len(self._kept) > _HEAD_BYTES:
                    raise BadAnswerError("a head without an end")
                return None
            at = after
        return came[at:]

    def over(self) -> bool:
        """Return whether the end of the connection ends the answer."""
        return self._step == self._rest

    # -- steps: each takes the bytes from `at`, and returns where the next step continues, or -1 if it needs more ----

    def _head(self, came: bytes, at: int) -> int:
        end = came.find(b"\r\n\r\n", at)
        if end < 0:
            return -1
        head = came[at:end].lower()
        if not (head.startswith(b"http/1.") and head[8:9] == b" " and head[9:12].isdigit()):
            raise BadAnswerError(f"no head of HTTP/1.1: {came[at : at + 40]!r}")
        self.status = status = int(head[9:12])
        if 100 <= status < 200 and status != _SWITCHING:
            return end + 4
        self.head = head
        options = field_in(head, b"\r\nconnection:")
        self.keep = b"close" not in options if head[7:8] != b"0" else b"keep-alive" in options
        if status in _BODILESS:
            self._step = None
        elif coding := field_in(head, b"\r\ntransfer-encoding:"):
            self._step = self._size if coding.endswith(b"chunked") else self._rest
        elif length := field_in(head, b"\r\ncontent-length:"):
            self._length(length)
            self.plain_bytes = end + 4 if at == 0 else 0
        else:
            self._step = self._rest
        self.keep = self.keep and self._step != self._rest
        return end + 4

    def _length(self, length: bytes) -> None:
        if not _DIGITS.fullmatch(length):
            raise BadAnswerError(f"a content-length of {length!r}")
        self._left = int(length)
        self._step = self._exactly if self._left else None

    def _exactly(self, came: bytes, at: int) -> int:
        after = self._body(came, at)
        if not self._left:
            self._step = None
        return after

    def _rest(self, came: bytes, at: int) -> int:
        self._left = len(came) - at
        return self._body(came, at)

    def _size(self, came: bytes, at: int) -> int:
        end = came.find(b"\r\n", at)
        if end < 0:
            return -1
        size = came[at:end].partition(b";")[0].strip()
        if not _HEX.fullmatch(size):
            raise BadAnswerError(f"a chunk of size {size!r}")
        self._left = int(size, 16)
        self._step = self._chunk if self._left else self._trailer
        return end + 2

    def _chunk(self, came: bytes, at: int) -> int:
        after = self._body(came, at)
        if not self._left:
            self._step = self._chunk_end
        return after

    def _chunk_end(self, came: bytes, at: int) -> int:
        if len(came) - at < 2:
            return -1
        if came[at : at + 2] != b"\r\n":
            raise BadAnswerError("a chunk longer than it said")
        self._step = self._size
        return at + 2

    def _trailer(self, came: bytes, at: int) -> int:
        end = came.find(b"\r\n", at)
        if end == at:
            self._step = None
        return end + 2 if end >= 0 else -1

    def _body(self, came: bytes, at: int) -> int:
        after = min(at + self._left, len(came))
        self._left -= after - at
        if len(self.text) < TEXT_BYTES:
            self.text += came[at : min(after, at + TEXT_BYTES - len(self.text))]
        return after


def field_in(head: bytes, name: bytes) -> bytes:
    """Return a field of a head in lower case, or empty. `name` includes the preceding line end and the colon."""
    at = head.find(name)
    if at < 0:
        return b""
    at += len(name)
    end = head.find(b"\r\n", at)
    return head[at:end].strip() if end >= 0 else head[at:].strip()
