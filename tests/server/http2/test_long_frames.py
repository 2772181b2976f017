"""DATA frames above 16 KiB and large messages: passed on as they arrive, received directly into their buffer."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.grpc.framing import IncomingMessages
from penstock.server.http2 import frames
from penstock.server.http2.frames import (
    DATA,
    END_STREAM,
    FRAME_HEADER_BYTES,
    MAX_FRAME_SIZE,
    PADDED,
    SETTINGS,
    ErrorCode,
)

from .wire import BIDI, ECHO, GIVE, HOLD, OK, Wire, message_of

MIB = 1 << 20
LARGE = random.Random(1).randbytes(700_000)


def long(content: bytes, size: int = MIB, stream: int = 1, *, end: bool = True) -> bytes:
    """Build DATA frames of a size."""
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    last = len(parts) - 1
    return b"".join(frames.frame(DATA, end and at == last, stream, part) for at, part in enumerate(parts))


def open_windows(wire: Wire) -> None:
    """Let answers of any size leave at once."""
    wire.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**30}) + frames.window_update(0, 2**30))
    wire.frames()


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(at, len(raw)) for at in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


def test_the_server_announces_a_frame_size_of_one_mebibyte() -> None:
    wire = Wire(begun=False)
    wire.feed(frames.PREFACE + frames.settings({}))
    [announced] = [frame for frame in wire.frames() if frame.kind == SETTINGS and not frame.flags]

    assert dict(frames.read_settings(announced.payload))[MAX_FRAME_SIZE] == MIB


class TestReceiving:
    @given(
        st.lists(st.tuples(st.integers(0, 700_000), st.integers(1, MIB)), min_size=1, max_size=4),
        st.lists(st.integers(0, 2_000_000), max_size=12),
    )
    @settings(max_examples=60, deadline=None)
    def test_messages_of_all_sizes_arrive_whole_for_any_framing_and_split(
        self, sent: list[tuple[int, int]], cuts: list[int]
    ) -> None:
        wire, raw = Wire(), b""
        open_windows(wire)
        for number, (size, frame) in enumerate(sent):
            least = max(frame, size // 50)  # so that no message has thousands of frames
            raw += wire.headers(2 * number + 1) + long(message_of(LARGE[:size]), least, 2 * number + 1)
            raw += frames.frame(frames.PING, 0, 0, b"12345678")
        for part in cut(raw, cuts):
            wire.feed(part)

        expected = {2 * number + 1: (LARGE[:size], OK, "") for number, (size, _) in enumerate(sent)}
        assert wire.answers() == expected
        assert wire.shared.held_bytes == 0

    @given(st.lists(st.integers(0, 400_000), max_size=8), st.integers(5000, MIB), st.lists(st.integers(0, MIB)))
    @settings(max_examples=40, deadline=None)
    def test_messages_of_a_stream_may_share_and_span_frames(
        self, sizes: list[int], frame: int, cuts: list[int]
    ) -> None:
        wire = Wire()
        open_windows(wire)
        content = b"".join(message_of(LARGE[:size]) for size in sizes)
        for part in cut(wire.headers(__path=BIDI) + long(content or message_of(b""), frame), cuts):
            wire.feed(part)
        payload = b"".join(frame.payload for frame in wire.frames() if frame.kind == DATA)

        assert payload == (content or message_of(b""))
        assert wire.connection.streams == {}
        assert wire.shared.held_bytes == 0

    def test_a_large_compressed_message_is_received(self) -> None:
        wire = Wire()
        open_windows(wire)
        wire.feed(wire.headers(grpc_encoding="gzip") + long(message_of(gzip.compress(LARGE), 1)))
        wire.loop.turn()

        assert wire.answers() == {1: (LARGE, OK, "")}

    def test_the_rest_of_a_long_frame_is_received_directly_into_its_message(self) -> None:
        wire = Wire()
        open_windows(wire)
        begun, raw = wire.headers(), long(message_of(LARGE))
        wire.feed(begun + raw[:10_000])
        assert wire.transport.straight
        assert len(wire.connection.read_buffer()) == len(raw) - 10_000

        wire.feed(raw[10_000:] + wire.headers(3) + long(message_of(LARGE), stream=3))
        assert wire.answers() == {1: (LARGE, OK, ""), 3: (LARGE, OK, "")}
        assert wire.transport.straight
        wire.feed(wire.call(stream=5))
        assert wire.answers() == {5: (b"hello", OK, "")}
        assert not wire.transport.straight

    @pytest.mark.parametrize("size", [16_384, 200_000])
    def test_smaller_frames_and_messages_are_read_in_the_usual_way(self, size: int) -> None:
        wire = Wire()
        raw = wire.headers() + long(message_of(LARGE[:size]), min(size, 16_384))
        for part in cut(raw, [*range(0, len(raw), 30_000)]):
            wire.feed(part)
            assert not wire.transport.straight

    def test_a_large_announced_length_alone_reserves_no_memory(self) -> None:
        incoming = IncomingMessages(2**31)
        incoming.feed(message_of(b"")[:1] + (2**31 - 1).to_bytes(4, "big") + bytes(4000))
        assert incoming.next() is None
        assert incoming.get_buffer() is None

        incoming.feed(bytes(100))
        assert incoming.next() is None
        room = incoming.get_buffer()
        assert room is not None
        assert len(room) <= MIB

    def test_a_message_in_tiny_pieces_takes_no_more_memory_than_a_whole_message(self) -> None:
        raw = message_of(LARGE[:200_000])
        incoming = IncomingMessages(2**31)
        tracemalloc.start()
        try:
            for at in range(0, len(raw), 2):
                incoming.feed(raw[at : at + 2])
                found = incoming.next()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert found == (0, LARGE[:200_000])
        assert most < 1_000_000


class TestRejections:
    @pytest.mark.parametrize(
        "sent",
        [
            frames.frame(DATA, 0, 1, bytes(MIB + 1)),
            frames.frame(DATA, 0, 1, bytes(MIB + 1))[:FRAME_HEADER_BYTES],
            frames.frame(DATA, PADDED, 1, bytes(16_385)),
            frames.frame(DATA, PADDED, 1, bytes(16_385))[:FRAME_HEADER_BYTES],
            frames.frame(frames.HEADERS, frames.END_HEADERS, 3, bytes(16_385)),
            frames.frame(frames.PING, 0, 0, bytes(16_385)),
        ],
    )
    def test_only_plain_data_frames_may_be_long_up_to_one_mebibyte(self, sent: bytes) -> None:
        wire = Wire(stream_window_bytes=4 * MIB)
        wire.feed(wire.headers(__path=HOLD) + sent)
        found = wire.goaway()

        assert found is not None
        assert found[0] == ErrorCode.FRAME_SIZE_ERROR

    @pytest.mark.parametrize("stream", [0, 5])
    def test_a_long_frame_on_a_wrong_stream_is_rejected_before_it_is_complete(self, stream: int) -> None:
        wire = Wire()
        wire.feed(wire.headers(__path=HOLD) + frames.frame(DATA, 0, stream, bytes(100_000))[:20_000])
        found = wire.goaway()

        assert found is not None
        assert found[0] == ErrorCode.PROTOCOL_ERROR

    def test_a_message_over_the_receive_memory_limit_is_rejected_while_it_is_received(self) -> None:
        wire = Wire(grpc={"max_receive_bytes": 300_000})
        raw = wire.headers(1, __path=HOLD) + long(message_of(LARGE))
        for part in cut(raw, [20_000, 200_000, 400_000]):
            wire.feed(part)
        assert {stream: status for stream, (_, status, _) in wire.answers().items()} == {1: 8}
        assert wire.shared.held_bytes == 0

        wire.feed(wire.call(stream=3))
        assert wire.answers() == {3: (b"hello", OK, "")}

    def test_data_beyond_the_stream_window_resets_the_stream_in_the_middle_of_a_frame(self) -> None:
        wire = Wire()
        raw = wire.headers(1, __path=HOLD) + long(message_of(LARGE))
        wire.feed(raw[:20_000])
        wire.connection.streams[1].receive_window = 100_000
        wire.feed(raw[20_000:])
        assert wire.reset_of(1) == ErrorCode.FLOW_CONTROL_ERROR
        assert wire.shared.held_bytes == 0

        wire.feed(wire.call(stream=3))
        assert wire.answers() == {3: (b"hello", OK, "")}

    @pytest.mark.parametrize("frame", [16_384, MIB])
    def test_a_body_of_another_length_than_its_content_length_is_reset(self, frame: int) -> None:
        wire = Wire()
        open_windows(wire)
        content = message_of(LARGE)
        wire.feed(wire.headers(1, content_length=str(len(content))) + long(content, frame))
        assert wire.answers() == {1: (LARGE, OK, "")}

        wire.feed(wire.headers(3, content_length="600000") + long(content, frame, 3))
        assert wire.reset_of(3) == ErrorCode.PROTOCOL_ERROR
        assert wire.shared.held_bytes == 0

    def test_data_beyond_the_connection_window_ends_the_connection(self) -> None:
        wire = Wire()
        raw = wire.headers(1, __path=HOLD) + long(message_of(LARGE))
        wire.feed(raw[:20_000])
        wire.connection.window.remaining = 100_000
        wire.connection.window.refill_below = 0
        wire.feed(raw[20_000:])
        found = wire.goaway()

        assert found is not None
        assert found[0] == ErrorCode.FLOW_CONTROL_ERROR
        wire.feed(raw)
        assert wire.transport.over

    def test_the_rest_of_a_long_frame_is_discarded_after_its_call_ends(self) -> None:
        wire = Wire()
        raw = wire.headers(1, __path=HOLD) + long(message_of(LARGE))
        wire.feed(raw[:20_000])
        wire.connection.reset(1, ErrorCode.CANCEL)
        wire.feed(raw[20_000:] + wire.call(stream=3))

        assert wire.answers() == {3: (b"hello", OK, "")}
        assert wire.shared.held_bytes == 0

    def test_the_rest_of_a_long_frame_is_discarded_after_its_call_is_answered(self) -> None:
        wire = Wire(grpc={"max_message_bytes": 500_000})
        wire.feed(wire.headers(1, __path=ECHO) + long(message_of(LARGE)) + wire.call(stream=3))

        assert {stream: status for stream, (_, status, _) in wire.answers().items()} == {1: 8, 3: OK}


def test_a_connection_lost_in_the_middle_of_a_frame_leaves_nothing_counted() -> None:
    wire = Wire()
    wire.feed(wire.headers(1, __path=HOLD) + long(message_of(LARGE))[:20_000])
    assert wire.transport.straight
    wire.connection.connection_lost(None)

    assert wire.connection.streams == {}
    assert wire.shared.held_bytes == 0


class TestTimeouts:
    def test_a_long_frame_that_arrives_slowly_is_not_rejected(self) -> None:
        wire = Wire(receive_timeout_s=5.0)
        open_windows(wire)
        raw = wire.headers() + long(message_of(LARGE))
        wire.feed(raw[:20_000])
        for number in range(20):
            wire.feed(raw[20_000 + number : 20_001 + number])
            wire.shared.sweep(1.0)
        wire.feed(raw[20_020:])

        assert wire.answers() == {1: (LARGE, OK, "")}

    def test_a_long_frame_that_stalls_ends_the_connection(self) -> None:
        wire = Wire(receive_timeout_s=5.0)
        wire.feed(wire.headers() + long(message_of(LARGE))[:20_000])
        for _ in range(7):
            wire.shared.sweep(1.0)
        found = wire.goaway()

        assert found == (ErrorCode.ENHANCE_YOUR_CALM, "a frame or a header block was not finished in time")
        assert wire.shared.held_bytes == 0


def test_the_windows_are_reopened_in_the_middle_of_messages() -> None:
    wire = Wire(stream_window_bytes=MIB, connection_window_bytes=MIB)
    wire.feed(wire.headers(1, __path=GIVE))
    content = message_of(bytes(5 * MIB))
    windows = {0: MIB, 1: MIB}
    for at in range(0, len(content), 300_000):
        part = content[at : at + 300_000]
        wire.feed(frames.frame(DATA, END_STREAM if at + 300_000 >= len(content) else 0, 1, part))
        for frame in wire.frames():
            if frame.kind == frames.WINDOW_UPDATE:
                windows[frame.stream] += frames.read_word(frame.payload)
        windows = {stream: window - len(part) for stream, window in windows.items()}
        assert min(windows.values()) >= 0

    assert wire.connection.streams == {}
