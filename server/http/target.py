"""The path in the target of a request. Asked by the Services that claim every path; imports nothing."""

from __future__ import annotations


def path_in(target: bytes) -> bytes:
    """Give the path, as it was sent. Of a target of absolute form scheme and host stand before it (RFC 9112, 3.2.2)."""
    if target.startswith(b"/"):
        return target
    _, scheme, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if scheme else target
