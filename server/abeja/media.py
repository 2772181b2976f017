"""Media: parses Content-Type and Content-Disposition like the original's proxy, and decodes texts of headers.

Used by the server to answer requests and by the worker to read forms and encode answers. Source: Go 1.19, package mime,
ParseMediaType, by observed behavior; RFC 2045, RFC 2183 and RFC 2231.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote_to_bytes

FORM = "multipart/form-data"
_WORD = r"[!#$%&'*+.0-9A-Z^_`a-z{|}~-]+"
_BLANK = r"[\t-\r ]*"
_BLANK_CHARACTERS = "\t\n\v\f\r "
_SPECIAL = r"[()<>@,;:\\\"/\[\]?=]"
_MEDIA_TYPE = re.compile(f"{_WORD}(?:/{_WORD})?")
_PARAMETER = re.compile(
    f"{_BLANK};{_BLANK}({_WORD}){_BLANK}={_BLANK}"
    rf'(?:({_WORD})|"((?:\\{_SPECIAL}|[^"\\\r\n]|\\(?!{_SPECIAL}))*)")'
)
_ESCAPED = re.compile(rf"\\({_SPECIAL})")
_NAME = re.compile(_WORD)
_INVALID_BYTES = re.compile("[\udc80-\udcff]")
_BAD_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
_CHARSETS = ("us-ascii", "utf-8")


def parse_media(value: str) -> tuple[str, dict[str, str]] | None:
    """Parse a value: its media type or disposition in lower case, and its parameters; None if it is invalid.

    Texts have one character for each byte. A repeated parameter is invalid; a trailing semicolon is valid.
    """
    type_text = value.partition(";")[0]
    position, media_type = len(type_text), type_text.strip(_BLANK_CHARACTERS).lower()
    if not _MEDIA_TYPE.fullmatch(media_type):
        return None
    fields: dict[str, str] = {}
    end = len(value.rstrip(_BLANK_CHARACTERS))
    while position < end:
        match = _PARAMETER.match(value, position)
        if match is None:
            if value[position:end].lstrip(_BLANK_CHARACTERS) == ";":
                break
            return None
        name, token, quoted = match[1].lower(), match[2], match[3]
        if name in fields:
            return None
        fields[name] = token if token is not None else _ESCAPED.sub(r"\1", quoted)
        position = match.end()
    return media_type, _join_parameters(fields) if any("*" in name for name in fields) else fields


def is_name(name: str) -> bool:
    """Return whether a header can have this name."""
    return _NAME.fullmatch(name) is not None


def text_of(value: bytes) -> str:
    """Decode a text of a head as UTF-8; each invalid byte becomes U+FFFD."""
    return _INVALID_BYTES.sub("\ufffd", value.decode("utf-8", "surrogateescape"))


def _join_parameters(fields: Mapping[str, str]) -> dict[str, str]:
    """Join parameters that have several parts, and decode those with a charset. Source: RFC 2231, 3 and 4."""
    parameters = {name: value for name, value in fields.items() if "*" not in name}
    for name in dict.fromkeys(name.partition("*")[0] for name in fields if "*" in name):
        extended = fields.get(f"{name}*")
        if extended is not None:
            decoded = _decode_extended(extended)
            if decoded is not None:
                parameters[name] = decoded
        elif segments := list(_segments(fields, name)):
            parameters[name] = "".join(segments)
    return parameters


def _segments(fields: Mapping[str, str], name: str) -> Iterator[str]:
    number = 0
    while True:
        segment, encoded = fields.get(f"{name}*{number}"), fields.get(f"{name}*{number}*")
        if segment is not None:
            yield segment
        elif encoded is None:
            return
        else:
            yield (_decode_extended(encoded) if number == 0 else _unescape(encoded)) or ""
        number += 1


def _decode_extended(value: str) -> str | None:
    charset, _, rest = value.partition("'")
    _, quote, escaped = rest.partition("'")
    return _unescape(escaped) if quote and charset.lower() in _CHARSETS else None


def _unescape(value: str) -> str | None:
    return None if _BAD_PERCENT.search(value) else unquote_to_bytes(value.encode("latin-1")).decode("latin-1")
