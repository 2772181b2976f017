"""Head: the request line and headers of one HTTP/1.1 request, parsed once and remembered by their bytes.

A keep-alive client sends the same head again and again, so the fast lane keeps parsed heads by their exact bytes and
parses nothing on a hit (0.1 us against 4). llhttp, through httptools, decides what is a valid head; this module adds
the limits, and what the fast lane must know to frame the body itself.
"""

from __future__ import annotations

from typing import Any

import httptools

from .limits import Limits

MAX_LENGTH_DIGITS = 18


class HttpError(Exception):
    """A request refused before any dialect saw it. The connection is closed after the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class TooLargeError(HttpError):
    """The body of a request is above the limit, as sent or decompressed."""

    def __init__(self, text: str) -> None:
        super().__init__(400, text)


class Head:
    """One parsed head. Shared by every request that sends the same bytes; never changed after `parse`.

    `path` and `query` are as they were sent. `length` is the body's, -1 when chunked. `fields` are all header fields in
    their order, with lower-cased names; `header` holds them by name, of a repeated one the last value. `route` is what
    the fast lane's router gave for the target, None for paths that it does not answer.
    """

    __slots__ = ("expects", "fields", "header", "keep_alive", "length", "method", "old", "path", "query", "route")

    def __init__(self) -> None:
        self.method = b""
        self.path = b""
        self.query = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.header: dict[bytes, bytes] = {}
        self.length = 0
        self.keep_alive = True
        self.expects = False
        self.old = False
        self.route: Any = None


class _Collector:
    """What httptools calls while it parses one head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse(raw: bytes, limits: Limits) -> Head:
    """Parse the bytes up to and including the empty line.

    Raises: HttpError when they are no valid HTTP/1.x request head, are ambiguous about the body, or pass a limit.
    """
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        # the request is valid and asks for another protocol; RFC 9110 lets a server ignore that
        pass
    except httptools.HttpParserError as error:
        raise HttpError(400, f"invalid HTTP request: {error}") from None
    version = parser.get_http_version()
    if not collector.complete and version != "2.0":
        # in the preface of HTTP/2 the parser stops before the end
        raise HttpError(400, "invalid HTTP request: incomplete head")
    if version not in ("1.0", "1.1"):
        raise HttpError(505, f"HTTP version {version} is not supported")
    if len(collector.headers) > limits.max_headers:
        raise HttpError(431, f"request has more than {limits.max_headers} header fields")
    head = Head()
    head.method = parser.get_method()
    if head.method == b"CONNECT":
        # for proxies alone; uvicorn takes what follows it for another protocol's, and warns of that
        raise HttpError(405, "Method Not Allowed")
    head.old = version == "1.0"
    head.path, _, head.query = collector.url.partition(b"?")
    if b" \r" in raw or b"\t" in raw:  # rare; the parser leaves blanks behind a value
        collector.headers = [(name, value.rstrip(b" \t")) for name, value in collector.headers]
    _read_headers(head, collector.headers)
    return head


def _read_headers(head: Head, headers: list[tuple[bytes, bytes]]) -> None:
    head.fields, head.header = headers, dict(headers)
    lengths = {value for name, value in headers if name == b"content-length"}
    codings = []
    if b"transfer-encoding" in head.header:
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    said = b",".join([value.lower() for name, value in headers if name == b"connection"])
    connection = {token.strip() for token in said.split(b",")} if b"," in said else (said,)
    # not the parser's: where no body follows, it is at the next request already
    head.keep_alive = b"keep-alive" in connection if head.old else b"close" not in connection
    if codings:
        # RFC 9112 6.1: both, or a coding that is not known, is how requests are smuggled past a proxy
        if lengths or codings != [b"chunked"] or head.old:
            raise HttpError(400, "invalid HTTP request: ambiguous body length")
        head.length = -1
    elif lengths:
        text = lengths.pop()
        if lengths or not text.isdigit() or len(text) > MAX_LENGTH_DIGITS:
            raise HttpError(400, "invalid HTTP request: bad Content-Length")
        head.length = int(text)
    expectation = head.header.get(b"expect", b"").lower()
    if expectation not in (b"", b"100-continue"):
        raise HttpError(417, "the only expectation that can be met is 100-continue")
    head.expects = bool(expectation) and not head.old


def check_begun(buffer: bytearray, scanned: int, most: int) -> None:
    """Refuse a head whose end is not there yet, if it can be seen already that it is none.

    `scanned`: how much of it was looked at before. Raises: HttpError.
    """
    if len(buffer) >= most:
        raise HttpError(431, f"request head exceeds {most} bytes")
    if buffer and buffer != b"\r" and not 65 <= buffer[0] <= 90:
        # a TLS handshake, for one, which would wait for its answer as long as this for its end
        raise HttpError(400, "invalid HTTP request: it does not begin with a method")
    if buffer.count(b"\n", scanned) != buffer.count(b"\r\n", max(0, scanned - 1)):
        # the parser refuses such a line, too, but a client that ends all its lines so never sends an end
        raise HttpError(400, "invalid HTTP request: a line ends in LF without CR")


def without_upgrade(raw: bytes) -> bytes:
    """Take the Upgrade field out of a head: a parser that sees it takes the body for another protocol's."""
    return b"\r\n".join([line for line in raw.split(b"\r\n") if line[:8].lower() != b"upgrade:"])
