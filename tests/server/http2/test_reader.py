"""FrameReader alone: frames of bytes, however those are split."""

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

from .parts import FakeConnection

KNOWN, HEAD = b"known", object()
INTRODUCED = frames.settings({})
PINGED = frame(PING, 0, 0, bytes(8))
LONG = frames.MIN_FRAME_BYTES
MOST_FRAMES, MOST_IDS, STRAIGHT = 2048, 256, 32768


def connection(**limits: Any) -> FakeConnection:
    """Make one that has introduced itself and knows a header block."""
    made = FakeConnection(**limits)
    made.headers.cached[KNOWN] = HEAD
    made.data_received(INTRODUCED)
    made.told.clear()
    return made


def opened(stream: int = 1, end: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | end, stream, KNOWN)


def data(content: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream, content)


def fault(made: FakeConnection) -> ErrorCode | None:
    """Give the code of what it was closed for."""
    return next((told[1] for told in made.told if told[0] == "fail"), None)


def joined(told: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Put together what came of a stream one after another: a long frame comes in parts."""
    found: list[tuple[Any, ...]] = []
    for one in told:
        last = found[-1] if found else ("",)
        if one[0] == last[0] == DATA and one[1] == last[1] and not last[3]:
            found[-1] = (DATA, one[1], last[2] + one[2], one[3])
        else:
            found.append(one)
    return found


# -- the preface -----------------------------------------------------------------------------------------------


def test_it_begins_once_the_preface_is_there_and_not_before() -> None:
    made = FakeConnection(begun=False)
    for letter in PREFACE[:-1]:
        made.data_received(bytes([letter]))
    assert made.told == []

    made.data_received(PREFACE[-1:])
    assert made.told == [("begin",)]
    made.data_received(INTRODUCED)
    assert made.told[1:] == [(SETTINGS, 0, 0, b"")]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/1.1", PREFACE[:-1] + b"?"])
def test_who_does_not_say_it_is_greeted_and_left_and_nothing_more_is_looked_at(sent: bytes) -> None:
    made = FakeConnection(begun=False)
    made.data_received(sent)
    made.data_received(PREFACE + INTRODUCED)

    assert made.told == [("close",)]
    assert made.outbox.frames == [b"no: " + sent]
    assert not made.preface_received


@pytest.mark.parametrize("first", [PINGED, opened(), frame(SETTINGS, ACK, 0), data(b"x")])
def test_the_first_frame_is_settings(first: bytes) -> None:
    made = FakeConnection()
    made.data_received(first + INTRODUCED)

    assert made.told[0][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)
    assert made.told[1:] == [("close",)]


# -- frames ----------------------------------------------------------------------------------------------------


def test_a_known_block_opens_its_stream_and_a_short_payload_goes_to_it() -> None:
    made = connection()
    made.data_received(opened(1) + data(b"one") + opened(3, END_STREAM) + data(b"two", flags=END_STREAM))

    assert made.told == [
        ("open", 1, HEAD, 0),
        (DATA, 1, b"one", 0),
        ("open", 3, HEAD, END_STREAM),
        (DATA, 1, b"two", END_STREAM),
    ]
    assert made.last_id == 3


def test_what_is_paid_for_a_payload_is_its_size_from_the_connections_window() -> None:
    made = connection()
    before = made.window.remaining
    made.data_received(opened() + data(bytes(10)) + data(bytes(LONG)) + data(b"\5" + bytes(8), flags=PADDED))

    assert made.window.remaining == before - 10 - LONG - 9
    assert made.streams[1].receive_window == (1 << 30) - 10 - LONG - 9


def test_the_window_is_given_back_once_more_than_half_of_it_is_used() -> None:
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
        (opened(5) + opened(3), 5),  # smaller than one before
        (opened(5) + opened(5), 5),
        (frame(HEADERS, END_HEADERS | PADDED, 1, KNOWN), 1),
        (frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, KNOWN), 1),
        (frame(HEADERS, 0, 1, KNOWN), 1),
        (frame(HEADERS, END_HEADERS, 1, b"not known"), 1),
    ],
)
def test_headers_that_are_not_the_plain_kind_are_the_connections_to_judge(sent: bytes, last_id: int) -> None:
    made = connection()
    made.data_received(sent)

    assert any(told[0] == HEADERS for told in made.told)
    assert made.last_id == last_id


def test_so_are_those_beyond_the_streams_that_may_be_open() -> None:
    made = connection(max_streams=2)
    made.data_received(opened(1) + opened(3) + opened(5))

    assert [told[0] for told in made.told] == ["open", "open", HEADERS, "open"]


def test_a_stream_that_ended_takes_no_more() -> None:
    made = connection()
    made.data_received(opened(1, END_STREAM) + data(b"late"))
    assert made.told[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]

    made.data_received(data(b"later"))
    assert made.told[2:] == []


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
def test_what_is_wrong_ends_the_connection_and_what_follows_is_not_looked_at(sent: bytes, code: ErrorCode) -> None:
    made = connection()
    made.data_received(opened(1) + sent + PINGED)
    made.data_received(PINGED)

    assert made.told[0] == ("open", 1, HEAD, 0)
    assert fault(made) == code
    assert made.told[2:] == [("close",)]


@pytest.mark.parametrize("size", [LONG, LONG + 1, 1 << 20])
def test_plain_data_may_be_as_long_as_the_limit(size: int) -> None:
    made = connection()
    made.data_received(opened() + data(bytes(size), flags=END_STREAM))

    assert made.told[1:] == [(DATA, 1, bytes(size), END_STREAM)]


@pytest.mark.parametrize("kind", [PING, HEADERS])
def test_other_frames_may_have_16_kib(kind: int) -> None:
    made = connection()
    made.data_received(frame(kind, END_HEADERS, 3, bytes(LONG)))

    assert made.told[0] == (kind, END_HEADERS, 3, bytes(LONG))


def test_the_head_of_a_frame_that_is_too_large_is_enough_to_refuse_it() -> None:
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

    assert made.told[1] == (CONTINUATION, 0, 3, b"x")
    assert made.told[2][:2] == ("fail", ErrorCode.PROTOCOL_ERROR)


def test_an_empty_payload_that_ends_nothing_is_charged() -> None:
    made = connection(max_idle_frames=0)
    made.outbox.streams = {}
    made.data_received(opened() + data(b"", flags=END_STREAM))
    assert fault(made) is None

    made = connection(max_idle_frames=0)
    made.data_received(opened() + 9 * data(b""))
    assert fault(made) == ErrorCode.ENHANCE_YOUR_CALM  # one open stream earns eight


@pytest.mark.parametrize(("size", "lent"), [(LONG - 1, 0), (LONG, LONG)])
def test_a_long_payload_is_lent_and_a_short_one_given(size: int, lent: int) -> None:
    made = connection()
    made.data_received(opened() + data(bytes(size)))

    assert made.streams[1].lent == lent


def test_what_comes_of_a_stream_that_is_closed_is_charged() -> None:
    made = connection(max_idle_frames=0)
    made.data_received(opened(1, END_STREAM) + data(b"x", 1))
    assert made.told[1:] == [("reset", 1, ErrorCode.STREAM_CLOSED)]  # one open stream earned it

    made = connection(max_idle_frames=0)
    made.last_id = 1
    made.data_received(data(b"x", 1))
    assert fault(made) == ErrorCode.ENHANCE_YOUR_CALM


def test_what_comes_of_a_stream_that_was_reset_here_passes_but_counts_for_the_window() -> None:
    made = connection()
    made.data_received(opened())
    made.reset(1, ErrorCode.CANCEL)
    before = made.window.remaining
    made.data_received(data(bytes(100)) + data(bytes(2 * LONG)))

    assert made.told[2:] == []
    assert made.window.remaining == before - 100 - 2 * LONG


# -- long frames, and where they go ----------------------------------------------------------------------------


def test_a_long_frame_is_handed_on_before_it_is_whole_and_ends_its_stream_with_its_last_byte() -> None:
    made = connection()
    sent = data(b"x" * LONG, flags=END_STREAM)
    made.data_received(opened() + sent[:100])
    made.data_received(sent[100:-1])
    assert made.told[1:] == [(DATA, 1, b"x" * (100 - FRAME_HEADER_BYTES), 0), (DATA, 1, b"x" * (LONG - 92), 0)]

    made.data_received(sent[-1:])
    assert made.told[3:] == [(DATA, 1, b"x", END_STREAM)]


def test_a_shorter_one_is_kept_until_it_is() -> None:
    made = connection()
    sent = data(b"x" * (LONG - 1))
    made.data_received(opened() + sent[:-1])
    assert made.told[1:] == []

    made.data_received(sent[-1:])
    assert made.told[1:] == [(DATA, 1, b"x" * (LONG - 1), 0)]


@pytest.mark.parametrize(("left", "straight"), [(STRAIGHT, True), (STRAIGHT - 1, False)])
@pytest.mark.parametrize("place", [STRAIGHT, 1000])
def test_what_is_still_to_come_of_a_long_frame_is_read_to_its_place_if_there_is_one(
    left: int, straight: bool, place: int
) -> None:
    made = connection()
    made.place = memoryview(bytearray(place))
    sent = data(b"x" * (left + 1), flags=END_STREAM)
    made.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    assert made.transport.straight == straight

    made.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])
    assert joined(made.told[1:]) == [(DATA, 1, b"x" * (left + 1), END_STREAM)]
    assert [told[3] for told in made.told[1:-1]] == [0] * (len(made.told) - 2)
    assert made.streams[1].had_place == (left if straight else 0)
    assert made.streams[1].lent == (1 if straight else left + 1)


def test_between_such_frames_it_goes_on_as_before_and_without_a_place_in_the_usual_way() -> None:
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
    assert joined(made.told[1:]) == [
        (DATA, 1, b"x" * (1 << 16), 0),
        (PING, 0, 0, bytes(8)),
        (DATA, 1, b"x" * (1 << 16), 0),
    ]
    made.streams[1].place = made.place
    made.transport.arrive(sent[:10])
    assert made.transport.straight


def test_room_is_never_more_than_what_is_still_to_come_of_the_frame() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 20))
    made.data_received(opened() + data(bytes(STRAIGHT + 1))[: FRAME_HEADER_BYTES + 1])

    assert len(made.read_buffer()) == STRAIGHT


def test_what_lands_there_is_paid_for() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 20))
    sent = data(bytes(STRAIGHT + 1))
    before = made.window.remaining
    made.data_received(opened() + sent[: FRAME_HEADER_BYTES + 1])
    made.transport.arrive(sent[FRAME_HEADER_BYTES + 1 :])

    assert made.window.remaining == before - STRAIGHT - 1


@pytest.mark.parametrize("end", ["reset", "half closed"])
def test_the_rest_of_a_frame_whose_stream_has_ended_is_dropped(end: str) -> None:
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
    made.told.clear()
    made.transport.arrive(sent[100:] + PINGED)

    assert made.told == [(PING, 0, 0, bytes(8))]


def test_after_its_stop_nothing_is_held_of_the_stream_it_read_for() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    made.data_received(opened() + data(bytes(1 << 16))[:100])
    made.read_buffer()
    made.close()
    made.on_read(10)

    assert made.streams[1].had_place == 0
    assert made.told[2:] == [("close",)]


# -- turns -----------------------------------------------------------------------------------------------------


def pinged(made: FakeConnection) -> int:
    return sum(told[0] == PING for told in made.told)


def test_after_so_many_frames_others_have_their_turn() -> None:
    made = connection()
    made.data_received(PINGED * (2 * MOST_FRAMES + 1))
    assert pinged(made) == MOST_FRAMES
    assert not made.transport.reading

    made.loop.turn()
    assert pinged(made) == 2 * MOST_FRAMES + 1
    assert made.transport.reading


def test_what_comes_while_it_rests_is_taken_and_it_rests_once() -> None:
    made = connection()
    made.data_received(PINGED * (MOST_FRAMES + 1))
    made.data_received(PINGED * (MOST_FRAMES + 1))
    made.loop.turn()
    assert pinged(made) == 2 * (MOST_FRAMES + 1)
    assert made.transport.reading

    made.data_received(PINGED)
    assert made.transport.reading


def test_fewer_are_taken_at_once() -> None:
    made = connection()
    made.data_received(PINGED * (MOST_FRAMES - 1))

    assert pinged(made) == MOST_FRAMES - 1
    assert made.transport.reading


@pytest.mark.parametrize("block", [KNOWN, b"other"])
def test_after_so_many_streams_likewise(block: bytes) -> None:
    made = connection()
    sent = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number in range(MOST_IDS))
    made.data_received(sent)
    # the one that shows that there are too many has to be looked at by the connection
    assert sum(told[0] == "open" for told in made.told) == MOST_IDS // 2 + 1
    assert not made.transport.reading

    made.loop.turn()
    assert sum(told[0] == "open" for told in made.told) == MOST_IDS
    assert made.transport.reading


def test_fewer_streams_are_taken_at_once() -> None:
    made = connection()
    made.data_received(b"".join(opened(2 * number + 1) for number in range(MOST_IDS // 2)))

    assert made.last_id == MOST_IDS - 1
    assert made.transport.reading


def test_one_that_closes_meanwhile_reads_no_more() -> None:
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


def test_it_is_stuck_while_the_same_frame_is_not_whole() -> None:
    made = connection()
    made.data_received(opened() + data(bytes(100))[:-1])
    assert [stuck(made), stuck(made)] == [False, True]

    made.data_received(data(bytes(100))[-1:] + data(bytes(100))[:5])
    assert [stuck(made), stuck(made)] == [False, True]
    made.data_received(data(bytes(100))[5:6])
    assert stuck(made)  # a byte now and then does not help
    made.data_received(data(bytes(100))[6:])
    assert not stuck(made)


def test_a_long_one_of_which_something_has_come_is_not() -> None:
    made = connection()
    made.place = memoryview(bytearray(1 << 16))
    made.data_received(opened() + data(bytes(1 << 16))[:100])
    assert [stuck(made), stuck(made)] == [False, True]

    made.transport.arrive(bytes(1))
    assert [stuck(made), stuck(made)] == [False, True]


def test_a_header_block_that_is_open_always_is() -> None:
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
    told = []
    at = sorted({cut % len(whole) for cut in cuts} | {0, len(whole)})
    for pieces in ([whole], [whole[begin:end] for begin, end in pairwise(at)]):
        made = FakeConnection(begun=False)
        made.headers.cached[KNOWN] = HEAD
        made.place = memoryview(bytearray(1 << 12)) if places else None
        for piece in pieces:
            made.transport.arrive(piece)
            made.loop.turn()
        told.append(joined(made.told))

    assert told[0] == told[1]
