"""Content codings: gzip and deflate, in both directions, with a size limit."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

from .head import HttpError, TooLargeError
from .limits import Limits

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body

_GZIP, _DEFLATE = b"gzip", b"deflate"
_WBITS = {_GZIP: 31, _DEFLATE: 15}
_ALIASES = {b"x-gzip": _GZIP}
"""Source: RFC 9110, 8.4.1.3."""
_LEVEL = 1
_QVALUE = re.compile(rb"(0?\.\d{1,3}|0\.?|1(\.0{0,3})?)\Z")
MIN_BYTES = 256
"""Smaller answers are not compressed: the header field costs what compression saves."""


def decompress(body: bytes, coding: bytes, limits: Limits) -> bytes:
    """Decompress a body. `deflate` is the zlib format, as defined by HTTP.

    Raises: HttpError if the coding is unknown, the body is invalid, or the result exceeds the limit.
    """
    coding = _ALIASES.get(coding, coding)
    wbits = _WBITS.get(coding)
    if wbits is None:
        if coding in (b"", b"identity"):
            return body
        raise HttpError(501, f"unsupported Content-Encoding '{coding.decode('latin-1')}', expected gzip or deflate")
    decoder = zlib.decompressobj(wbits=wbits)
    try:
        decompressed = decoder.decompress(body, limits.max_body_bytes + 1)
    except zlib.error:
        raise HttpError(400, f"failed to decompress the {coding.decode()} request body") from None
    if len(decompressed) > limits.max_body_bytes:
        text = f"decompressed request body exceeds the maximum allowed input size of {limits.max_body_bytes} bytes. "
        raise TooLargeError(text + "Use --http-max-input-size to increase the limit.")
    if not decoder.eof or decoder.unused_data:
        raise HttpError(400, f"failed to decompress the {coding.decode()} request body")
    return decompressed


def decompress_small(body: bytes, coding: bytes, limits: Limits, max_bytes: int) -> bytes | None:
    """Decompress like `decompress`; None if the result exceeds `max_bytes`, which may be by a factor of a thousand."""
    if limits.max_body_bytes <= max_bytes:
        return decompress(body, coding, limits)
    if len(body) > max_bytes:
        return None
    try:
        return decompress(body, coding, replace(limits, max_body_bytes=max_bytes))
    except TooLargeError:
        return None


def compress(body: Body, coding: bytes) -> bytes:
    """Compress a body."""
    encoder = zlib.compressobj(_LEVEL, wbits=_WBITS[coding])
    return encoder.compress(body) + encoder.flush()


def choose_coding(accept: bytes) -> bytes:
    """Choose the coding of an answer from an Accept-Encoding field; b"" for none. Source: RFC 9110 12.5.3."""
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, *parameters = item.split(b";")
        weights[name.strip()] = _weight(parameters)
    wildcard = weights.get(b"*", 0.0)
    best, best_weight = b"", weights.get(b"identity", 0.0)
    for name in _WBITS:
        weight = weights.get(name, wildcard)
        # at equal weights compression is preferred, and gzip comes first
        if weight > best_weight or (weight == best_weight > 0 and not best):
            best, best_weight = name, weight
    return best


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition(b"=")
        if key.strip() == b"q":
            match = _QVALUE.match(value.strip())
            return float(match[0]) if match else 0.0
    return 1.0
