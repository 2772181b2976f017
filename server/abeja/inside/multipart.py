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
from penstock.server.abeja.messages import CallRefusedError

_TRUNCATED = ": unexpected EOF"
_TRAILING = re.compile(rb"(?<![ \t])[ \t]++(?=\r?\n|\Z)")
"""The blanks that RFC 2045, 6.7, removes at the end of a line. Matches only from the first blank: linear time."""
_AFTER_DELIMITER = (b" ", b"\t", b"\r", b"\n", b"--")


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
        raise _form_error("its boundary is empty")
    delimiter = b"--" + boundary
    parts: list[MultipartPart] = []
    start, newline = _find_first_part(body, delimiter)
    while start is not None:
        parsed = _parse_headers(body, start)
        if parsed is None:
            break
        headers, position = parsed
        end = _find_content_end(body, position, delimiter, newline)
        parts.append(_make_part(headers, body[position:end]))
        start = _find_next_part(body, end, delimiter, newline)
    return parts


def _find_first_part(body: bytes, delimiter: bytes) -> tuple[int | None, bytes]:
    """Return the start of the first part, None if there is none; and the line end."""
    position = 0
    while position < len(body):
        end = body.find(b"\n", position) + 1 or len(body)
        if body.startswith(delimiter, position):
            after = body[position + len(delimiter) : end]
            line_end = after.lstrip(b" \t")
            if line_end in (b"\r\n", b"\n"):
                return end, line_end
            if after.startswith(b"--") and after[2:].lstrip(b" \t") in (b"", b"\r\n"):
                return None, b""
        position = end
    raise _form_error("it does not contain its boundary")


def _find_next_part(body: bytes, position: int, delimiter: bytes, newline: bytes) -> int | None:
    """Return the start of the part after a content; None after the last."""
    if body.startswith(newline, position):
        position += len(newline)
    end = body.find(b"\n", position) + 1 or len(body)
    after = body[position + len(delimiter) : end]
    if after.lstrip(b" \t") == newline:
        return end
    if after.startswith(b"--") and after[2:].lstrip(b" \t") in (b"", newline):
        return None
    raise _form_error("what follows its boundary is neither a part nor the end")


def _find_content_end(body: bytes, position: int, delimiter: bytes, newline: bytes) -> int:
    """Return the end of a content. An empty content needs not even a newline before the next boundary."""
    if body.startswith(delimiter, position) and _ends_delimiter(body, position + len(delimiter)):
        return position
    separator = newline + delimiter
    index = body.find(separator, position)
    while index >= 0 and not _ends_delimiter(body, index + len(separator)):
        index = body.find(separator, index + len(separator))
    if index < 0:
        raise CallRefusedError(503, _TRUNCATED)
    return index


def _ends_delimiter(body: bytes, position: int) -> bool:
    return position == len(body) or body.startswith(_AFTER_DELIMITER, position)


def _parse_headers(body: bytes, position: int) -> tuple[dict[bytes, bytes], int] | None:
    """Parse a part's headers, the first of each name.

    Returns: these, and the start of the part's content; None if the headers are truncated.
    """
    lines: list[list[bytes]] = []
    while position < len(body):
        end = body.find(b"\n", position)
        line = body[position : end if end >= 0 else len(body)].removesuffix(b"\r")
        position = end + 1 or len(body)
        if not line:
            fields = [b" ".join(line).partition(b":") for line in reversed(lines)]
            return {name.lower(): value.lstrip(b" \t") for name, _, value in fields}, position
        if line[:1] in (b" ", b"\t"):
            if not lines:
                raise _form_error("the headers of a part begin with a blank")
            lines[-1].append(line.strip(b" \t"))
        elif b":" not in line:
            raise _form_error("a header of a part has no colon")
        else:
            lines.append([line.strip(b" \t")])
    return None


def _make_part(headers: dict[bytes, bytes], content: bytes) -> MultipartPart:
    disposition = parse_media(headers.get(b"content-disposition", b"").decode("latin-1"))
    kind, parameters = disposition if disposition is not None else ("", {})
    file_name = parameters.get("filename", "")
    form_name = parameters.get("name", "") if kind == "form-data" else ""
    if headers.get(b"content-transfer-encoding", b"").lower() == b"quoted-printable":
        content = quopri.decodestring(_TRAILING.sub(b"", content))
    return MultipartPart(
        text_of(headers.get(b"content-type", b"")) or None,
        (_decode_text(file_name.rstrip("/").rpartition("/")[2]) or "/") if file_name else None,
        _decode_text(form_name) or None,
        content,
    )


def _decode_text(text: str) -> str:
    return text_of(text.encode("latin-1"))


def _form_error(reason: str) -> CallRefusedError:
    return CallRefusedError(400, f"the form cannot be read: {reason}")
