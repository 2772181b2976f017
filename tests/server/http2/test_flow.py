"""Flow control in both directions: windows, back pressure of the transport, stalled peers."""

from __future__ import annotations

import weakref

import pytest

from penstock.server.http2 import frames
from penstock.server.http2.frames import DATA, DEFAULT_WINDOW, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, ErrorCode
from penstock.server.http2.outbox import Outbox
from penstock.server.http2.stream import Stream, Unsent
from penstock.server.listening.mapped_buffer import join_mapped
from penstock.server.listening.unread_answers import UnreadAnswers

from .wire import BIDI, ECHO, GIVE, HOLD, OK, Wire, message_of, payload


def sent(wire: Wire, stream: int = 1) -> int:
    """Count the DATA bytes of a stream since the last call."""
    return sum(len(frame.payload) for frame in wire.frames() if frame.kind == DATA and frame.stream == stream)


def test_an_answer_waits_for_the_window_and_leaves_as_it_opens() -> None:
    wire = Wire()
    wire.feed(wire.call(GIVE, b"100000"))
    assert sent(wire) == DEFAULT_WINDOW

    wire.feed(frames.window_update(0, 50000))
    assert sent(wire) == 0
    wire.feed(frames.window_update(1, 1000))
    assert sent(wire) == 1000
    wire.feed(frames.window_update(1, 50000))
    assert sent(wire) == 100005 - DEFAULT_WINDOW - 1000
    assert wire.connection.streams == {}
    assert wire.connection.outbox.blocked == {}


def test_the_connection_window_is_shared_between_streams() -> None:
    wire = Wire()
    wire.feed(wire.call(GIVE, b"65000", 1) + wire.call(GIVE, b"65000", 3) + wire.call(GIVE, b"65000", 5))
    received = dict.fromkeys((1, 3, 5), 0)
    for frame in wire.frames():
        if frame.kind == DATA:
            received[frame.stream] += len(frame.payload)
    assert sum(received.values()) == DEFAULT_WINDOW

    wire.feed(frames.window_update(0, 3 * 65005))
    assert wire.connection.streams == {}


def test_frames_are_no_larger_than_the_frame_size_of_the_peer() -> None:
    wire = Wire()
    wire.feed(wire.call(GIVE, b"40000"))
    assert max(len(frame.payload) for frame in wire.frames()) == 16384

    wire.feed(frames.settings({MAX_FRAME_SIZE: 20000, INITIAL_WINDOW_SIZE: 10**6}) + frames.window_update(0, 10**6))
    wire.feed(wire.call(GIVE, b"40000", 3))
    assert max(len(frame.payload) for frame in wire.frames()) == 20000


def test_a_new_initial_window_adjusts_open_streams_even_below_zero() -> None:
    wire = Wire()
    wire.feed(frames.window_update(0, 10**6) + wire.call(GIVE, b"100000"))
    assert sent(wire) == DEFAULT_WINDOW

    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: 0}))
    wire.feed(frames.window_update(1, DEFAULT_WINDOW))
    assert sent(wire) == 0
    wire.feed(frames.window_update(1, 10))
    assert sent(wire) == 10
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: DEFAULT_WINDOW}))
    assert sent(wire) == 100005 - DEFAULT_WINDOW - 10


def test_an_initial_window_that_overflows_a_stream_window_ends_the_connection() -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD) + frames.window_update(1, 2**31 - 1 - DEFAULT_WINDOW))
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: DEFAULT_WINDOW + 1}))
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize(
    ("increment", "code"), [(0, ErrorCode.PROTOCOL_ERROR), (2**31 - 1, ErrorCode.FLOW_CONTROL_ERROR)]
)
def test_an_invalid_window_update_resets_only_its_stream(increment: int, code: ErrorCode) -> None:
    wire = Wire()
    wire.feed(wire.call(HOLD) + frames.window_update(1, increment))

    assert wire.reset_of(1) == code
    assert wire.cancelled == 1
    wire.feed(wire.call(stream=3))
    assert wire.answers() == {3: (b"hello", OK, "")}


def test_a_reset_releases_the_blocked_answer_and_other_streams_proceed() -> None:
    wire = Wire()
    wire.feed(wire.call(GIVE, b"1000000", 1) + wire.call(GIVE, b"1000", 3))
    wire.feed(frames.reset(1, ErrorCode.CANCEL) + frames.window_update(0, 10000))

    assert wire.connection.outbox.blocked == {}
    assert 3 in wire.answers()
    assert wire.connection.outbox.max_direct_bytes > 0


def test_nothing_is_written_while_the_transport_is_full() -> None:
    wire = Wire()
    wire.connection.pause_writing()
    wire.feed(wire.call(GIVE, b"1000", 1) + wire.call(stream=3))
    assert wire.frames() == []

    wire.connection.resume_writing()
    wire.loop.turn()
    assert wire.answers().keys() == {1, 3}


def test_a_peer_that_sends_pings_and_never_reads_is_aborted() -> None:
    wire = Wire(max_idle_frames=10**6, max_ping_strikes=0)
    wire.connection.pause_writing()
    for _ in range(11):
        wire.feed(frames.frame(frames.PING, 0, 0, b"12345678") * 1000)

    assert wire.transport.aborted


def test_receiving_a_message_of_many_frames_reopens_the_windows() -> None:
    wire = Wire(stream_window_bytes=100_000, connection_window_bytes=200_000)
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: 10**7}) + frames.window_update(0, 10**7))
    content = bytes(range(256)) * 4096
    wire.frames()
    windows = {0: 200_000, 1: 100_000}
    body = message_of(content)
    wire.feed(wire.headers())
    for at in range(0, len(body), 10_000):
        part = body[at : at + 10_000]
        windows[0] -= len(part)
        windows[1] -= len(part)
        assert min(windows.values()) >= 0
        wire.feed(payload(part, 1, end=at + 10_000 >= len(body)))
        if at + 10_000 < len(body):
            for frame in wire.frames():
                windows[frame.stream] += int.from_bytes(frame.payload, "big")

    assert wire.answers() == {1: (content, OK, "")}
    assert wire.shared.held_bytes == 0


def test_data_beyond_the_stream_window_resets_the_stream() -> None:
    wire = Wire(stream_window_bytes=70_000)
    wire.feed(wire.headers() + payload(message_of(bytes(10**6))[:34_000]))
    wire.connection.streams[1].receive_window = 10
    wire.feed(payload(b"x" * 11))

    assert wire.reset_of(1) == ErrorCode.FLOW_CONTROL_ERROR
    assert wire.shared.held_bytes == 0


def test_data_beyond_the_connection_window_ends_the_connection() -> None:
    wire = Wire()
    wire.connection.window.remaining = 10
    wire.feed(wire.headers() + payload(b"\0" * 11))
    found = wire.goaway()

    assert found is not None
    assert found[0] == ErrorCode.FLOW_CONTROL_ERROR


def test_the_memory_of_unfinished_messages_is_limited_across_all_streams() -> None:
    wire = Wire(grpc={"max_receive_bytes": 100_000})
    wire.feed(wire.headers(1, __path=HOLD) + payload(message_of(bytes(10**6))[:60_000], 1))
    wire.feed(wire.headers(3, __path=HOLD) + payload(message_of(bytes(10**6))[:30_000], 3))
    assert wire.shared.held_bytes == 90_000

    wire.feed(payload(bytes(20_000), 3))
    assert {stream: status for stream, (_, status, _) in wire.answers().items()} == {3: 8}
    assert wire.shared.held_bytes == 60_000
    wire.feed(frames.reset(1, ErrorCode.CANCEL))
    assert wire.shared.held_bytes == 0


def test_a_message_that_stalls_times_out_its_stream() -> None:
    wire = Wire(receive_timeout_s=5.0)
    wire.feed(wire.headers(1) + payload(message_of(bytes(1000))[:500], 1) + wire.headers(3))
    for _ in range(5):
        wire.shared.sweep(1.0)
    wire.feed(payload(bytes(1), 1))
    wire.shared.sweep(1.0)
    wire.loop.turn()

    assert wire.answers() == {3: (b"", 4, "request was not received within 5 s")}
    assert wire.connection.streams.keys() == {1}


def test_a_stream_may_be_idle_between_messages() -> None:
    wire = Wire(receive_timeout_s=5.0)
    wire.feed(wire.headers(1, __path=BIDI) + payload(message_of(b"one"), 1))
    for _ in range(20):
        wire.shared.sweep(1.0)

    assert wire.connection.streams.keys() == {1}


def test_a_stream_whose_window_stays_closed_is_reset() -> None:
    wire = Wire(write_timeout_s=5.0)
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: 0}) + wire.call(ECHO))
    for _ in range(6):
        assert wire.connection.outbox.blocked
        wire.shared.sweep(1.0)
    wire.loop.turn()

    assert wire.reset_of(1) == ErrorCode.CANCEL
    assert wire.connection.outbox.blocked == wire.connection.streams == {}


def test_blocked_answers_are_visited_only_when_they_can_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []

    def counted(outbox: Outbox, stream: Stream, unsent: Unsent) -> int:
        looked_at.append(stream.stream_id)
        return send_some(outbox, stream, unsent)

    send_some = Outbox._send_stream_data
    monkeypatch.setattr(Outbox, "_send_stream_data", counted)
    wire = Wire()
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: 0}))
    ids = [2 * number + 1 for number in range(100)]
    for stream in ids:
        wire.feed(wire.call(stream=stream))
    for _ in range(100):
        wire.feed(frames.window_update(0, 5000))
    for stream in ids:
        wire.feed(frames.window_update(stream, 5000))

    assert len(looked_at) <= 3 * len(ids)
    assert [(body, status) for body, status, _ in wire.answers().values()] == [(b"hello", 0)] * len(ids)


def test_messages_of_a_stream_wait_while_its_answers_are_blocked() -> None:
    wire = Wire()
    content = bytes(30_000)
    wire.feed(wire.headers(1, __path=BIDI))
    for _ in range(40):
        wire.feed(payload(message_of(content), 1))
    wire.feed(payload(b"", 1, end=True))
    unsent = wire.connection.streams[1].unsent
    assert unsent is not None
    assert unsent.size < 100_000
    assert wire.shared.held_bytes > 10**6

    received_bytes = 0
    for _ in range(100):
        found = wire.frames()
        received_bytes += sum(len(frame.payload) for frame in found if frame.kind == DATA)
        wire.feed(
            frames.window_update(0, 30_000) + (frames.window_update(1, 30_000) if received_bytes < 40 * 30_005 else b"")
        )
    assert received_bytes == 40 * 30_005
    assert wire.connection.streams == {}
    assert wire.shared.held_bytes == 0


def test_small_window_updates_after_every_message_of_a_long_stream_are_not_a_flood() -> None:
    wire = Wire()
    wire.feed(wire.headers(__path=BIDI))
    for _ in range(3000):
        wire.feed(payload(message_of(b"x")) + frames.window_update(0, 6) + frames.window_update(1, 6))

    assert not wire.transport.over
    assert sum(frame.kind == frames.DATA for frame in wire.frames()) == 3000


def test_a_blocked_answer_counts_in_full_until_its_last_byte_is_sent() -> None:
    wire = Wire()
    wire.feed(frames.window_update(0, 10**6) + wire.call(GIVE, b"100000"))
    assert wire.shared.unread.held_bytes == 100_000

    wire.feed(frames.window_update(1, 100_004 - DEFAULT_WINDOW))
    assert wire.shared.unread.held_bytes == 100_000
    wire.feed(frames.window_update(1, 1))
    assert wire.shared.unread.held_bytes == 0
    assert wire.connection.streams == {}


def test_a_mapped_answer_is_counted_while_blocked_and_freed_when_sent() -> None:
    wire = Wire()
    wire.feed(frames.window_update(0, 10**6) + wire.call(HOLD))
    view = join_mapped([bytes(60_000), b"x" * 40_000])
    memory = weakref.ref(view.obj)
    wire.held.pop().answer(view)
    del view
    assert wire.shared.unread.held_bytes == 100_000

    wire.feed(frames.window_update(1, 100_005 - DEFAULT_WINDOW))
    wire.loop.turn()
    assert wire.shared.unread.held_bytes == 0
    sent = b"".join([frame.payload for frame in wire.frames() if frame.kind == frames.DATA])
    assert sent == message_of(bytes(60_000) + b"x" * 40_000)
    assert memory() is None


@pytest.mark.parametrize("end", ["reset", "goaway", "lost"])
def test_unsent_bytes_are_not_counted_after_the_call_ends(end: str) -> None:
    wire = Wire()
    wire.feed(wire.call(GIVE, b"100000"))
    assert wire.shared.unread.held_bytes == 100_000
    if end == "lost":
        wire.connection.connection_lost(None)
    else:
        wire.feed(frames.reset(1, ErrorCode.CANCEL) if end == "reset" else frames.frame(frames.PUSH_PROMISE, 0, 1))

    assert wire.shared.unread.held_bytes == 0


def test_the_call_with_the_most_unread_bytes_is_reset_when_the_total_limit_is_exceeded() -> None:
    wire = Wire()
    wire.shared.unread = UnreadAnswers(200_000, wire.shared.loop)
    wire.feed(frames.settings({INITIAL_WINDOW_SIZE: 0}))
    for stream, size in ((1, b"70000"), (3, b"90000"), (5, b"60000")):
        wire.feed(wire.call(GIVE, size, stream))

    assert wire.reset_of(3) == ErrorCode.ENHANCE_YOUR_CALM
    assert wire.connection.streams.keys() == {1, 5}
    assert wire.shared.unread.held_bytes == 130_010


def test_shedding_a_connection_uncounts_all_its_calls_and_sheds_no_other_connection() -> None:
    wire, other = Wire(), Wire()
    unread = wire.shared.unread = other.shared.unread = UnreadAnswers(1_000_000, wire.shared.loop)
    for each in (wire, other):
        each.feed(frames.settings({INITIAL_WINDOW_SIZE: 0}))
    for stream in (1, 3, 5, 7):
        wire.feed(wire.call(GIVE, b"90000", stream))
    other.feed(other.call(GIVE, b"95000"))
    wire.transport.stuck = 100_000
    unread.max_bytes = 400_000
    wire.connection.pause_writing()
    wire.loop.turn()

    assert wire.transport.aborted
    assert other.connection.streams.keys() == {1}
    assert unread.held_bytes == 95_005


def test_unsent_transport_bytes_are_counted_and_abort_the_connection_over_the_limit() -> None:
    wire = Wire()
    wire.shared.unread = UnreadAnswers(200_000, wire.shared.loop)
    wire.transport.stuck = 200_000
    wire.connection.pause_writing()
    assert wire.shared.unread.held_bytes == 200_000
    wire.connection.resume_writing()
    assert wire.shared.unread.held_bytes == 0

    wire.transport.stuck = 200_001
    wire.connection.pause_writing()
    wire.loop.turn()

    assert wire.transport.aborted
    assert wire.shared.unread.held_bytes == 0
