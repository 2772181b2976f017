"""Forms: what a form is read into, and what its ways of writing one share."""

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
_MOST_PARAMETERS = 128
"""email of Python 3.11 reads them in a time that grows with their number times the length of all."""


class MalformedFormError(ValueError):
    """A body is not the form that its content type says."""


def parameters_of(header: str) -> dict[str, str]:
    """Give the parameters of a header's value, by their names in small letters. Raises: MalformedFormError."""
    if ";" not in header:
        return {}
    if header.count(";") > _MOST_PARAMETERS:
        raise MalformedFormError("a header has too many parameters")
    message = Message()
    message["content-type"] = header
    return {name.lower(): collapse_rfc2231_value(value) for name, value in message.get_params([])[1:]}


def decoded(raw: bytes | memoryview, charset: str) -> str:
    """Read a text. Raises: LookupError for a charset that is not known, or takes the square of the time; ValueError."""
    if codecs.lookup(charset).name == "punycode":
        raise LookupError(f"no text is sent as {charset}")
    return str(raw, charset)


def read_pairs(text: str, charset: str = "utf-8") -> Form:
    """Read a query, or a form that is written like one. Raises: LookupError for a charset that is not known."""
    form: Form = {}
    for name, value in parse_qsl(text, keep_blank_values=True, encoding=charset):
        form.setdefault(name, []).append(value)
    return form


def read_urlencoded(body: bytes, content_type: str) -> Form:
    """Read a form that is written like a query. Raises: MalformedFormError."""
    charset = parameters_of(content_type).get("charset", "utf-8")
    try:
        return read_pairs(decoded(body.rstrip(), charset), charset)
    except (LookupError, ValueError) as error:
        raise MalformedFormError(str(error)) from error
