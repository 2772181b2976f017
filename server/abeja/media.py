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
_BLANKS = "\t\n\v\f\r "
_SPECIAL = r"[()<>@,;:\\\"/\[\]?=]"
_KIND = re.compile(f"{_WORD}(?:/{_WORD})?")
_PARAMETER = re.compile(
    f"{_BLANK};{_BLANK}({_WORD}){_BLANK}={_BLANK}"
    rf'(?:({_WORD})|"((?:\\{_SPECIAL}|[^"\\\r\n]|\\(?!{_SPECIAL}))*)")'
)
_ESCAPED = re.compile(rf"\\({_SPECIAL})")
_NAME = re.compile(_WORD)
_LONE = re.compile("[\udc80-\udcff]")
_BAD_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
_CHARSETS = ("us-ascii", "utf-8")


def parse_media(value: str) -> tuple[str, dict[str, str]] | None:
    """Parse a value: its media type or disposition in lower case, and its parameters; None if it is invalid.

    Texts have one character for each byte. A repeated parameter is invalid; a trailing semicolon is valid.
    """
    kind = value.partition(";")[0]
    at, named = len(kind), kind.strip(_BLANKS).lower()
    if not _KIND.fullmatch(named):
        return None
    said: dict[str, str] = {}
    end = len(value.rstrip(_BLANKS))
    while at < end:
        found = _PARAMETER.match(value, at)
        if found is None:
            if value[at:end].lstrip(_BLANKS) == ";":
                break
            return None
        name, word, quoted = found[1].lower(), found[2], found[3]
        if name in said:
            return None
        said[name] = word if word is not None else _ESCAPED.sub(r"\1", quoted)
        at = found.end()
    return named, _joined(said) if any("*" in name for name in said) else said


def is_name(name: str) -> bool:
    """Return whether a header can have this name."""
    return _NAME.fullmatch(name) is not None


def text_of(value: bytes) -> str:
    """Decode a text of a head as UTF-8; each invalid byte becomes U+FFFD."""
    return _LONE.sub("\ufffd", value.decode("utf-8", "surrogateescape"))


def _joined(said: Mapping[str, str]) -> dict[str, str]:
    """Join parameters that have several parts, and decode those with a charset. Source: RFC 2231, 3 and 4."""
    parameters = {name: value for name, value in said.items() if "*" not in name}
    for name in dict.fromkeys(name.partition("*")[0] for name in said if "*" in name):
        whole = said.get(f"{name}*")
        if whole is not None:
            decoded = _decoded(whole)
            if decoded is not None:
                parameters[name] = decoded
        elif pieces := list(_pieces(said, name)):
            parameters[name] = "".join(pieces)
    return parameters


def _pieces(said: Mapping[str, str], name: str) -> Iterator[str]:
    number = 0
    while True:
        piece, encoded = said.get(f"{name}*{number}"), said.get(f"{name}*{number}*")
        if piece is not None:
            yield piece
        elif encoded is None:
            return
        else:
            yield (_decoded(encoded) if number == 0 else _unescaped(encoded)) or ""
        number += 1


def _decoded(value: str) -> str | None:
    charset, _, rest = value.partition("'")
    _, quote, escaped = rest.partition("'")
    return _unescaped(escaped) if quote and charset.lower() in _CHARSETS else None


def _unescaped(value: str) -> str | None:
    return None if _BAD_PERCENT.search(value) else unquote_to_bytes(value.encode("latin-1")).decode("latin-1")
