"""Multipart: the fields and files of a form. Source: RFC 7578, parsed as strictly as by aiohttp 3.14.

Lines end with CRLF; bytes before the first boundary and after the last are ignored. Files are not copied: an Upload is
a view of the body.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from dataclasses import dataclass
from urllib.parse import unquote

from .forms import CONTROL, Form, MalformedFormError, decode, parameters_of

_MAX_BOUNDARY_CHARS = 70
_MAX_HEADERS, _MAX_HEADER_BYTES = 128, 8190
"""The most header lines of a part, and the most bytes of one, as in aiohttp."""
_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_DISPOSITION = re.compile(
    r""";\s*(?P<name>[^\s;="]+)\s*=\s*(?:"(?P<quoted>(?:\\.|[^"\\])*)"\s*(?=;|$)|(?P<token>[^\s;"]*)\s*(?=;|$))""",
)

_EXTENDED = re.compile(r"(?P<charset>[\w!#$%&*+.^`|~-]*)'[\w!#$%&*+.^`|~-]*'(?P<text>[\w!#$%&*+.^`|~-]*)", re.ASCII)
"""A charset, a language, and a text of token characters only: texts with others are not read."""


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """A file of a form, not stored. `filename` is the client's. It has the attributes of aiohttp's class."""

    name: str
    filename: str
    content: memoryview
    content_type: str
    headers: dict[str, str]

    @property
    def file(self) -> io.BytesIO:
        """Return a reader of its content."""
        return io.BytesIO(self.content)


def read_multipart(body: bytes, start: int, content_type: str) -> Form:
    """Parse a form that begins at `start`: its values by name, in order. Raises: MalformedFormError."""
    boundary = parameters_of(content_type).get("boundary", "")
    if not boundary or len(boundary) > _MAX_BOUNDARY_CHARS:
        raise MalformedFormError("no boundary, or one that is too long")
    try:
        return _read(body, start, b"--" + boundary.encode())
    except (LookupError, ValueError) as error:  # of charsets, base64 and headers
        raise MalformedFormError(str(error)) from error


def _read(body: bytes, start: int, line: bytes) -> Form:
    form: Form = {}
    content, charset, view = _first_part(body, start, line), "utf-8", memoryview(body)
    first = True
    while content >= 0:
        headers, content = _read_headers(body, content)
        end = body.find(b"\r\n" + line, max(content - 2, start))  # an empty part may share its CRLF with the boundary
        if end < 0:
            raise MalformedFormError("the form is truncated")
        parameters = _read_disposition(headers.get("content-disposition", ""))
        name = _parameter(parameters, "name")
        if name is None:
            raise MalformedFormError("a part has no name")
        value = _read_value(name, headers, _parameter(parameters, "filename"), view[content:end], charset)
        if first and name == "_charset_" and isinstance(value, str):
            charset = value.strip()
        else:
            form.setdefault(name, []).append(value)
        first, content = False, _skip_boundary(body, end + 2, line)
    return form


def _first_part(body: bytes, start: int, line: bytes) -> int:
    """Find the first boundary line. Returns: the start of its part, -1 if it is the last."""
    at = body.find(line, start)
    while at >= 0:
        # checked first, so that a line is examined once, however many boundaries it contains
        if at == start or body[at - 1 : at] == b"\n":
            rest = body[at + len(line) : _line_end(body, at)].rstrip()
            if rest in (b"", b"--"):
                return -1 if rest else _skip_boundary(body, at, line)
        at = body.find(line, at + 1)
    raise MalformedFormError("there is no part")


def _skip_boundary(body: bytes, at: int, line: bytes) -> int:
    """Skip a boundary. Returns: the start of its part, -1 if it is the last."""
    end = _line_end(body, at)
    rest = body[at + len(line) : end].rstrip()
    if rest == b"--":
        return -1
    if rest or end == len(body):
        raise MalformedFormError("a line begins like a boundary but is not one")
    return end


def _line_end(body: bytes, at: int) -> int:
    end = body.find(b"\n", at)
    return len(body) if end < 0 else end + 1


def _read_headers(body: bytes, at: int) -> tuple[dict[str, str], int]:
    headers: dict[str, str] = {}
    count = 0
    while True:
        end = _line_end(body, at)
        line = body[at:end].rstrip(b"\r\n")
        if not body.endswith(b"\n", at, end):
            raise MalformedFormError("the headers of a part do not end")
        at = end
        if not line:
            return headers, at
        count += 1
        if count > _MAX_HEADERS or len(line) > _MAX_HEADER_BYTES:
            raise MalformedFormError("a part has too many headers, or one that is too long")
        name, colon, value = line.decode("utf-8", "surrogateescape").partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise MalformedFormError("a line of a part's headers does not begin with a name and a colon")
        if CONTROL.search(value):
            raise MalformedFormError("a part's header has a control character")
        headers.setdefault(name.lower(), value.strip())


def _read_value(
    name: str, headers: dict[str, str], filename: str | None, content: memoryview, charset: str
) -> str | bytearray | Upload:
    kind = headers.get("content-type")
    if kind is not None and kind.lower().startswith("multipart/"):
        raise MalformedFormError("a part is itself a form")
    content = _decode_transfer(content, headers.get("content-transfer-encoding", "").lower())
    if filename:
        return Upload(name, filename, content, "application/octet-stream" if kind is None else kind, headers)
    if kind is None or kind.startswith("text/"):
        return decode(content, parameters_of(kind or "").get("charset", charset))
    return bytearray(content)


def _decode_transfer(content: memoryview, coding: str) -> memoryview:
    if coding == "base64":
        return memoryview(base64.b64decode(content))
    if coding == "quoted-printable":
        return memoryview(binascii.a2b_qp(content))
    if coding not in ("", "binary", "7bit", "8bit"):
        raise MalformedFormError(f"a part has an unknown transfer encoding: {coding!r}")
    return content


def _read_disposition(header: str) -> dict[str, str]:
    """Parse the parameters of a Content-Disposition, by their names in lower case; none if it is malformed."""
    parameters: dict[str, str] = {}
    at = header.find(";")
    if at < 0:
        return parameters
    while at < len(header):
        found = _DISPOSITION.match(header, at)
        if found is None:
            return parameters if header[at:].strip(" ;") == "" else {}
        name, at = found["name"].lower(), found.end()
        if name in parameters:
            return {}
        quoted = found["quoted"]
        # a path from the root, or one escaped as a whole, becomes relative
        parameters[name] = found["token"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted.lstrip("\\/"))
    return parameters


def _parameter(parameters: dict[str, str], name: str) -> str | None:
    """Return a parameter: its extended form, its usual one, or its parts. Source: RFC 5987, RFC 2231."""
    extended = _decode_extended(parameters.get(f"{name}*", ""))
    if extended is not None or name in parameters:
        return extended if extended is not None else parameters[name]
    joined = ""
    for at in range(len(parameters)):
        piece = parameters.get(f"{name}*{at}", parameters.get(f"{name}*{at}*"))
        if piece is None:
            break
        joined += piece
    return (_decode_extended(joined) if "'" in joined else joined) or None


def _decode_extended(text: str) -> str | None:
    """Decode an extended text, None if it is not in that form."""
    found = _EXTENDED.fullmatch(text)
    try:
        return found and unquote(found["text"], found["charset"] or "utf-8", "strict")
    except (LookupError, UnicodeDecodeError):
        return None
