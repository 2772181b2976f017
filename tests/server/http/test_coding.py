from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http.coding import choose_coding, compress, decompress
from penstock.server.http.head import HttpError
from penstock.server.http.limits import Limits

LIMITS = Limits(max_body_bytes=100_000)
CODINGS = [b"gzip", b"deflate"]


def refused(body: bytes, coding: bytes) -> tuple[int, str]:
    with pytest.raises(HttpError) as caught:
        decompress(body, coding, LIMITS)
    return caught.value.status, caught.value.text


@pytest.mark.parametrize("coding", CODINGS)
@given(body=st.binary(max_size=3000))
def test_decompress_reverses_compress(coding: bytes, body: bytes) -> None:
    assert decompress(compress(body, coding), coding, LIMITS) == body


@pytest.mark.parametrize("coding", [b"", b"identity"])
def test_a_body_without_a_coding_is_returned_unchanged(coding: bytes) -> None:
    assert decompress(b"{}", coding, LIMITS) == b"{}"


def test_gzip_and_deflate_are_compatible_with_the_standard_library() -> None:
    assert decompress(gzip.compress(b"body"), b"gzip", LIMITS) == b"body"
    assert decompress(gzip.compress(b"body"), b"x-gzip", LIMITS) == b"body"  # RFC 9110 treats it as the same coding
    assert decompress(zlib.compress(b"body"), b"deflate", LIMITS) == b"body"
    assert gzip.decompress(compress(b"body", b"gzip")) == b"body"
    assert zlib.decompress(compress(b"body", b"deflate")) == b"body"


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, deflate", b"gzip,gzip", b"\xff"])
def test_an_unknown_coding_is_not_supported(coding: bytes) -> None:
    status, text = refused(b"{}", coding)

    assert (status, text) == (
        501, f"unsupported Content-Encoding '{coding.decode('latin-1')}', expected gzip or deflate",
    )  # fmt: skip


@pytest.mark.parametrize("coding", CODINGS)
@given(data=st.data())
def test_a_truncated_compressed_body_is_rejected(coding: bytes, data: st.DataObject) -> None:
    compressed = compress(b"some body, long enough", coding)
    end = data.draw(st.integers(0, len(compressed) - 1))

    assert refused(compressed[:end], coding) == (400, f"failed to decompress the {coding.decode()} request body")


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("garbage", [b"\x00", b"more", compress(b"again", b"gzip"), compress(b"again", b"deflate")])
def test_bytes_after_the_end_of_the_compressed_body_are_rejected(coding: bytes, garbage: bytes) -> None:
    assert refused(compress(b"body", coding) + garbage, coding)[0] == 400


@pytest.mark.parametrize("coding", CODINGS)
@given(body=st.binary(max_size=100))
def test_a_body_that_is_not_compressed_data_is_rejected(coding: bytes, body: bytes) -> None:
    assert refused(b"\x00" + body, coding)[0] == 400


@pytest.mark.parametrize("coding", CODINGS)
def test_a_decompressed_body_larger_than_the_limit_is_rejected(coding: bytes) -> None:
    assert len(decompress(compress(bytes(100_000), coding), coding, LIMITS)) == 100_000
    assert refused(compress(bytes(100_001), coding), coding)[1].startswith(
        "decompressed request body exceeds the maximum allowed input size of 100000 bytes. Use --http-max-input-size"
    )


def test_a_decompression_bomb_is_rejected_without_using_much_memory() -> None:
    bomb = compress(bytes(50_000_000), b"gzip")
    tracemalloc.start()
    try:
        status, _ = refused(bomb, b"gzip")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert status == 400
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"", b""),
        (b"gzip", b"gzip"),
        (b"GZIP", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip, deflate", b"gzip"),
        (b"deflate, gzip", b"gzip"),
        (b"gzip;q=0.5, deflate;q=0.8", b"deflate"),
        (b"gzip ; q=0.5 , deflate ; q=0.4", b"gzip"),
        (b"deflate;q=.2, gzip;q=.1", b"deflate"),
        (b"br, zstd", b""),
        (b"identity", b""),
        (b"identity, gzip", b"gzip"),
        (b"identity, gzip;q=0.5", b""),
        (b"gzip;q=0", b""),
        (b"gzip;q=0.000", b""),
        (b"*", b"gzip"),
        (b"*;q=0", b""),
        (b"gzip;q=0, *", b"deflate"),
        (b"*, gzip;q=0, deflate;q=0", b""),
        (b"gzip;level=1;q=0.3, deflate;q=0.2", b"gzip"),
        (b"gzip;q=2", b""),
        (b"gzip;q=nan", b""),
        (b"gzip;q=1e9", b""),
        (b"gzip;q=-1", b""),
        (b"gzip;q=", b""),
        (b";;;,,,", b""),
    ],
)
def test_the_coding_of_an_answer_is_the_one_the_client_prefers(accept: bytes, chosen: bytes) -> None:
    assert choose_coding(accept) == chosen


@given(st.binary(max_size=60))
def test_any_accept_encoding_selects_a_supported_coding_or_no_coding(accept: bytes) -> None:
    assert choose_coding(accept) in {b"", *CODINGS}
