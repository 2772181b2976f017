"""The path in a request target. Used by Services that claim every path; imports nothing."""

from __future__ import annotations


def path_in(target: bytes) -> bytes:
    """Return the path as sent. In absolute form, scheme and host precede it (RFC 9112, 3.2.2)."""
    if target.startswith(b"/"):
        return target
    _, scheme, rest = target.partition(b"://")
    return b"/" + rest.partition(b"/")[2] if scheme else target
