"""Messages between a server and a worker whose calls are carried, in addition to workers/kinds.py.

`pack_answer` is the answer format of the dialects that define none of their own.
"""

from __future__ import annotations

import struct

CALL = 32
"""The kind of the message that carries a call to its worker."""
_ANSWER = struct.Struct("<HI")
"""Status, and the length of the header lines before the body."""
_HEAD = _ANSWER.size


def pack_answer(status: int, lines: bytes, body: bytes) -> bytes:
    """Encode an answer: its status, and header lines, of which the first is the bare value of content-type."""
    return _ANSWER.pack(status, len(lines)) + lines + body


def read_answer(reply: bytes) -> tuple[int, bytes, bytes, bytes]:
    """Decode an answer. Returns: its status, the value of content-type, other header lines, and the body."""
    status, length = _ANSWER.unpack_from(reply)
    content_type, _, lines = reply[_HEAD : _HEAD + length].partition(b"\r\n")
    return status, content_type, lines, reply[_HEAD + length :]
