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
_TIMEOUT_UNITS_NS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}
_LENGTH = re.compile(rb"[0-9]{1,18}\Z")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+\Z")
_FORBIDDEN_VALUE = re.compile(rb"[\0\r\n]")
# RFC 9113 also forbids a space at either end; grpcio clients send it, and gRPC servers accept it
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_CONTENT_TYPE = b"application/grpc"
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
"""Triton's text."""


class GrpcRejection(NamedTuple):
    """How a call is rejected because of its header."""

    http_status: int
    status: Status
    text: str


_DRAINING = GrpcRejection(200, Status.UNAVAILABLE, SHUTTING_DOWN)


class GrpcRequest:
    """One parsed header block, shared by all calls that send the same bytes: read only.

    `is_simple`: nothing but the message is awaited, because the method is unary and there is no deadline. `coding` is
    that of the client's messages, `answer_coding` the one that answers may have, `length` the announced body length, -1
    if there is none.
    """

    __slots__ = (
        "answer_coding", "coding", "is_simple", "length", "metadata", "method", "path", "rejection", "timeout_ns",
        "unary",
    )  # fmt: skip

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self.path = ""
        self.method: Method | None = None
        self.unary: Any = None
        self.rejection: GrpcRejection | None = None
        self.timeout_ns = 0
        self.length = -1
        self.coding = b""
        self.answer_coding = b""
        self.is_simple = False

    def reject_while_draining(self, read_only_paths: Collection[str]) -> None:
        """Reject the call, unless its method's path is among these read-only ones."""
        if self.method is not None and self.method.path not in read_only_paths:
            self.rejection = self.rejection or _DRAINING
            self.is_simple = False


def parse_request(fields: Fields, methods: Mapping[str, Method]) -> GrpcRequest | None:
    """Make a GrpcRequest; None if RFC 9113 considers the header list malformed."""
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, bytes] = {}
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                return None
            pseudo[name] = value
        elif _is_malformed(name, value):
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
    request.rejection = _check_fields(pseudo, regular) or _parse_fields(request, pseudo[b":path"], regular, methods)
    request.is_simple = request.unary is not None and request.rejection is None and not request.timeout_ns
    return request


def _is_malformed(name: bytes, value: bytes) -> bool:
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        return True
    return not _NAME.match(name) or _FORBIDDEN_VALUE.search(value) is not None


def _check_fields(pseudo: Mapping[bytes, bytes], regular: Mapping[bytes, bytes]) -> GrpcRejection | None:
    content_type = regular.get(b"content-type", b"")
    media_type = content_type.lower()
    if not media_type.startswith(_CONTENT_TYPE) or media_type[len(_CONTENT_TYPE) :][:1] not in {b"", b"+", b";"}:
        value = content_type.decode("latin-1")
        return GrpcRejection(
            415, Status.INTERNAL, f"invalid gRPC request content-type '{value}', expected application/grpc"
        )
    if media_type not in {_CONTENT_TYPE, b"application/grpc+proto"} and media_type[len(_CONTENT_TYPE)] != ord(";"):
        value = content_type.decode("latin-1")
        return GrpcRejection(200, Status.INTERNAL, f"content-type '{value}': only protobuf messages are supported")
    if pseudo[b":method"] != b"POST":
        value = pseudo[b":method"].decode("latin-1")
        return GrpcRejection(405, Status.INTERNAL, f"invalid gRPC request method '{value}', expected POST")
    if b"te" not in regular:
        return GrpcRejection(400, Status.INTERNAL, "invalid gRPC request: no 'te: trailers'")
    return None


def _parse_fields(
    request: GrpcRequest, path: bytes, regular: Mapping[bytes, bytes], methods: Mapping[str, Method]
) -> GrpcRejection | None:
    name = path.decode("latin-1")
    method = methods.get(name)
    if method is None:
        return GrpcRejection(200, Status.UNIMPLEMENTED, f"unknown method {name}")
    timeout = regular.get(b"grpc-timeout")
    if timeout is not None:
        match = _TIMEOUT.match(timeout)
        if match is None:
            return GrpcRejection(200, Status.INTERNAL, f"malformed grpc-timeout '{timeout.decode('latin-1')}'")
        request.timeout_ns = max(1, int(match[1]) * _TIMEOUT_UNITS_NS[match[2]])
    coding = regular.get(b"grpc-encoding", b"identity")
    if coding not in {b"identity", GZIP, DEFLATE}:
        return GrpcRejection(200, Status.UNIMPLEMENTED, f"unsupported grpc-encoding '{coding.decode('latin-1')}'")
    request.coding = b"" if coding == b"identity" else coding
    accepted = [item.strip() for item in regular.get(b"grpc-accept-encoding", b"").split(b",")]
    request.answer_coding = GZIP if GZIP in accepted else DEFLATE if DEFLATE in accepted else b""
    request.method = method
    request.unary = method.unary
    return None
