"""Content codings: gzip and deflate, both ways, bounded."""

from __future__ import annotations

import zlib

from .head import HttpError
from .limits import Limits

_GZIP, _DEFLATE = b"gzip", b"deflate"
_WINDOW = {_GZIP: 31, _DEFLATE: 15}
_LEVEL = 1
MIN_BYTES = 256
"""Answers below this are sent as they are: the header field costs what compression saves."""


def decompress(body: bytes, coding: bytes, limits: Limits) -> bytes:
    """Take a coding off a body. `deflate` is the zlib format, as HTTP says.

    Raises: HttpError when the coding is not known, the body is not what it says, or the result passes the limit.
    """
    window = _WINDOW.get(coding)
    if window is None:
        if coding in (b"", b"identity"):
            return body
        raise HttpError(501, f"unsupported Content-Encoding '{coding.decode('latin-1')}', expected gzip or deflate")
    decoder = zlib.decompressobj(wbits=window)
    try:
        plain = decoder.decompress(body, limits.max_body_bytes + 1)
    except zlib.error:
        raise HttpError(400, f"failed to decompress the {coding.decode()} request body") from None
    if len(plain) > limits.max_body_bytes:
        text = f"decompressed request body exceeds the maximum allowed input size of {limits.max_body_bytes} bytes. "
        raise HttpError(400, text + "Use --http-max-input-size to increase the limit.")
    if not decoder.eof or decoder.unused_data:
        raise HttpError(400, f"failed to decompress the {coding.decode()} request body")
    return plain


def compress(body: bytes, coding: bytes) -> bytes:
    """Put a coding on a body."""
    encoder = zlib.compressobj(_LEVEL, wbits=_WINDOW[coding])
    return encoder.compress(body) + encoder.flush()


def choose(accept: bytes) -> bytes:
    """Choose the coding of an answer from an Accept-Encoding field; empty for none. Source: RFC 9110 12.5.3."""
    best, best_weight = b"", 0.0
    for item in accept.lower().split(b","):
        name, _, parameter = item.strip().partition(b";")
        name = name.strip()
        weight = _weight(parameter)
        if name == b"*":
            name = _GZIP
        if name in _WINDOW and weight > best_weight:
            best, best_weight = name, weight
    return best


def _weight(parameter: bytes) -> float:
    key, _, value = parameter.strip().partition(b"=")
    if key.strip() != b"q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
