"""Frames of gRPC answers: their headers and trailers. Used by calls; constant ones are made once.

Source: grpc/doc/PROTOCOL-HTTP2.md; gRFC A6 for `grpc-retry-pushback-ms`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.server.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from penstock.server.http2.headers import encode

from .framing import PREFIX, PREFIX_BYTES
from .method import Status

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

ENCODINGS = b"identity, deflate, gzip"
_MAX_TEXT_BYTES = 4096
"""The maximum size of an encoded status text. Clients limit all trailers together to 8 KiB."""

_CONTENT_TYPE = (b"content-type", b"application/grpc")
_BEGIN_BLOCK = encode([(b":status", b"200"), _CONTENT_TYPE])
_OK_BLOCK = encode([(b"grpc-status", b"0")])

_HEAD = "IBI"
_ENDING = struct.Struct(f">{_HEAD}{len(_OK_BLOCK)}s")
_MESSAGE = struct.Struct(f">{_HEAD}BI")
_OK_WORD = len(_OK_BLOCK) << 8 | HEADERS

_stream = struct.Struct(">I").pack
_KIND = struct.Struct(">IB")
"""A frame header up to the stream: length and type in one word, flags."""
_BEGIN_KIND = _KIND.pack(len(_BEGIN_BLOCK) << 8 | HEADERS, END_HEADERS)
_OK_KIND = _KIND.pack(_OK_WORD, END_HEADERS | END_STREAM)


def unary_answer(stream_id: int, message: Body, size: int) -> tuple[Body, ...]:
    """Build a successful answer with one message in one frame: HEADERS, DATA, the trailers of `ok_trailers`."""
    stream = _stream(stream_id)
    block, prefix = _around_stream_id(size)
    return (_BEGIN_KIND, stream, block, stream, prefix, message, _OK_KIND, stream, _OK_BLOCK)


@lru_cache(1024)
def _around_stream_id(size: int) -> tuple[bytes, bytes]:
    """Return what precedes and follows the stream id in the head of a DATA frame, by the size of its message.

    A method's answers have few sizes, and packing all of it for each answer takes a quarter longer.
    """
    return _BEGIN_BLOCK + _KIND.pack((size + PREFIX_BYTES) << 8 | DATA, 0), PREFIX.pack(0, size)


def message_head(stream_id: int, size: int, flag: int) -> bytes:
    """Build the head of another message that fits in one frame; flag 1 means compressed."""
    return _MESSAGE.pack((size + PREFIX_BYTES) << 8 | DATA, 0, stream_id, flag, size)


def ok_trailers(stream_id: int) -> bytes:
    """Build the trailers of a successful call."""
    return _ENDING.pack(_OK_WORD, END_HEADERS | END_STREAM, stream_id, _OK_BLOCK)


def response_headers(stream_id: int, encoding: bytes = b"") -> bytes:
    """Build HEADERS alone."""
    block = _BEGIN_BLOCK if not encoding else _BEGIN_BLOCK + encode([(b"grpc-encoding", encoding)])
    return frame(HEADERS, END_HEADERS, stream_id, block)


def trailers(stream_id: int, status: Status, text: str, pushback_ms: int = 0) -> bytes:
    """Build the trailers of a call whose answer has begun."""
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, encode(_status_fields(status, text, pushback_ms)))


def trailers_only(stream_id: int, status: Status, text: str, http_status: int = 200, pushback_ms: int = 0) -> bytes:
    """Build the complete answer of a rejected call; `http_status` is the status for clients that do not speak gRPC."""
    fields = [(b":status", b"%d" % http_status), _CONTENT_TYPE, *_status_fields(status, text, pushback_ms)]
    if status is Status.UNIMPLEMENTED:
        fields.append((b"grpc-accept-encoding", ENCODINGS))
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, encode(fields))


def _status_fields(status: Status, text: str, pushback_ms: int) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status)]
    if text:
        fields.append((b"grpc-message", percent_encoded(text)))
    if pushback_ms:
        fields.append((b"grpc-retry-pushback-ms", b"%d" % pushback_ms))
    return fields


def percent_encoded(text: str) -> bytes:
    """Percent-encode a status text as gRPC does; the end of a very long one is cut off."""
    raw = text[:_MAX_TEXT_BYTES].encode("utf-8", "replace")
    parts: list[bytes] = []
    size = 0
    for byte in raw:
        part = b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        size += len(part)
        if size > _MAX_TEXT_BYTES:
            break
        parts.append(part)
    return b"".join(parts)
