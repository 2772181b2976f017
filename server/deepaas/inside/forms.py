"""Forms: the values of a form, and what its encodings have in common."""

from __future__ import annotations

import codecs
import re
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Any
from urllib.parse import parse_qsl

Form = dict[str, list[Any]]
"""The values of each name, in order: str, bytearray, Upload."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What aiohttp has in no header, of a part or of an answer."""
_MAX_PARAMETERS = 128
"""Their parsing in Python 3.11's email takes time proportional to their number times the total length."""


class MalformedFormError(ValueError):
    """A body is not a form of its content type."""


def parameters_of(header: str) -> dict[str, str]:
    """Return the parameters of a header's value, by their names in lower case. Raises: MalformedFormError."""
    if ";" not in header:
        return {}
    if header.count(";") > _MAX_PARAMETERS:
        raise MalformedFormError("a header has too many parameters")
    message = Message()
    message["content-type"] = header
    return {name.lower(): collapse_rfc2231_value(value) for name, value in message.get_params([])[1:]}


def decode(raw: bytes | memoryview, charset: str) -> str:
    """Decode a text. Raises: LookupError for a charset that is unknown or takes quadratic time; ValueError."""
    if codecs.lookup(charset).name == "punycode":
        raise LookupError(f"not a text charset: {charset}")
    return str(raw, charset)


def read_pairs(text: str, charset: str = "utf-8") -> Form:
    """Parse a query, or a form of the same syntax. Raises: LookupError for an unknown charset."""
    form: Form = {}
    for name, value in parse_qsl(text, keep_blank_values=True, encoding=charset):
        form.setdefault(name, []).append(value)
    return form


def read_urlencoded(body: bytes, content_type: str) -> Form:
    """Parse a form with the syntax of a query. Raises: MalformedFormError."""
    charset = parameters_of(content_type).get("charset", "utf-8")
    try:
        return read_pairs(decode(body.rstrip(), charset), charset)
    except (LookupError, ValueError) as error:
        raise MalformedFormError(str(error)) from error
