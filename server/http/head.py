"""Head: the request line and headers of one HTTP/1.1 request, parsed once and remembered by their bytes.

A keep-alive client sends the same head repeatedly, so the fast lane caches parsed heads by their exact bytes and parses
nothing on a hit (0.1 us instead of 4). llhttp, through httptools, decides what is a valid head; this module adds the
limits, and what the fast lane needs to frame the body itself.
"""

from __future__ import annotations

from typing import Any

import httptools

from .limits import Limits

MAX_LENGTH_DIGITS = 18


class HttpError(Exception):
    """A request rejected before it reaches a dialect. The connection is closed after the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class TooLargeError(HttpError):
    """A request body exceeds the limit, as sent or decompressed."""

    def __init__(self, text: str) -> None:
        super().__init__(400, text)


class Head:
    """One parsed head, shared by every request that sends the same bytes. Immutable after `parse_head`.

    `path` and `query` are as sent. `length` is the body's, -1 if it is chunked. `fields` are all header fields in
    order, with lower-case names; `header` maps names to values, the last one if a name is repeated. `route` is what the
    fast lane's router returned for the target, None for paths that it does not answer.
    """

    __slots__ = (
        "expects_continue", "fields", "header", "is_http10", "keep_alive", "length", "method", "path", "query",
        "route",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = b""
        self.path = b""
        self.query = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.header: dict[bytes, bytes] = {}
        self.length = 0
        self.keep_alive = True
        self.expects_continue = False
        self.is_http10 = False
        self.route: Any = None


class _Collector:
    """The callbacks of httptools for one head."""

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


def parse_head(raw: bytes, limits: Limits) -> Head:
    """Parse the bytes up to and including the empty line.

    Raises: HttpError if they are not a valid HTTP/1.x request head, the body length is ambiguous, or a limit is
    exceeded.
    """
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        # a valid request to upgrade, which a server may ignore according to RFC 9110
        pass
    except httptools.HttpParserError as error:
        raise HttpError(400, f"invalid HTTP request: {error}") from None
    version = parser.get_http_version()
    if not collector.complete and version != "2.0":
        # the parser stops before the end of HTTP/2's preface
        raise HttpError(400, "invalid HTTP request: incomplete head")
    if version not in ("1.0", "1.1"):
        raise HttpError(505, f"HTTP version {version} is not supported")
    if len(collector.headers) > limits.max_headers:
        raise HttpError(431, f"request has more than {limits.max_headers} header fields")
    head = Head()
    head.method = parser.get_method()
    if head.method == b"CONNECT":
        # only for proxies; uvicorn would take what follows for another protocol, and log a warning
        raise HttpError(405, "Method Not Allowed")
    head.is_http10 = version == "1.0"
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
    tokens = b",".join([value.lower() for name, value in headers if name == b"connection"])
    connection = {token.strip() for token in tokens.split(b",")} if b"," in tokens else (tokens,)
    # not from the parser, which without a body has already moved on to the next request
    head.keep_alive = b"keep-alive" in connection if head.is_http10 else b"close" not in connection
    if codings:
        # RFC 9112 6.1: both, or an unknown coding, is how requests are smuggled past a proxy
        if lengths or codings != [b"chunked"] or head.is_http10:
            raise HttpError(400, "invalid HTTP request: ambiguous body length")
        head.length = -1
    elif lengths:
        text = lengths.pop()
        if lengths or not text.isdigit() or len(text) > MAX_LENGTH_DIGITS:
            raise HttpError(400, "invalid HTTP request: bad Content-Length")
        head.length = int(text)
    expectation = head.header.get(b"expect", b"").lower()
    if expectation not in (b"", b"100-continue"):
        raise HttpError(417, "unsupported Expect header, only 100-continue is supported")
    head.expects_continue = bool(expectation) and not head.is_http10


def check_partial_head(buffer: bytearray, scanned: int, max_bytes: int) -> None:
    """Reject an incomplete head that is already known to be invalid.

    `scanned`: how much of it was checked before. Raises: HttpError.
    """
    if len(buffer) >= max_bytes:
        raise HttpError(431, f"request head exceeds {max_bytes} bytes")
    if buffer and buffer != b"\r" and not 65 <= buffer[0] <= 90:
        # such as a TLS handshake, which would wait for an answer as long as this waits for its end
        raise HttpError(400, "invalid HTTP request: it does not begin with a method")
    if buffer.count(b"\n", scanned) != buffer.count(b"\r\n", max(0, scanned - 1)):
        # the parser rejects such a line too, but a client that ends all lines this way never completes a head
        raise HttpError(400, "invalid HTTP request: a line ends in LF without CR")


def sanitize_for_uvicorn(raw: bytes) -> bytes:
    """Return a head without what uvicorn's parser would misread.

    That is an Upgrade field, because of which it would take the body for another protocol's, and blanks behind values,
    which it leaves there.
    """
    lines = [line.rstrip(b" \t") for line in raw.split(b"\r\n") if line[:8].lower() != b"upgrade:"]
    return b"\r\n".join(lines)
