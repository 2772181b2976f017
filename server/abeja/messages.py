"""Messages between a server and the worker of a handler, in addition to carrying/messages.py.

A call is the length of its head, the head as JSON, and the body. An answer is that of carrying/messages.py. Inside the
worker, a CallRefusedError says why a call is not answered by its handler.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.server.carrying.messages import pack_answer

JSON = b"application/json"
UNEXPECTED = "unexpected error occurred"
"""The text for a handler that raises, or whose result cannot be sent."""
WORKER_DIED = "Internal Server Error: unexpected error of communication with runtime"
"""The text for a call during which the handler's process ended."""
_LENGTH = struct.Struct("<I")

Headers = Sequence[tuple[str, Sequence[str]]]
"""Sorted names in lower case, each with all its values."""


class CallRefusedError(Exception):
    """Answered with `status`, and `text` as the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def pack_head(method: str, content_type: str, headers: Headers, boundary: str | None) -> bytes:
    """Encode what precedes the body of a call. `boundary`: of a form, one character for each byte."""
    head = {"method": method, "type": content_type, "headers": headers, "boundary": boundary}
    encoded = json.dumps(head).encode()
    return _LENGTH.pack(len(encoded)) + encoded


def split_call(call: bytes) -> tuple[bytes, bytes]:
    """Split a call. Returns: its head, for `read_head`, and its body."""
    end = _LENGTH.size + _LENGTH.unpack_from(call)[0]
    return call[_LENGTH.size : end], call[end:]


def read_head(encoded: bytes) -> Mapping[str, Any]:
    """Decode a head: the parameters of `pack_head`."""
    head: dict[str, Any] = json.loads(encoded)
    return head


def status_body(text: str) -> bytes:
    """Encode the body of an answer that is not a handler's."""
    return json.dumps({"status": text}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def pack_refusal(status: int, text: str) -> bytes:
    """Encode the answer to a call that is refused, or whose handler failed."""
    return pack_answer(status, JSON, status_body(text))
