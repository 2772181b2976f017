"""Messages: what a server and the worker of a handler say to each other, beside carrying/messages.py.

A call is the length of what its head says, that as JSON, and the body. An answer is that of carrying/messages.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

JSON = b"application/json"
UNEXPECTED = "unexpected error occurred"
"""What is said of a handler that raises, or returns what cannot be sent."""
LOST = "Internal Server Error: unexpected error of communication with runtime"
"""What is said of a call under which the handler's process has ended."""
_LENGTH = struct.Struct("<I")

Headers = Sequence[tuple[str, Sequence[str]]]
"""Names in small letters and in order, each with all its values."""


def pack_head(method: str, content_type: str, headers: Headers, boundary: str | None) -> bytes:
    """Write what stands before the body of a call. `boundary`: of a form, one character for each byte."""
    said = {"method": method, "type": content_type, "headers": headers, "boundary": boundary}
    written = json.dumps(said).encode()
    return _LENGTH.pack(len(written)) + written


def split_call(call: bytes) -> tuple[bytes, bytes]:
    """Take a call apart. Returns: what its head says, for `read_head`, and its body."""
    end = _LENGTH.size + _LENGTH.unpack_from(call)[0]
    return call[_LENGTH.size : end], call[end:]


def read_head(said: bytes) -> Mapping[str, Any]:
    """Read what a head says: the parameters of `pack_head`."""
    head: dict[str, Any] = json.loads(said)
    return head


def status_body(text: str) -> bytes:
    """Write the body of an answer that is not a handler's."""
    return json.dumps({"status": text}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
