"""HeaderDecoder alone: header blocks and their cache."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.frames import END_HEADERS, END_STREAM, HAS_PRIORITY, PADDED, ErrorCode, Http2Error, frame
from penstock.server.http2.headers import Fields, HeaderDecoder, encode, prepend_to_block

MOST_BYTES = 1000
ENDS = END_HEADERS | END_STREAM


class Memory:
    """A HeaderDecoder; `decoded` records the header lists that it had to decode."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self.memory: HeaderDecoder[Fields] = HeaderDecoder(max_bytes)
        self.decoded: list[Fields] = []

    def decode(self, block: bytes) -> Fields:
        def resolve(fields: Fields) -> Fields:
            self.decoded.append(fields)
            return fields

        return self.memory.decode(block, resolve)


def fault(flags: int, payload: bytes, *continued: bytes) -> ErrorCode | None:
    memory = Memory().memory
    try:
        memory.start_block(flags, 1, payload)
        for more in continued:
            memory.continue_block(0, more)
    except Http2Error as error:
        return error.code
    return None


# -- header blocks in frames -----------------------------------------------------------------------------------


def test_a_block_in_one_frame_is_returned_unchanged() -> None:
    memory = Memory().memory

    assert memory.start_block(ENDS, 5, b"block") == b"block"
    assert (memory.block, memory.stream_id, memory.end_stream) == (None, 5, END_STREAM)
    assert memory.start_block(END_HEADERS, 7, b"") == b""
    assert (memory.stream_id, memory.end_stream) == (7, 0)


def test_a_continued_block_is_open_until_its_last_frame() -> None:
    memory = Memory().memory

    assert memory.start_block(END_STREAM, 5, b"a") is None
    assert memory.continue_block(0, b"b") is None
    assert memory.block is not None
    assert memory.continue_block(END_HEADERS, b"c") == b"abc"
    assert (memory.stream_id, memory.end_stream) == (5, END_STREAM)
    assert not memory.block


def test_padding_and_priority_are_removed_from_a_block() -> None:
    memory = Memory().memory

    assert memory.start_block(END_HEADERS | PADDED, 1, b"\2block\0\0") == b"block"
    assert memory.start_block(END_HEADERS | HAS_PRIORITY, 1, b"12345block") == b"block"
    assert memory.start_block(END_HEADERS | PADDED | HAS_PRIORITY, 1, b"\1" + b"12345block\0") == b"block"
    assert memory.start_block(END_HEADERS | HAS_PRIORITY, 1, b"12345") == b""


@pytest.mark.parametrize(
    ("flags", "parts", "code"),
    [
        (END_HEADERS | HAS_PRIORITY, [b"1234"], ErrorCode.FRAME_SIZE_ERROR),
        (END_HEADERS | PADDED, [b"\5abc"], ErrorCode.PROTOCOL_ERROR),
        (END_HEADERS, [bytes(MOST_BYTES)], None),
        (END_HEADERS, [bytes(MOST_BYTES + 1)], ErrorCode.ENHANCE_YOUR_CALM),
        (0, [bytes(MOST_BYTES - 1), b"x"], None),
        (0, [bytes(MOST_BYTES - 1), b"xy"], ErrorCode.ENHANCE_YOUR_CALM),
        (0, [b"x", *[bytes(100)] * 10], ErrorCode.ENHANCE_YOUR_CALM),
        (END_HEADERS, [b"x", b"y"], ErrorCode.PROTOCOL_ERROR),  # CONTINUATION without HEADERS
    ],
)
def test_a_malformed_or_too_large_block_is_rejected(flags: int, parts: list[bytes], code: ErrorCode | None) -> None:
    assert fault(flags, *parts) == code


# -- the cache -------------------------------------------------------------------------------------------------


def test_a_repeated_block_is_decoded_once_after_the_table_stops_changing() -> None:
    memory, encoder = Memory(), Encoder()
    for _ in range(4):
        assert memory.decode(encoder.encode([(b"a", b"b")])) == [(b"a", b"b")]

    assert len(memory.decoded) == 2  # the first changes the table


def test_cached_blocks_are_dropped_when_the_table_changes() -> None:
    memory, encoder = Memory(), Encoder()
    first, second = [(b"a", b"b")], [(b"c", b"d")]
    memory.decode(encoder.encode(first))
    memory.decode(encoder.encode(first))
    memory.decode(encoder.encode(second))
    assert memory.memory.cached == {}

    # the same field has another index now
    assert memory.decode(encoder.encode(first)) == first


def test_cached_blocks_are_dropped_when_the_table_size_changes() -> None:
    memory, encoder = Memory(), Encoder()
    fields = [(b":method", b"GET")]
    memory.decode(encoder.encode(fields))
    encoder.header_table_size = 100
    memory.decode(encoder.encode(fields))

    assert memory.memory.cached == {}


def test_a_table_resized_to_zero_drops_its_entries() -> None:
    memory = Memory()
    memory.decode(Encoder().encode([(b"a", b"b")]))
    assert memory.decode(b"\xbe") == [(b"a", b"b")]

    with pytest.raises(Http2Error) as error:
        memory.decode(b"\x20\xbe")
    assert error.value.code == ErrorCode.COMPRESSION_ERROR


def test_at_most_32_blocks_are_cached() -> None:
    memory = Memory()
    blocks = [encode([(b"n", b"%d" % number)]) for number in range(33)]
    for block in blocks[:32]:
        memory.decode(block)
    assert len(memory.memory.cached) == 32
    memory.decode(blocks[32])

    assert memory.memory.cached.keys() == {blocks[32]}


@pytest.mark.parametrize(("size", "known"), [(4095, 1), (4096, 0)])
def test_a_long_header_list_is_not_cached(size: int, known: int) -> None:
    memory = Memory(10_000)
    memory.decode(encode([(b"n", bytes(size))]))

    assert len(memory.memory.cached) == known


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\xff\xff", ErrorCode.COMPRESSION_ERROR),
        (b"\xfe", ErrorCode.COMPRESSION_ERROR),  # an index beyond the table
        (b"\x40\x05ab", ErrorCode.COMPRESSION_ERROR),
        (b"\x20\x20\x20", ErrorCode.COMPRESSION_ERROR),
        (b"\x20\x3f\xe1\x1f\x20", ErrorCode.COMPRESSION_ERROR),
        (b"\x3f", ErrorCode.COMPRESSION_ERROR),
        (encode([(b"n", bytes(MOST_BYTES - 33))]), None),
        (encode([(b"n", bytes(MOST_BYTES - 32))]), ErrorCode.ENHANCE_YOUR_CALM),
        (b"\x20\x20", None),
        (b"", None),
    ],
)
def test_an_undecodable_block_or_too_long_header_list_is_rejected(block: bytes, code: ErrorCode | None) -> None:
    found = None
    try:
        Memory().decode(block)
    except Http2Error as error:
        found = error.code

    assert found == code


WORD = st.binary(max_size=12)
FIELD = st.tuples(
    st.sampled_from([b":path", b":method", b"te", b"x-a", b"x-b"]), st.one_of(WORD, st.sampled_from([b"/a", b"GET"]))
)


@given(st.lists(st.lists(FIELD, max_size=5), max_size=30), st.lists(st.integers(0, 4096), max_size=3))
def test_the_decoder_with_its_cache_returns_the_fields_of_every_block(lists: list[Fields], sizes: list[int]) -> None:
    memory, encoder = Memory(10_000), Encoder()
    for number, fields in enumerate(lists + lists):
        if number % 7 == 6 and sizes:
            encoder.header_table_size = sizes.pop()
        assert memory.decode(encoder.encode(fields)) == fields


# -- encoding --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.one_of(st.sampled_from([b":status", b"content-type"]), WORD.filter(len)), WORD)))
def test_encoded_fields_decode_the_same_with_any_table_and_leave_the_table_unchanged(fields: Fields) -> None:
    decoder = Decoder()
    decoder.decode(Encoder().encode([(b"a", b"b")]))
    table = list(decoder.header_table.dynamic_entries)

    assert [tuple(field) for field in decoder.decode(encode(fields), raw=True)] == fields
    assert list(decoder.header_table.dynamic_entries) == table


@pytest.mark.parametrize(("value", "block"), [(b"200", b"\x88"), (b"400", b"\x8c"), (b"404", b"\x08\x03404")])
def test_statuses_in_the_static_table_are_encoded_in_one_byte(value: bytes, block: bytes) -> None:
    assert encode([(b":status", value)]) == block


def test_a_long_value_is_encoded_with_a_multibyte_length() -> None:
    assert encode([(b"n", bytes(200))]) == b"\0\1n\x7f\x49" + bytes(200)


def test_a_table_size_update_is_prepended_to_a_block() -> None:
    assert prepend_to_block(b"\x20", frame(1, ENDS, 5, b"block")) == frame(1, ENDS, 5, b"\x20block")
