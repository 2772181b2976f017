"""Messages: what a server and a worker whose calls are carried say to each other, beside workers/kinds.py.

The answer of a dialect that has no other form for it is that of `pack_answer`.
"""

from __future__ import annotations

import struct

CALL = 32
"""The kind of the message that carries a call to its worker."""
_ANSWER = struct.Struct("<HI")
"""Status, and the length of the header lines before the body."""
_HEAD = _ANSWER.size


def pack_answer(status: int, lines: bytes, body: bytes) -> bytes:
    """Write an answer: its status, and header lines, of which the first is the value of content-type alone."""
    return _ANSWER.pack(status, len(lines)) + lines + body


def read_answer(reply: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Take an answer apart. Returns: its status, the value of content-type, other header lines, and the body."""
    status, length = _ANSWER.unpack_from(reply)
    content_type, _, lines = reply[_HEAD : _HEAD + length].partition(b"\r\n")
    return status, content_type, lines, reply[_HEAD + length :]
