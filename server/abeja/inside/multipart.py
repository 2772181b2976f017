"""Multipart: splits a form into its parts as the original's proxy does.

Source: RFC 7578; Go 1.19, packages mime/multipart and net/textproto, by observed behavior: a preamble is skipped, lines
may end with a line feed alone if the first one does, only quoted-printable is decoded, truncated headers end the form,
and truncated content is an error.
"""

from __future__ import annotations

import quopri
import re
from dataclasses import dataclass

from penstock.server.abeja.media import parse_media, text_of

from .errors import CallRefusedError

_CUT = ": unexpected EOF"
_TRAILING = re.compile(rb"(?<![ \t])[ \t]++(?=\r?\n|\Z)")
"""The blanks that RFC 2045, 6.7, removes at the end of a line. Matches only from the first blank: linear time."""
_AFTER_EDGE = (b" ", b"\t", b"\r", b"\n", b"--")


@dataclass(frozen=True, slots=True)
class MultipartPart:
    """One part. What it does not specify is None; a file has its base name, without folders."""

    content_type: str | None
    file_name: str | None
    form_name: str | None
    content: bytes


def parts_of(body: bytes, boundary: bytes) -> list[MultipartPart]:
    """Parse a form. Raises: CallRefusedError (400; 503, as in the original, for truncated content)."""
    if not boundary:
        raise _unreadable("its boundary is empty")
    edge = b"--" + boundary
    parts: list[MultipartPart] = []
    begun, newline = _begin(body, edge)
    while begun is not None:
        headed = _headers(body, begun)
        if headed is None:
            break
        headers, at = headed
        end = _end(body, at, edge, newline)
        parts.append(_part(headers, body[at:end]))
        begun = _next(body, end, edge, newline)
    return parts


def _begin(body: bytes, edge: bytes) -> tuple[int | None, bytes]:
    """Return the start of the first part, None if there is none; and the line end."""
    at = 0
    while at < len(body):
        end = body.find(b"\n", at) + 1 or len(body)
        if body.startswith(edge, at):
            after = body[at + len(edge) : end]
            rest = after.lstrip(b" \t")
            if rest in (b"\r\n", b"\n"):
                return end, rest
            if after.startswith(b"--") and after[2:].lstrip(b" \t") in (b"", b"\r\n"):
                return None, b""
        at = end
    raise _unreadable("its boundary is nowhere in it")


def _next(body: bytes, at: int, edge: bytes, newline: bytes) -> int | None:
    """Return the start of the part after a content; None after the last."""
    if body.startswith(newline, at):
        at += len(newline)
    end = body.find(b"\n", at) + 1 or len(body)
    after = body[at + len(edge) : end]
    if after.lstrip(b" \t") == newline:
        return end
    if after.startswith(b"--") and after[2:].lstrip(b" \t") in (b"", newline):
        return None
    raise _unreadable("what follows its boundary is neither a part nor the end")


def _end(body: bytes, at: int, edge: bytes, newline: bytes) -> int:
    """Return the end of a content. An empty content needs not even a newline before the next boundary."""
    if body.startswith(edge, at) and _ends(body, at + len(edge)):
        return at
    between = newline + edge
    found = body.find(between, at)
    while found >= 0 and not _ends(body, found + len(between)):
        found = body.find(between, found + len(between))
    if found < 0:
        raise CallRefusedError(503, _CUT)
    return found


def _ends(body: bytes, at: int) -> bool:
    return at == len(body) or body.startswith(_AFTER_EDGE, at)


def _headers(body: bytes, at: int) -> tuple[dict[bytes, bytes], int] | None:
    """Parse a part's headers, the first of each name.

    Returns: these, and the start of the part's content; None if the headers are truncated.
    """
    lines: list[list[bytes]] = []
    while at < len(body):
        end = body.find(b"\n", at)
        line = body[at : end if end >= 0 else len(body)].removesuffix(b"\r")
        at = end + 1 or len(body)
        if not line:
            fields = [b" ".join(line).partition(b":") for line in reversed(lines)]
            return {name.lower(): value.lstrip(b" \t") for name, _, value in fields}, at
        if line[:1] in (b" ", b"\t"):
            if not lines:
                raise _unreadable("the headers of a part begin with a blank")
            lines[-1].append(line.strip(b" \t"))
        elif b":" not in line:
            raise _unreadable("a header of a part has no colon")
        else:
            lines.append([line.strip(b" \t")])
    return None


def _part(headers: dict[bytes, bytes], content: bytes) -> MultipartPart:
    said = parse_media(headers.get(b"content-disposition", b"").decode("latin-1"))
    kind, parameters = said if said is not None else ("", {})
    file_name = parameters.get("filename", "")
    form_name = parameters.get("name", "") if kind == "form-data" else ""
    if headers.get(b"content-transfer-encoding", b"").lower() == b"quoted-printable":
        content = quopri.decodestring(_TRAILING.sub(b"", content))
    return MultipartPart(
        text_of(headers.get(b"content-type", b"")) or None,
        (_text(file_name.rstrip("/").rpartition("/")[2]) or "/") if file_name else None,
        _text(form_name) or None,
        content,
    )


def _text(text: str) -> str:
    return text_of(text.encode("latin-1"))


def _unreadable(why: str) -> CallRefusedError:
    return CallRefusedError(400, f"the form cannot be read: {why}")
