"""Bodies: how Flask parses the body of a request. Called by `service.py`.

Source: Flask 1.1.1 and Werkzeug 0.16, `Request.get_json`, as called by Cortex 0.9 to 0.11.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import orjson

from penstock.server.json_text import (
    TOO_MANY_VALUES,
    brackets_in,
    depth_of,
    has_more_values,
    may_have_long_integers,
)

_MEDIA_TYPE = re.compile(rb"\s*([^;,\s]+)")
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF16_LE, "utf-16"),
)  # fmt: skip
_ZERO_PATTERNS = (
    (re.compile(b"\x01\x01\x01[\x00\x01]"), "utf-32-be"),
    (re.compile(b"\x01[\x00\x01]\x01[\x00\x01]|\x01[\x00\x01]"), "utf-16-be"),
    (re.compile(b"[\x00\x01]\x01\x01\x01"), "utf-32-le"),
    (re.compile(b"[\x00\x01]\x01[\x00\x01]\x01|[\x00\x01]\x01"), "utf-16-le"),
)
"""Which of the first four bytes, or of the only two, are 0, written as 1 here; in order of precedence."""


class MalformedError(ValueError):
    """A body that is not JSON."""


def is_json(content_type: bytes) -> bool:
    """Return whether a Content-Type declares JSON; otherwise the sample is None."""
    match = _MEDIA_TYPE.match(content_type)
    media_type = match[1].lower() if match else b""
    return media_type == b"application/json" or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    )


def parse_sample(body: bytes, max_depth: int) -> Any:
    """Parse a body as Python's json does: with the last of equal keys, NaN, infinities, integers of any size.

    Raises: MalformedError if it is not JSON, is nested deeper than `max_depth`, or has more than MAX_VALUES.
    """
    if has_more_values(body):
        raise MalformedError(TOO_MANY_VALUES)
    if not may_have_long_integers(body):
        try:
            sample = orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
        else:
            _check_depth(body, max_depth)
            return sample
    try:
        text = body.decode(encoding_of(body))
        _check_depth(text.encode(), max_depth)
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(str(error)) from None


def _check_depth(body: bytes, max_depth: int) -> None:
    if len(body) > 2 * max_depth and brackets_in(body) > max_depth and depth_of(body) > max_depth:
        raise MalformedError(f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")


def encoding_of(body: bytes) -> str:
    """Return the UTF encoding of a JSON text, from its byte order mark or the zeros among its first bytes."""
    head = body[:4]
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    zeros = bytes(byte == 0 for byte in head)
    return next((encoding for pattern, encoding in _ZERO_PATTERNS if pattern.fullmatch(zeros)), "utf-8")
