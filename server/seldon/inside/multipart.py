"""Multipart: the fields and files of a form. Source: RFC 7578, parsed as leniently as in Werkzeug 2.2."""

from __future__ import annotations

import codecs
import re
from email.message import Message
from email.utils import collapse_rfc2231_value

_BREAK = rb"(?:\r\n|\n|\r)"
_BLANK_LINE = re.compile(rb"\r\n\r\n|\r\r|\n\n")
_CONTINUED = re.compile(_BREAK + rb"[ \t]")
_ENDING = rb"(--[^\S\n\r]*" + _BREAK + rb"?|[^\S\n\r]*" + _BREAK + rb")"

_MAX_HEADER_BYTES, _MAX_PARAMETERS = 1 << 16, 128
"""The most bytes of a part's headers, and the most parameters of one. Their parsing in Python 3.11's email takes time
that grows with both."""


def parse_form(body: bytes, content_type: str) -> tuple[dict[str | None, str], dict[str | None, bytes]]:
    """Parse a form: its fields and its files, the first of each name. A malformed form has none.

    Raises: LookupError for a field in an unknown charset.
    """
    try:
        boundary = (_parameter(content_type, "boundary") or "").encode("ascii")
        return _parse_parts(body, boundary) if boundary else ({}, {})
    except ValueError:
        return {}, {}


def _parse_parts(body: bytes, boundary: bytes) -> tuple[dict[str | None, str], dict[str | None, bytes]]:
    fields: dict[str | None, str] = {}
    files: dict[str | None, bytes] = {}
    line = b"--" + re.escape(boundary) + _ENDING
    between = re.compile(_BREAK + line)
    delimiter = re.compile(_BREAK + b"?" + line).search(body)
    while delimiter is None or not delimiter[1].startswith(b"--"):
        blank = delimiter and _BLANK_LINE.search(body, delimiter.end())
        next_delimiter = blank and between.search(body, blank.end())
        if not delimiter or not blank or not next_delimiter:
            raise ValueError("the form is truncated")
        if blank.start() - delimiter.end() > _MAX_HEADER_BYTES:
            raise ValueError("a part of a form has headers that are too long")
        headers = _headers(body[delimiter.end() : blank.start()])
        content = body[blank.end() : next_delimiter.start()]
        disposition = headers["content-disposition"]
        name = _parameter(disposition, "name")
        if _parameter(disposition, "filename") is not None:
            files.setdefault(name, content)
        else:
            charset = _parameter(headers.get("content-type", ""), "charset") or "utf-8"
            if codecs.lookup(charset).name == "punycode":  # decoding takes quadratic time
                raise LookupError(f"not a text charset: {charset}")
            fields.setdefault(name, content.decode(charset, "replace"))
        delimiter = next_delimiter
    return fields, files


def _headers(lines: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _CONTINUED.sub(b" ", lines).splitlines():
        if line.strip():
            name, colon, value = line.decode().partition(":")
            if not colon:
                raise ValueError("a line of a form's headers has no colon")
            found.setdefault(name.strip().lower(), value.strip())
    if "content-disposition" not in found:
        raise ValueError("a part of a form has no Content-Disposition")
    return found


def _parameter(header: str, name: str) -> str | None:
    """Return a parameter of a header's value, the last of its name; None if it is missing."""
    if header.count(";") > _MAX_PARAMETERS:
        raise ValueError("a header of a form has too many parameters")
    message = Message()
    message["content-type"] = header
    values = [value for key, value in message.get_params([]) if key.lower() == name]
    return collapse_rfc2231_value(values[-1]) if values else None
