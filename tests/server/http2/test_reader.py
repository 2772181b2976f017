"""FrameReader alone: bytes become frames, however they are split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.http2 import frames
from penstock.server.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    SETTINGS,
    ErrorCode,
    frame,
)

from .fakes import FakeConnection

KNOWN, HEAD = b"known", object()
INTRODUCED = frames.settings({})
PINGED = frame(PING, 0, 0, bytes(8))
LONG = frames.MIN_FRAME_BYTES
MOST_FRAMES, MOST_IDS, STRAIGHT = 2048, 256, 32768


def connection(**limits: Any) -> FakeConnection:
    """Return a connection that has received SETTINGS and has cached one header block."""
    fake_connection = FakeConnection(**limits)
    fake_connection.headers.cached[KNOWN] = HEAD
    fake_connection.data_received(INTRODUCED)
    fake_connection.events.clear()
    return fake_connection


def opened(stream: int = 1, end: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | end, stream, KNOWN)


def data(content: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream, content)


def fault(fake: FakeConnection) -> ErrorCode | None:
    """Return the error code that the connection was closed with."""
    return next((events[1] for events in fake.events if events[0] == "fail"), None)


def joined(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Join consecutive DATA of one stream: a long frame arrives in parts."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        last = found[-1] if found else ("",)
        if event[0] == last[0] == DATA and event[1] == last[1] and not last[3]:
            found[-1] = (DATA, event[1], last[2] + event[2], event[3])
        else:
            found.append(event)
    return found


# -- the preface -----------------------------------------------------------------------------------------------


def test_the_connection_begins_only_when_the_whole_preface_has_arrived() -> None:
    fake = FakeConnection(begun=False)
    for letter in PREFACE[:-1]:
        fake.data_received(bytes([letter]))
    assert fake.events == []

    fake.data_received(PREFACE[-1:])
    assert fake.events == [("begin",)]
    fake.data_received(INTRODUCED)
    assert fake.events[1:] == [(SETTINGS, 0, 0, b"")]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1", PREFACE[:-1] + b"?"])
def test_a_client_without_the_preface_is_answered_and_closed_and_the_rest_ignored(sent: bytes) -> None:
    fake = FakeConnection(begun=False)
    fake.data_received(sent)
    fake.data_received(PREFACE + INTRODUCED)

    assert fake.events == [("close",)]
    assert fake.outbox.frames == [b"no: " + sent]
    assert not fake.preface_received


@pytest.mark.parametrize("first", [PINGED, opened(), frame(SETTINGS, ACK, 0), data(b"x")])
def test_a_first_frame_other_than_settings_is_a_protocol_error(first: bytes) -> None:
    fake = FakeConnection()
    fake.data_received(first + INTRODUCED)

    assert fake.events[0][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)
    assert fake.events[1:] == [("close",)]


# -- frames ----------------------------------------------------------------------------------------------------


def test_a_cached_header_block_opens_its_stream_and_short_payloads_reach_the_stream() -> None:
    fake = connection()
    fake.data_received(opened(1) + data(b"one") + opened(3, END_STREAM) + data(b"two", flags=END_STREAM))

    assert fake.events == [
        ("open", 1, HEAD, 0),
        (DATA, 1, b"one", 0),
        ("open", 3, HEAD, END_STREAM),
        (DATA, 1, b"two", END_STREAM),
    ]
    assert fake.last_id == 3


def test_the_size_of_each_payload_is_deducted_from_the_connection_window() -> None:
    fake = connection()
    before = fake.window.remaining
    fake.data_received(opened() + data(bytes(10)) + data(bytes(LONG)) + data(b"\5" + bytes(8), flags=PADDED))

    assert fake.window.remaining == before - 10 - LONG - 9
    assert fake.streams[1].receive_window == (1 << 30) - 10 - LONG - 9


def test_the_connection_window_is_refilled_when_more_than_half_of_it_is_used() -> None:
    fake = connection()
    fake.data_received(opened())
    fake.window.remaining = fake.window.refill_below + 5
    fake.data_received(data(bytes(5)))
    assert fake.outbox.written == [frames.window_update(0, (1 << 30) - frames.DEFAULT_WINDOW)]

    fake.data_received(data(b"x"))
    assert fake.outbox.written[1:] == [frames.window_update(0, (1 << 29) + 1)]


@pytest.mark.parametrize(
    ("sent", "last_id"),
    [
        (opened(5) + opened(3), 5),  # smaller than an earlier stream ID
        (opened(5) + opened(5), 5),
        (frame(HEADERS, END_HEADERS | PADDED, 1, KNOWN), 1),
        (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, KNOWN), 1),
        (frame(HEADERS, 0, 1, KNOWN), 1),
        (frame(HEADERS, END_HEADERS, 1, b"not known"), 1),
    ],
)
def test_unusual_headers_frames_are_passed_to_the_connection(sent: bytes, last_id: int) -> None:
    fake = connection()
    fake.data_received(sent)

    assert any(events[0] == HEADERS for events in fake.events)
    assert fake.last_id == last_id


def test_headers_beyond_the_stream_limit_are_passed_to_the_connection() -> None:
    fake = connection(max_streams=2)
    fake.data_received(opened(1) + opened(3) + opened(5))

    assert [events[0] for events in fake.events] == ["open", "open", HEADERS, "open"]


def test_data_after_the_end_of_a_stream_resets_the_stream_once() -> None:
    fake = connection()
    fake.data_received(opened(1, END_STREAM) + data(b"late"))
    assert fake.events[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]

    fake.data_received(data(b"later"))
    assert fake.events[2:] == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (data(b"x", stream=0), ErrorCode.PROTOCOL_ERROR),
        (data(b"x", stream=9), ErrorCode.PROTOCOL_ERROR),  # idle
        (data(b"\7short", flags=PADDED), ErrorCode.PROTOCOL_ERROR),
        (data(b"", flags=PADDED), ErrorCode.PROTOCOL_ERROR),
        (opened(2), ErrorCode.PROTOCOL_ERROR),
        (opened(0), ErrorCode.PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(LONG + 1)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS, 3, bytes(LONG + 1)), ErrorCode.FRAME_SIZE_ERROR),
        (data(bytes(LONG + 1), flags=PADDED), ErrorCode.FRAME_SIZE_ERROR),
        (data(bytes((1 << 20) + 1)), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_an_invalid_frame_ends_the_connection_and_later_frames_are_ignored(sent: bytes, code: ErrorCode) -> None:
    fake = connection()
    fake.data_received(opened(1) + sent + PINGED)
    fake.data_received(PINGED)

    assert fake.events[0] == ("open", 1, HEAD, 0)
    assert fault(fake) == code
    assert fake.events[2:] == [("close",)]


@pytest.mark.parametrize("size", [LONG, LONG + 1, 1 << 20])
def test_plain_data_frames_may_be_as_long_as_the_limit(size: int) -> None:
    fake = connection()
    fake.data_received(opened() + data(bytes(size), flags=END_STREAM))

    assert fake.events[1:] == [(DATA, 1, bytes(size), END_STREAM)]


@pytest.mark.parametrize("kind", [PING, HEADERS])
def test_other_frames_may_be_as_long_as_16_kib(kind: int) -> None:
    fake = connection()
    fake.data_received(frame(kind, END_HEADERS, 3, bytes(LONG)))

    assert fake.events[0] == (kind, END_HEADERS, 3, bytes(LONG))


def test_a_too_large_frame_is_rejected_by_its_head_alone() -> None:
    fake = connection()
    fake.data_received(opened() + data(bytes((1 << 20) + 1))[:FRAME_HEADER_BYTES])

    assert fault(fake) == ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    "sent", [PINGED, data(b"x"), data(bytes(LONG))[:20], opened(5), frame(CONTINUATION, 0, 5, b"x")]
)
def test_a_header_block_that_is_open_must_be_continued(sent: bytes) -> None:
    fake = connection()
    fake.data_received(opened(1))
    fake.headers.block, fake.headers.stream_id = bytearray(), 3
    fake.data_received(frame(CONTINUATION, 0, 3, b"x") + sent)

    assert fake.events[1] == (CONTINUATION, 0, 3, b"x")
    assert fake.events[2][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)


def test_an_empty_data_frame_that_does_not_end_its_stream_is_charged() -> None:
    fake = connection(max_idle_frames=0)
    fake.outbox.streams = {}
    fake.data_received(opened() + data(b"", flags=END_STREAM))
    assert fault(fake) is None

    fake = connection(max_idle_frames=0)
    fake.data_received(opened() + 9 * data(b""))
    assert fault(fake) == ErrorCode.ENHANCE_YOUR_CALM  # one open stream allows eight


@pytest.mark.parametrize(("size", "lent"), [(LONG - 1, 0), (LONG, LONG)])
def test_a_long_payload_is_passed_as_a_view_and_a_short_payload_as_bytes(size: int, lent: int) -> None:
    fake = connection()
    fake.data_received(opened() + data(bytes(size)))

    assert fake.streams[1].lent == lent


def test_data_on_a_closed_stream_is_charged() -> None:
    fake = connection(max_idle_frames=0)
    fake.data_received(opened(1, END_STREAM) + data(b"x", 1))
    assert fake.events[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]  # one open stream allowed it

    fake = connection(max_idle_frames=0)
    fake.last_id = 1
    fake.data_received(data(b"x", 1))
    assert fault(fake) == ErrorCode.ENHANCE_YOUR_CALM


def test_data_on_a_stream_reset_by_the_server_is_ignored_but_uses_the_window() -> None:
    fake = connection()
    fake.data_received(opened())
    fake.reset(1, ErrorCode.CANCEL)
    before = fake.window.remaining
    fake.data_received(data(bytes(100)) + data(bytes(2 * LONG)))

    assert fake.events[2:] == []
    assert fake.window.remaining == before - 100 - 2 * LONG


# -- long frames and their buffers -----------------------------------------------------------------------------


def test_a_long_frame_is_passed_on_in_parts_and_its_last_part_ends_the_stream() -> None:
    fake = connection()
    sent = data(b"x" * LONG, flags=END_STREAM)
    fake.data_received(opened() + sent[:100])
    fake.data_received(sent[100:-1])
    assert fake.events[1:] == [(DATA, 1, b"x" * (100 - FRAME_HEADER_BYTES), 0), (DATA, 1, b"x" * (LONG - 92), 0)]

    fake.data_received(sent[-1:])
    assert fake.events[3:] == [(DATA, 1, b"x", END_STREAM)]


def test_a_short_frame_is_kept_until_it_is_complete() -> None:
    fake = connection()
    sent = data(b"x" * (LONG - 1))
    fake.data_received(opened() + sent[:-1])
    assert fake.events[1:] == []

    fake.data_received(sent[-1:])
    assert fake.events[1:] == [(DATA, 1, b"x" * (LONG - 1), 0)]


@pytest.mark.parametrize(("rest_bytes", "straight"), [(STRAIGHT, True), (STRAIGHT - 1, False)])
@pytest.mark.parametrize("place", [STRAIGHT, 1000])
def test_the_rest_of_a_long_frame_is_received_directly_if_its_stream_has_a_buffer(
    rest_bytes: int, straight: bool, place: int
) -> None:
    fake = connection()
    fake.place = memoryview(bytearray(place))
    sent = data(b"x" * (rest_bytes + 1), flags=END_STREAM)
    fake.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    assert fake.transport.straight == straight

    fake.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])
    assert joined(fake.events[1:]) == [(DATA, 1, b"x" * (rest_bytes + 1), END_STREAM)]
    assert [events[3] for events in fake.events[1:-1]] == [0] * (len(fake.events) - 2)
    assert fake.streams[1].had_place == (rest_bytes if straight else 0)
    assert fake.streams[1].lent == (1 if straight else rest_bytes + 1)


def test_direct_reading_lasts_between_long_frames_and_ends_without_a_buffer() -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 16))
    sent = data(b"x" * (1 << 16))
    fake.data_received(opened() + sent[:10])
    assert fake.transport.straight

    fake.transport.arrive(sent[10:])
    assert fake.transport.straight
    fake.streams[1].place = None
    fake.transport.arrive(PINGED + sent[:10])
    assert not fake.transport.straight

    fake.transport.arrive(sent[10:])
    assert joined(fake.events[1:]) == [
        (DATA, 1, b"x" * (1 << 16), 0),
        (PING, 0, 0, bytes(8)),
        (DATA, 1, b"x" * (1 << 16), 0),
    ]
    fake.streams[1].place = fake.place
    fake.transport.arrive(sent[:10])
    assert fake.transport.straight


def test_the_read_buffer_is_never_larger_than_the_rest_of_the_frame() -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 20))
    fake.data_received(opened() + data(bytes(STRAIGHT + 1))[: FRAME_HEADER_BYTES + 1])

    assert len(fake.read_buffer()) == STRAIGHT


def test_directly_received_bytes_are_deducted_from_the_connection_window() -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 20))
    sent = data(bytes(STRAIGHT + 1))
    before = fake.window.remaining
    fake.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    fake.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])

    assert fake.window.remaining == before - STRAIGHT - 1


@pytest.mark.parametrize("end", ["reset", "half closed"])
def test_the_rest_of_a_frame_is_discarded_after_its_stream_ends(end: str) -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 16))
    sent = data(bytes(1 << 16))
    fake.data_received(opened() + sent[:100])
    if end == "reset":
        fake.reset(1, ErrorCode.CANCEL)
    else:
        fake.streams[1].remote_ended = True
        fake.recently_closed.add(1)
        fake.streams.pop(1)
    fake.events.clear()
    fake.transport.arrive(sent[100:] + PINGED)

    assert fake.events == [(PING, 0, 0, bytes(8))]


def test_bytes_read_after_the_connection_closes_do_not_reach_the_stream() -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 16))
    fake.data_received(opened() + data(bytes(1 << 16))[:100])
    fake.read_buffer()
    fake.close()
    fake.on_read(10)

    assert fake.streams[1].had_place == 0
    assert fake.events[2:] == [("close",)]


# -- turns -----------------------------------------------------------------------------------------------------


def pinged(fake: FakeConnection) -> int:
    return sum(events[0] == PING for events in fake.events)


def test_reading_pauses_for_a_turn_of_the_loop_after_many_frames() -> None:
    fake = connection()
    fake.data_received(PINGED * (2 * MOST_FRAMES + 1))
    assert pinged(fake) == MOST_FRAMES
    assert not fake.transport.reading

    fake.loop.turn()
    assert pinged(fake) == 2 * MOST_FRAMES + 1
    assert fake.transport.reading


def test_data_received_during_a_pause_is_processed_without_a_second_pause() -> None:
    fake = connection()
    fake.data_received(PINGED * (MOST_FRAMES + 1))
    fake.data_received(PINGED * (MOST_FRAMES + 1))
    fake.loop.turn()
    assert pinged(fake) == 2 * (MOST_FRAMES + 1)
    assert fake.transport.reading

    fake.data_received(PINGED)
    assert fake.transport.reading


def test_fewer_frames_than_the_limit_are_processed_without_a_pause() -> None:
    fake = connection()
    fake.data_received(PINGED * (MOST_FRAMES - 1))

    assert pinged(fake) == MOST_FRAMES - 1
    assert fake.transport.reading


@pytest.mark.parametrize("block", [KNOWN, b"other"])
def test_reading_pauses_for_a_turn_of_the_loop_after_many_new_streams(block: bytes) -> None:
    fake = connection()
    sent = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number in range(MOST_IDS))
    fake.data_received(sent)
    # the connection handles the stream that shows that there are too many
    assert sum(events[0] == "open" for events in fake.events) == MOST_IDS // 2 + 1
    assert not fake.transport.reading

    fake.loop.turn()
    assert sum(events[0] == "open" for events in fake.events) == MOST_IDS
    assert fake.transport.reading


def test_fewer_new_streams_than_the_limit_are_opened_without_a_pause() -> None:
    fake = connection()
    fake.data_received(b"".join(opened(2 * number + 1) for number in range(MOST_IDS // 2)))

    assert fake.last_id == MOST_IDS - 1
    assert fake.transport.reading


def test_a_connection_closed_during_a_pause_reads_no_more() -> None:
    fake = connection()
    fake.data_received(PINGED * (MOST_FRAMES + 1))
    fake.transport.close()
    fake.loop.turn()

    assert pinged(fake) == MOST_FRAMES
    assert not fake.transport.reading


# -- time ------------------------------------------------------------------------------------------------------


def stuck(fake: FakeConnection) -> bool:
    anything: Any = fake
    return fake.reader.is_stalled(anything)


def test_the_reader_is_stalled_while_the_same_frame_is_incomplete() -> None:
    fake = connection()
    fake.data_received(opened() + data(bytes(100))[:-1])
    assert [stuck(fake), stuck(fake)] == [False, True]

    fake.data_received(data(bytes(100))[-1:] + data(bytes(100))[:5])
    assert [stuck(fake), stuck(fake)] == [False, True]
    fake.data_received(data(bytes(100))[5:6])
    assert stuck(fake)  # a byte now and then does not help
    fake.data_received(data(bytes(100))[6:])
    assert not stuck(fake)


def test_the_reader_is_not_stalled_while_a_long_frame_advances() -> None:
    fake = connection()
    fake.place = memoryview(bytearray(1 << 16))
    fake.data_received(opened() + data(bytes(1 << 16))[:100])
    assert [stuck(fake), stuck(fake)] == [False, True]

    fake.transport.arrive(bytes(1))
    assert [stuck(fake), stuck(fake)] == [False, True]


def test_the_reader_is_stalled_while_a_header_block_is_open() -> None:
    fake = connection()
    fake.headers.block = bytearray()
    fake.data_received(INTRODUCED)

    assert stuck(fake)


# -- any split -------------------------------------------------------------------------------------------------

STREAMS = st.sampled_from([1, 3, 5, 7])
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([LONG - 1, LONG, LONG + 1, STRAIGHT, STRAIGHT + 1, 70_000]))
FRAMES = st.one_of(
    st.builds(lambda stream, end, known: frame(HEADERS, END_HEADERS | end, stream, KNOWN if known else b"other"),
              STREAMS, st.integers(0, 1), st.booleans()),
    st.builds(lambda stream, size, end: data(bytes(range(256)) * (size // 256) + bytes(size % 256), stream, end),
              STREAMS, SIZES, st.integers(0, 1)),
    st.builds(lambda stream, pad: data(bytes([pad]) + bytes(20), stream, PADDED), STREAMS, st.integers(0, 20)),
    st.builds(lambda kind, stream: frame(kind, 0, stream, bytes(8)),
              st.sampled_from([PING, SETTINGS, frames.WINDOW_UPDATE, frames.PRIORITY, 77]), st.sampled_from([0, 1, 3])),
    st.sampled_from([data(b"x", 0), opened(2), frame(PUSH_PROMISE, 0, 1), frame(PING, 0, 0, bytes(LONG + 1))]),
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(FRAMES, max_size=12), st.lists(st.integers(0, 1 << 20), max_size=12), st.booleans())
def test_any_split_of_the_bytes_gives_the_same_frames(sent: list[bytes], cuts: list[int], places: bool) -> None:
    stream_bytes = PREFACE + INTRODUCED + b"".join(sent)
    events = []
    at = sorted({cut % len(stream_bytes) for cut in cuts} | {0, len(stream_bytes)})
    for pieces in ([stream_bytes], [stream_bytes[begin:end] for begin, end in pairwise(at)]):
        fake = FakeConnection(begun=False)
        fake.headers.cached[KNOWN] = HEAD
        fake.place = memoryview(bytearray(1 << 12)) if places else None
        for piece in pieces:
            fake.transport.arrive(piece)
            fake.loop.turn()
        events.append(joined(fake.events))

    assert events[0] == events[1]
