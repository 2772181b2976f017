"""Requests: finds a call's arguments in query, form, JSON, headers, cookies. Source: webargs 5.5 on aiohttp.

A call's body is a line of JSON (messages.py) and the request's body. Each part is parsed on first use.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .answers import Refusal, json_error
from .forms import Form, decode, parameters_of, read_pairs, read_urlencoded
from .multipart import read_multipart

ABSENT: Any = object()
"""The JSON of a request without any."""
_UNPARSED: Any = object()
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 4096
"""The most lines that are cached, and the most bytes of one. A client sends the same line again and again."""
_NO_FORM: Form = {}
_CHARACTER = r"[^\x00-\x20\";\\\x7f-\U0010ffff]"
_DAY, _TIME = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)", r"\d\d:\d\d:\d\d"
_DATE = (
    rf"{_DAY}(?:\w*day)?,\s[\w -]+\s{_TIME}\s(?:GMT|[+-]\d{{4}})"
    rf"|{_DAY}\s+\w{{3}}\s+\d?\d\s+{_TIME}\s+\d{{4}}"
)
"""A date as in RFC 9110, section 5.6.7: IMF-fixdate or RFC 850's form, also with an offset; or asctime's."""
_VALUE = rf'"(?:[^"\\]|\\.)*"|"[^";]*|{_DATE}|{_CHARACTER}*'
"""Quoted, with a quote that never ends, a date, or one word."""
_COOKIE = re.compile(rf"\s*(?P<name>(?:(?!=){_CHARACTER})+)(?:\s*=\s*(?P<value>{_VALUE}))?\s*(?:[\s;]|$)", re.ASCII)
_ESCAPED = re.compile(r"\\(?:([0-3][0-7]{2})|(.))")
_COOKIE_NAME = re.compile(r"[!#-'*+\-.\w()/:<=>?@\[\]^`{|}~]+", re.ASCII)


class RequestLine:
    """The content of the line. Shared by all requests with the same line, and never modified."""

    __slots__ = ("_cookies", "content_type", "headers", "is_json", "kind", "query")

    def __init__(self, line: bytes) -> None:
        parts = json.loads(line)
        self.query = read_pairs(_from_latin1(parts["query"])) if parts["query"] else _NO_FORM
        self.headers: Form = {}
        for name, value in parts["headers"]:
            self.headers.setdefault(name.lower(), []).append(_from_latin1(value))
        self.content_type = self.headers.get("content-type", [""])[0]
        self.kind = self.content_type.partition(";")[0].strip().lower()
        of_application = self.kind.startswith("application/")
        self.is_json = of_application and (self.kind.endswith("+json") or self.kind == "application/json")
        self._cookies: Form | None = None

    @property
    def cookies(self) -> Form:
        """The cookies, one value each: the last of its name."""
        if self._cookies is None:
            self._cookies = read_cookies("; ".join(self.headers.get("cookie", [])))
        return self._cookies


_CACHED_LINES: dict[bytes, RequestLine] = {}


def request_line(line: bytes) -> RequestLine:
    """Parse a line, or return its cached form."""
    parsed = _CACHED_LINES.get(line)
    if parsed is None:
        parsed = RequestLine(line)
        if len(line) <= _MAX_CACHED_BYTES:
            if len(_CACHED_LINES) >= _MAX_CACHED:
                _CACHED_LINES.clear()
            _CACHED_LINES[line] = parsed
    return parsed


class Request:
    """One request. Its Forms and `json` raise a Refusal if the body does not match its content type."""

    __slots__ = ("_body", "_form", "_json", "_start", "line")

    def __init__(self, call: bytes) -> None:
        at = call.index(b"\n")
        self.line = request_line(call[:at])
        self._body, self._start = call, at + 1
        self._form: Form = _UNPARSED
        self._json: Any = _UNPARSED

    @property
    def form(self) -> Form:
        """The form; empty if there is none."""
        if self._form is _UNPARSED:
            self._form = self._read_form()
        return self._form

    @property
    def json(self) -> Any:
        """The JSON, or ABSENT."""
        if self._json is _UNPARSED:
            self._json = self._read_json()
        return self._json

    def _read_form(self) -> Form:
        line = self.line
        if line.kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
            return _NO_FORM
        try:
            if line.kind == "multipart/form-data":
                return read_multipart(self._body, self._start, line.content_type)
            return read_urlencoded(self._body[self._start :], line.content_type)
        except ValueError as error:
            raise Refusal(json_error(400, {"form": ["Invalid form body."]})) from error

    def _read_json(self) -> Any:
        if not self.line.is_json or self._start == len(self._body):
            return ABSENT
        try:
            charset = parameters_of(self.line.content_type).get("charset", "utf-8")
            return json.loads(decode(self._body[self._start :], charset))
        except (LookupError, ValueError, RecursionError) as error:
            raise Refusal(json_error(400, {"json": ["Invalid JSON body."]})) from error


def _from_latin1(latin: str) -> str:
    """Return the text of bytes that travel as Latin-1."""
    return latin if latin.isascii() else latin.encode("latin-1").decode("utf-8", "surrogateescape")


def read_cookies(header: str) -> Form:
    """Read a Cookie field, one value for each name: the last. Source: aiohttp's parse_cookie_header."""
    cookies: Form = {}
    at = 0
    while at < len(header):
        pair = _COOKIE.match(header, at)
        if pair is not None:
            name, equals, value = pair["name"], "=", pair["value"] or ""
            at = pair.end()
        else:
            end = header.find(";", at)
            end = len(header) if end < 0 else end
            name, equals, value = (part.strip() for part in header[at:end].partition("="))
            at = end + 1
        if equals and _COOKIE_NAME.fullmatch(name):
            cookies[name] = [_unquote(value)]
    return cookies


def _unquote(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == '"':
        return _ESCAPED.sub(lambda found: chr(int(found[1], 8)) if found[1] else found[2], value[1:-1])
    return value
