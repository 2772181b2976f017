"""Forms: what a form is read into, and what its ways of writing one share."""

from __future__ import annotations

from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import Any
from urllib.parse import parse_qsl

Form = dict[str, list[Any]]
"""The values of each name, in order: str, bytearray, Upload."""


class MalformedFormError(ValueError):
    """A body is not the form that its content type says."""


def parameters_of(header: str) -> dict[str, str]:
    """Give the parameters of a header's value, by their names in small letters."""
    if ";" not in header:
        return {}
    message = Message()
    message["content-type"] = header
    return {name.lower(): collapse_rfc2231_value(value) for name, value in message.get_params([])[1:]}


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
        return read_pairs(body.rstrip().decode(charset), charset)
    except (LookupError, ValueError) as error:
        raise MalformedFormError(str(error)) from error
