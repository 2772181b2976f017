"""GrpcRequest: the meaning of a call's header block, parsed once per block. Used by the lane's connection.

Source: grpc/doc/PROTOCOL-HTTP2.md; RFC 9113 8.2 and 8.3 for what makes a request malformed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from penstock.server.http2.headers import Fields

from .framing import DEFLATE, GZIP
from .method import Method, Status

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])\Z")
_UNITS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+\Z")
_FORBIDDEN_VALUE = re.compile(rb"[\0\r\n]")
# RFC 9113 also forbids a space at either end; grpcio clients send it, and gRPC servers accept it
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_CONTENT_TYPE = b"application/grpc"
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
"""Triton's text."""


class GrpcRefusal(NamedTuple):
    """How a call is rejected because of its header."""

    http: int
    status: Status
    text: str


_TURNED_AWAY = GrpcRefusal(200, Status.UNAVAILABLE, SHUTTING_DOWN)


class GrpcRequest:
    """One parsed header block, shared by all calls that send the same bytes: read only.

    `quick`: nothing but the message is awaited, because the method is unary and there is no deadline. `coding` is that
    of the client's messages, `wanted` the one that answers may have, `length` the announced body length, -1 if there is
    none.
    """

    __slots__ = ("coding", "length", "metadata", "method", "path", "quick", "refusal", "timeout_ns", "unary", "wanted")

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self.path = ""
        self.method: Method | None = None
        self.unary: Any = None
        self.refusal: GrpcRefusal | None = None
        self.timeout_ns = 0
        self.length = -1
        self.coding = b""
        self.wanted = b""
        self.quick = False

    def turn_away(self, asking: Collection[str]) -> None:
        """Reject the call, unless its method's path is among these read-only ones."""
        if self.method is not None and self.method.path not in asking:
            self.refusal = self.refusal or _TURNED_AWAY
            self.quick = False


def read(fields: Fields, methods: Mapping[str, Method]) -> GrpcRequest | None:
    """Make a GrpcRequest; None if RFC 9113 considers the header list malformed."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                return None
            pseudo[name] = value
        elif _malformed(name, value):
            return None
        else:
            regular[name] = regular[name] + b"," + value if name in regular else value
    if not pseudo.get(b":path") or b":method" not in pseudo or b":scheme" not in pseudo:
        return None
    length = regular.get(b"content-length", b"")
    if length and not _LENGTH.match(length):
        return None
    metadata = {name.decode("latin-1"): value.decode("latin-1") for name, value in regular.items()}
    metadata[":authority"] = pseudo.get(b":authority", regular.get(b"host", b"")).decode("latin-1")
    request = GrpcRequest(metadata)
    request.path = pseudo[b":path"].decode("latin-1")
    request.length = int(length) if length else -1
    request.refusal = _refusal(pseudo, regular) or _understand(request, pseudo[b":path"], regular, methods)
    request.quick = request.unary is not None and request.refusal is None and not request.timeout_ns
    return request


def _malformed(name: bytes, value: bytes) -> bool:
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        return True
    return not _NAME.match(name) or _FORBIDDEN_VALUE.search(value) is not None


def _refusal(pseudo: Mapping[bytes, bytes], regular: Mapping[bytes, bytes]) -> GrpcRefusal | None:
    content_type = regular.get(b"content-type", b"")
    kind = content_type.lower()
    if not kind.startswith(_CONTENT_TYPE) or kind[len(_CONTENT_TYPE) :][:1] not in {b"", b"+", b";"}:
        shown = content_type.decode("latin-1")
        return GrpcRefusal(
            415, Status.INTERNAL, f"invalid gRPC request content-type '{shown}', expected application/grpc"
        )
    if kind not in {_CONTENT_TYPE, b"application/grpc+proto"} and kind[len(_CONTENT_TYPE)] != ord(";"):
        shown = content_type.decode("latin-1")
        return GrpcRefusal(200, Status.INTERNAL, f"content-type '{shown}': only protobuf messages are understood")
    if pseudo[b":method"] != b"POST":
        shown = pseudo[b":method"].decode("latin-1")
        return GrpcRefusal(405, Status.INTERNAL, f"invalid gRPC request method '{shown}', expected POST")
    if b"te" not in regular:
        return GrpcRefusal(400, Status.INTERNAL, "invalid gRPC request: no 'te: trailers'")
    return None


def _understand(
    request: GrpcRequest, path: bytes, regular: Mapping[bytes, bytes], methods: Mapping[str, Method]
) -> GrpcRefusal | None:
    name = path.decode("latin-1")
    method = methods.get(name)
    if method is None:
        return GrpcRefusal(200, Status.UNIMPLEMENTED, f"unknown method {name}")
    timeout = regular.get(b"grpc-timeout")
    if timeout is not None:
        match = _TIMEOUT.match(timeout)
        if match is None:
            return GrpcRefusal(200, Status.INTERNAL, f"malformed grpc-timeout '{timeout.decode('latin-1')}'")
        request.timeout_ns = max(1, int(match[1]) * _UNITS[match[2]])
    coding = regular.get(b"grpc-encoding", b"identity")
    if coding not in {b"identity", GZIP, DEFLATE}:
        return GrpcRefusal(200, Status.UNIMPLEMENTED, f"unsupported grpc-encoding '{coding.decode('latin-1')}'")
    request.coding = b"" if coding == b"identity" else coding
    accepted = [item.strip() for item in regular.get(b"grpc-accept-encoding", b"").split(b",")]
    request.wanted = GZIP if GZIP in accepted else DEFLATE if DEFLATE in accepted else b""
    request.method = method
    request.unary = method.unary
    return None
