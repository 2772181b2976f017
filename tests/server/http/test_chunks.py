from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http.chunks import ChunkedBody
from penstock.server.http.head import HttpError
from penstock.server.http.limits import Limits

LIMITS = Limits(max_body_bytes=1000, max_chunks=20)


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return chunks + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def fed(*pieces: bytes, limits: Limits = LIMITS) -> tuple[ChunkedBody, bytes]:
    """Feed pieces as they would arrive; return the body and the bytes left over."""
    body, buffer = ChunkedBody(limits), bytearray()
    for piece in pieces:
        buffer += piece
        while consumed := body.feed(buffer):
            del buffer[:consumed]
    return body, bytes(buffer)


def refused(raw: bytes, limits: Limits = LIMITS) -> tuple[int, str]:
    with pytest.raises(HttpError) as caught:
        fed(raw, limits=limits)
    return caught.value.status, caught.value.text


PARTS = st.lists(st.binary(min_size=1, max_size=40), max_size=20)
EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b' ;a="b;c"', b"\t"])
TRAILERS = st.sampled_from([b"", b"a: b\r\n", b"a: b\r\nc: d\r\n"])


@given(PARTS, EXTENSIONS, TRAILERS, st.binary(max_size=20), st.lists(st.integers(0, 400)))
def test_any_split_gives_the_same_body_and_leaves_the_bytes_after_the_body(
    parts: list[bytes], extension: bytes, trailers: bytes, following: bytes, cuts: list[int]
) -> None:
    raw = chunked(parts, extension, trailers) + following
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]

    body, rest = fed(*[raw[start:end] for start, end in pairwise(edges)])

    assert body.done
    assert bytes(body.body) == b"".join(parts)
    assert body.size == len(body.body)
    assert rest == following


def test_a_chunked_body_fed_byte_by_byte_is_decoded() -> None:
    raw = chunked([b"hello", b"world" * 9], b";x=y", b"t: u\r\n") + b"POST"

    body, rest = fed(*[raw[i : i + 1] for i in range(len(raw))])

    assert (bytes(body.body), rest) == (b"hello" + b"world" * 9, b"POST")


@given(PARTS)
def test_a_truncated_chunked_body_is_not_done(parts: list[bytes]) -> None:
    raw = chunked(parts)
    for end in range(len(raw)):
        assert not fed(raw[:end])[0].done


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_either_accepted_or_rejected_with_an_http_error(raw: bytes) -> None:
    try:
        fed(raw)
        status = 200
    except HttpError as error:
        status = error.status

    assert status in {200, 400, 431}


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n", b"g\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\n", b" 1\r\n", b"1 1\r\n", b"1_0\r\n", b"\xb2\r\n",
        b"1\nx\n\r\n", b"1;\x00\r\n", b"1" * 17 + b"\r\n",
    ],
)  # fmt: skip
def test_an_invalid_chunk_size_is_rejected(raw: bytes) -> None:
    assert refused(raw) == (400, "invalid HTTP request: bad chunk size")


@pytest.mark.parametrize("raw", [b"1\r\nabc", b"3\r\nabc0\r\n\r\n", b"3\r\nabc\n0\r\n\r\n"])
def test_a_chunk_of_another_length_than_its_size_is_rejected(raw: bytes) -> None:
    assert refused(raw)[0] == 400


def test_a_chunk_that_would_exceed_the_body_limit_is_rejected_by_its_size() -> None:
    text = (
        "request JSON size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes. "
        "Use --http-max-input-size to increase the limit."
    )

    assert refused(b"3e9\r\n") == (400, text)
    assert refused(b"f" * 16 + b"\r\n")[0] == 400
    assert fed(chunked([b"x" * 500, b"y" * 500]))[0].done


def test_one_chunk_more_than_the_limit_is_rejected() -> None:
    limits = replace(LIMITS, max_body_bytes=1 << 20, max_chunks=65536)
    text = "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."

    assert fed(b"1\r\nx\r\n" * 65536 + b"0\r\n\r\n", limits=limits)[0].size == 65536
    assert refused(b"1\r\nx\r\n" * 65537, limits) == (400, text)


@pytest.mark.parametrize("start", [b"", b"0\r\n"])
def test_a_line_without_an_end_is_rejected_when_it_is_too_long(start: bytes) -> None:
    assert refused(start + b"a" * 5000) == (400, "invalid HTTP request: a line of the chunked body is too long")
    assert refused(start + b"a" * 5000 + b"\r\n")[0] == 400


@pytest.mark.parametrize("raw", [b"3\nabc\n0\n\n", b"0\n\n", b"0\r\n\n", b"0\r\na: b\n\n"])
def test_a_line_that_ends_in_a_bare_lf_is_rejected_at_once(raw: bytes) -> None:
    text = "invalid HTTP request: a line of the chunked body ends in LF without CR"

    assert refused(raw) == (400, text)


def test_too_many_trailer_fields_are_rejected() -> None:
    assert refused(b"0\r\n" + b"a: b\r\n" * 100) == (431, "request has too many trailer fields")


@pytest.mark.parametrize("sent", [b"2\r\nab\r\n0\r\n\r\n", b"2\r\nab\r\n", b"zz\r\n"])
def test_a_chunked_body_is_freed_without_the_garbage_collector(sent: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        body = ChunkedBody(LIMITS)
        with suppress(HttpError):
            body.feed(bytearray(sent))
        body_ref = weakref.ref(body)
        del body
        assert body_ref() is None
    finally:
        gc.enable()
