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
MOST_FRAMES, MOST_IDS, STRAIGHT = 512, 256, 32768


def connection(**limits: Any) -> FakeConnection:
    """Return a connection that has received SETTINGS and has cached one header block."""
    made = FakeConnection(**limits)
    made.headers.cached[KNOWN] = HEAD
    made.data_received(INTRODUCED)
    made.events.clear()
    return made


def opened(stream: int = 1, end: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | end, stream, KNOWN)


def data(content: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream, content)


def fault(made: FakeConnection) -> ErrorCode | None:
    """Return the error code that the connection was closed with."""
    return next((events[1] for events in made.events if events[0] == "fail"), None)


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
    made = FakeConnection(begun=False)
    for letter in PREFACE[:-1]:
        made.data_received(bytes([letter]))
    assert made.events == []

    made.data_received(PREFACE[-1:])
    assert made.events == [("begin",)]
    made.data_received(INTRODUCED)
    assert made.events[1:] == [(SETTINGS, 0, 0, b"")]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1", PREFACE[:-1] + b"?"])
def test_a_client_without_the_preface_is_answered_and_closed_and_the_rest_ignored(sent: bytes) -> None:
    made = FakeConnection(begun=False)
    made.data_received(sent)
    made.data_received(PREFACE + INTRODUCED)

    assert made.events == [("close",)]
    assert made.outbox.frames == [b"no: " + sent]
    assert not made.preface_received


@pytest.mark.parametrize("first", [PINGED, opened(), frame(SETTINGS, ACK, 0), data(b"x")])
def test_a_first_frame_other_than_settings_is_a_protocol_error(first: bytes) -> None:
    made = FakeConnection()
    made.data_received(first + INTRODUCED)

    assert made.events[0][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)
    assert made.events[1:] == [("close",)]


# -- frames ----------------------------------------------------------------------------------------------------


def test_a_cached_header_block_opens_its_stream_and_short_payloads_reach_the_stream() -> None:
    made = connection()
    made.data_received(opened(1) + data(b"one") + opened(3, END_STREAM) + data(b"two", flags=END_STREAM))

    assert made.events == [
        ("open", 1, HEAD, 0),
        (DATA, 1, b"one", 0),
        ("open", 3, HEAD, END_STREAM),
        (DATA, 1, b"two", END_STREAM),
    ]
    assert made.last_id == 3


def test_the_size_of_each_payload_is_deducted_from_the_connection_window() -> None:
    made = connection()
    before = made.window.remaining
    made.data_received(opened() + data(bytes(10)) + data(bytes(LONG)) + data(b"\5" + bytes(8), flags=PADDED))

    assert made.window.remaining == before - 10 - LONG - 9
    assert made.streams[1].receive_window == (1 << 30) - 10 - LONG - 9


def test_the_connection_window_is_refilled_when_more_than_half_of_it_is_used() -> None:
    made = connection()
    made.data_received(opened())
    made.window.remaining = made.window.refill_below + 5
    made.data_received(data(bytes(5)))
    assert made.outbox.written == [frames.window_update(0, (1 << 30) - frames.DEFAULT_WINDOW)]

    made.data_received(data(b"x"))
    assert made.outbox.written[1:] == [frames.window_update(0, (1 << 29) + 1)]


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
    made = connection()
    made.data_received(sent)

    assert any(events[0] == HEADERS for events in made.events)
    assert made.last_id == last_id


def test_headers_beyond_the_stream_limit_are_passed_to_the_connection() -> None:
    made = connection(max_streams=2)
    made.data_received(opened(1) + opened(3) + opened(5))

    assert [events[0] for events in made.events] == ["open", "open", HEADERS, "open"]


def test_data_after_the_end_of_a_stream_resets_the_stream_once() -> None:
    made = connection()
    made.data_received(opened(1, END_STREAM) + data(b"late"))
    assert made.events[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]

    made.data_received(data(b"later"))
    assert made.events[2:] == []


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
    made = connection()
    made.data_received(opened(1) + sent + PINGED)
    made.data_received(PINGED)

    assert made.events[0] == ("open", 1, HEAD, 0)
    assert fault(made) == code
    assert made.events[2:] == [("close",)]


@pytest.mark.parametrize("size", [LONG, LONG + 1, 1 << 20])
def test_plain_data_frames_may_be_as_long_as_the_limit(size: int) -> None:
    made = connection()
    made.data_received(opened() + data(bytes(size), flags=END_STREAM))

    assert made.events[1:] == [(DATA, 1, bytes(size), END_STREAM)]


@pytest.mark.parametrize("kind", [PING, HEADERS])
def test_other_frames_may_be_as_long_as_16_kib(kind: int) -> None:
    made = connection()
    made.data_received(frame(kind, END_HEADERS, 3, bytes(LONG)))

    assert made.events[0] == (kind, END_HEADERS, 3, bytes(LONG))


def test_a_too_large_frame_is_rejected_by_its_head_alone() -> None:
    made = connection()
    made.data_received(opened() + data(bytes((1 << 20) + 1))[:FRAME_HEADER_BYTES])

    assert fault(made) == ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    "sent", [PINGED, data(b"x"), data(bytes(LONG))[:20], opened(5), frame(CONTINUATION, 0, 5, b"x")]
)
def test_a_header_block_that_is_open_must_be_continued(sent: bytes) -> None:
    made = connection()
    made.data_received(opened(1))
    made.headers.block, made.headers.stream_id = bytearray(), 3
    made.data_received(frame(CONTINUATION, 0, 3, b"x") + sent)

    assert made.events[1] == (CONTINUATION, 0, 3, b"x")
    assert made.events[2][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)


def test_an_empty_data_frame_that_does_not_end_its_stream_is_charged() -> None:
    made = connection(max_idle_frames=0)
    made.outbox.streams = {}
    made.data_received(opened() + data(b"", flags=END_STREAM))
    assert fault(made) is None

    made = connection(max_idle_frames=0)
    made.data_received(opened() + 9 * data(b""))
    assert fault(made) == ErrorCode.ENHANCE_YOUR_CALM  # one open stream allows eight


@pytest.mark.parametrize(("size", "lent"), [(LONG - 1, 0), (LONG, LONG)])
def test_a_long_payload_is_passed_as_a_view_and_a_short_payload_as_bytes(size: int, lent: int) -> None:
    made = connection()
    made.data_received(opened() + data(bytes(size)))

    assert made.streams[1].lent == lent


def test_data_on_a_closed_stream_is_charged() -> None:
    made = connection(max_idle_frames=0)
    made.data_received(opened(1, END_STREAM) + data(b"x", 1))
    assert made.events[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]  # one open stream allowed it

    made = connection(max_idle_frames=0)
    made.last_id = 1
    made.data_received(data(b"x", 1))
    assert fault(made) == ErrorCode.ENHANCE_YOUR_CALM


def test_data_on_a_stream_reset_by_the_server_is_ignored_but_uses_the_window() -> None:
    made = connection()
    made.data_received(opened())
    made.reset(1, ErrorCode.CANCEL)
    before = made.window.remaining
    made.data_received(data(bytes(100)) + data(bytes(2 * LONG)))

    assert made.events[2:] == []
    assert made.window.remaining == before - 100 - 2 * LONG


# -- long frames and their buffers -----------------------------------------------------------------------------


def test_a_long_frame_is_passed_on_in_parts_and_its_last_part_ends_the_stream() -> None:
    made = connection()
    sent = data(b"x" * LONG, flags=END_STREAM)
    made.data_received(opened() + sent[:100])
    made.data_received(sent[100:-1])
    assert made.events[1:] == [(DATA, 1, b"x" * (100 - FRAME_HEADER_BYTES), 0), (DATA, 1, b"x" * (LONG - 92), 0)]

    made.data_received(sent[-1:])
    assert made.events[3:] == [(DATA, 1, b"x", END_STREAM)]


def test_a_short_frame_is_kept_until_it_is_complete() -> None:
    made = connection()
    sent = data(b"x" * (LONG - 1))
    made.data_received(opened() + sent[:-1])
    assert made.events[1:] == []

    made.data_received(sent[-1:])
    assert made.events[1:] == [(DATA, 1, b"x" * (LONG - 1), 0)]


@pytest.mark.parametrize(("left", "straight"), [(STRAIGHT, True), (STRAIGHT - 1, False)])
@pytest.mark.parametrize("place", [STRAIGHT, 1000])
def test_the_rest_of_a_long_frame_is_received_directly_if_its_stream_has_a_buffer(
    left: int, straight: bool, place: int
) -> None:
    made = connection()
    made.place = memoryview(bytearray(place))
    sent = data(b"x" * (left + 1), flags=END_STREAM)
    made.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    assert made.transport.straight == straight

    made.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])
    assert joined(made.events[1:]) == [(DATA, 1, b"x" * (left + 1), END_STREAM)]
    assert [events[3] for events in made.events[1:-1]] == [0] * (len(made.events) - 2)
    assert made.streams[1].had_place == (left if straight else 0)
    assert made.streams[1].lent == (1 if straight else left + 1)


def test_direct_reading_lasts_between_long_frames_and_ends_without_a_buffer() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    sent = data(b"x" * (1 << 16))
    made.data_received(opened() + sent[:10])
    assert made.transport.straight

    made.transport.arrive(sent[10:])
    assert made.transport.straight
    made.streams[1].place = None
    made.transport.arrive(PINGED + sent[:10])
    assert not made.transport.straight

    made.transport.arrive(sent[10:])
    assert joined(made.events[1:]) == [
        (DATA, 1, b"x" * (1 << 16), 0),
        (PING, 0, 0, bytes(8)),
        (DATA, 1, b"x" * (1 << 16), 0),
    ]
    made.streams[1].place = made.place
    made.transport.arrive(sent[:10])
    assert made.transport.straight


def test_the_read_buffer_is_never_larger_than_the_rest_of_the_frame() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 20))
    made.data_received(opened() + data(bytes(STRAIGHT + 1))[: FRAME_HEADER_BYTES + 1])

    assert len(made.read_buffer()) == STRAIGHT


def test_directly_received_bytes_are_deducted_from_the_connection_window() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 20))
    sent = data(bytes(STRAIGHT + 1))
    before = made.window.remaining
    made.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    made.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])

    assert made.window.remaining == before - STRAIGHT - 1


@pytest.mark.parametrize("end", ["reset", "half closed"])
def test_the_rest_of_a_frame_is_discarded_after_its_stream_ends(end: str) -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    sent = data(bytes(1 << 16))
    made.data_received(opened() + sent[:100])
    if end == "reset":
        made.reset(1, ErrorCode.CANCEL)
    else:
        made.streams[1].remote_ended = True
        made.recently_closed.add(1)
        made.streams.pop(1)
    made.events.clear()
    made.transport.arrive(sent[100:] + PINGED)

    assert made.events == [(PING, 0, 0, bytes(8))]


def test_bytes_read_after_the_connection_closes_do_not_reach_the_stream() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    made.data_received(opened() + data(bytes(1 << 16))[:100])
    made.read_buffer()
    made.close()
    made.on_read(10)

    assert made.streams[1].had_place == 0
    assert made.events[2:] == [("close",)]


# -- turns -----------------------------------------------------------------------------------------------------


def pinged(made: FakeConnection) -> int:
    return sum(events[0] == PING for events in made.events)


def test_reading_pauses_for_a_turn_of_the_loop_after_many_frames() -> None:
    made = connection()
    made.data_received(PINGED * (2 * MOST_FRAMES + 1))
    assert pinged(made) == MOST_FRAMES
    assert not made.transport.reading

    made.loop.turn()
    assert pinged(made) == 2 * MOST_FRAMES + 1
    assert made.transport.reading


def test_data_received_during_a_pause_is_processed_without_a_second_pause() -> None:
    made = connection()
    made.data_received(PINGED * (MOST_FRAMES + 1))
    made.data_received(PINGED * (MOST_FRAMES + 1))
    made.loop.turn()
    assert pinged(made) == 2 * (MOST_FRAMES + 1)
    assert made.transport.reading

    made.data_received(PINGED)
    assert made.transport.reading


def test_fewer_frames_than_the_limit_are_processed_without_a_pause() -> None:
    made = connection()
    made.data_received(PINGED * (MOST_FRAMES - 1))

    assert pinged(made) == MOST_FRAMES - 1
    assert made.transport.reading


@pytest.mark.parametrize("block", [KNOWN, b"other"])
def test_reading_pauses_for_a_turn_of_the_loop_after_many_new_streams(block: bytes) -> None:
    made = connection()
    sent = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number in range(MOST_IDS))
    made.data_received(sent)
    # the connection handles the stream that shows that there are too many
    assert sum(events[0] == "open" for events in made.events) == MOST_IDS // 2 + 1
    assert not made.transport.reading

    made.loop.turn()
    assert sum(events[0] == "open" for events in made.events) == MOST_IDS
    assert made.transport.reading


def test_fewer_new_streams_than_the_limit_are_opened_without_a_pause() -> None:
    made = connection()
    made.data_received(b"".join(opened(2 * number + 1) for number in range(MOST_IDS // 2)))

    assert made.last_id == MOST_IDS - 1
    assert made.transport.reading


def test_a_connection_closed_during_a_pause_reads_no_more() -> None:
    made = connection()
    made.data_received(PINGED * (MOST_FRAMES + 1))
    made.transport.close()
    made.loop.turn()

    assert pinged(made) == MOST_FRAMES
    assert not made.transport.reading


# -- time ------------------------------------------------------------------------------------------------------


def stuck(made: FakeConnection) -> bool:
    anything: Any = made
    return made.reader.is_stalled(anything)


def test_the_reader_is_stalled_while_the_same_frame_is_incomplete() -> None:
    made = connection()
    made.data_received(opened() + data(bytes(100))[:-1])
    assert [stuck(made), stuck(made)] == [False, True]

    made.data_received(data(bytes(100))[-1:] + data(bytes(100))[:5])
    assert [stuck(made), stuck(made)] == [False, True]
    made.data_received(data(bytes(100))[5:6])
    assert stuck(made)  # a byte now and then does not help
    made.data_received(data(bytes(100))[6:])
    assert not stuck(made)


def test_the_reader_is_not_stalled_while_a_long_frame_advances() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    made.data_received(opened() + data(bytes(1 << 16))[:100])
    assert [stuck(made), stuck(made)] == [False, True]

    made.transport.arrive(bytes(1))
    assert [stuck(made), stuck(made)] == [False, True]


def test_the_reader_is_stalled_while_a_header_block_is_open() -> None:
    made = connection()
    made.headers.block = bytearray()
    made.data_received(INTRODUCED)

    assert stuck(made)


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
    whole = PREFACE + INTRODUCED + b"".join(sent)
    events = []
    at = sorted({cut % len(whole) for cut in cuts} | {0, len(whole)})
    for pieces in ([whole], [whole[begin:end] for begin, end in pairwise(at)]):
        made = FakeConnection(begun=False)
        made.headers.cached[KNOWN] = HEAD
        made.place = memoryview(bytearray(1 << 12)) if places else None
        for piece in pieces:
            made.transport.arrive(piece)
            made.loop.turn()
        events.append(joined(made.events))

    assert events[0] == events[1]
