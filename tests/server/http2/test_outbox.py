"""Outbox alone: sending within the peer's windows and the transport's back pressure, with streams taking turns."""

from __future__ import annotations

import select
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.server.http2 import frames
from penstock.server.http2.frames import (
    ACK,
    DATA,
    DEFAULT_WINDOW,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    SETTINGS,
    ErrorCode,
    Http2Error,
)
from penstock.server.http2.outbox import Outbox
from penstock.server.http2.shared import Http2Shared
from penstock.server.http2.stream import LOW_BYTES

from .fakes import FakeStream, make_shared
from .wire import FakeLoop, FakeTransport, Frame, frames_of

LAST = frames.frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, 0, b"last")
TURN = 1 << 18


class Sender:
    """An Outbox with a peer that reads what it writes; also acts as the connection of its streams."""

    def __init__(self) -> None:
        self.shared: Http2Shared = make_shared()
        self.loop: FakeLoop = self.shared.loop  # type: ignore[assignment]
        self.notices: list[tuple[Any, ...]] = []
        self.outbox = Outbox(self.shared, {})
        self.transport = self.outbox.transport = FakeTransport()
        self._read = 0

    def open(self, stream_id: int) -> FakeStream:
        stream = self.outbox.streams[stream_id] = FakeStream(stream_id, self.notices, self)
        return stream

    def end(self, stream: FakeStream, last: bytes) -> None:
        self.notices.append(("end", stream.stream_id))
        self.outbox.send_headers(last)
        del self.outbox.streams[stream.stream_id]
        self.outbox.discard(stream)

    def widen(self, stream_id: int, size: int) -> None:
        if stream_id:
            assert self.outbox.update_stream_window(self.outbox.streams[stream_id], size)
        else:
            self.outbox.update_window(size)

    def configure(self, number: int, value: int) -> None:
        self.outbox.apply_settings(frames.settings({number: value})[frames.FRAME_HEADER_BYTES :])

    def read_frames(self) -> list[Frame]:
        """Return the frames that the peer has received since the last call."""
        self.loop.turn()
        found = frames_of(bytes(self.transport.written[self._read :]))
        self._read = len(self.transport.written)
        return found

    def sent(self) -> dict[int, int]:
        """Return the DATA bytes of each stream that the peer has received since the last call."""
        sizes: Counter[int] = Counter()
        for frame in self.read_frames():
            if frame.kind == DATA:
                sizes[frame.stream] += len(frame.payload)
        return dict(sizes)


# -- windows ---------------------------------------------------------------------------------------------------


def test_no_more_data_is_sent_than_the_stream_window_allows() -> None:
    sender = Sender()
    stream = sender.open(1)
    sender.outbox.update_window(10**6)
    sender.outbox.queue(stream, (bytes(DEFAULT_WINDOW + 10),))
    assert sender.sent() == {1: DEFAULT_WINDOW}

    sender.widen(1, 3)
    assert sender.sent() == {1: 3}
    sender.widen(1, 100)
    assert sender.sent() == {1: 7}
    assert stream.unsent is None
    assert sender.outbox.blocked == {}


def test_no_more_data_is_sent_than_the_connection_window_allows() -> None:
    sender = Sender()
    for stream_id in (1, 3):
        stream = sender.open(stream_id)
        sender.outbox.update_stream_window(stream, 10**6)
        sender.outbox.queue(stream, (bytes(40_000),))
    assert sum(sender.sent().values()) == DEFAULT_WINDOW

    sender.widen(0, 1)
    assert sum(sender.sent().values()) == 1


def test_a_slowly_opening_connection_window_is_shared_by_all_waiting_streams() -> None:
    sender = Sender()
    for stream_id in (1, 3, 5):
        sender.outbox.update_stream_window(sender.open(stream_id), 10**6)
        sender.outbox.queue(sender.outbox.streams[stream_id], (bytes(500_000),))
    sender.read_frames()

    served: Counter[int] = Counter()
    for _ in range(30):
        sender.widen(0, 1000)
        served.update(sender.sent())
    assert served == {1: 10_000, 3: 10_000, 5: 10_000}


def test_a_stream_whose_window_is_closed_takes_no_turn_from_other_streams() -> None:
    sender = Sender()
    for stream_id in (1, 3, 5):
        stream = sender.open(stream_id)
        stream.credit = -DEFAULT_WINDOW if stream_id == 3 else 10**6
        sender.outbox.queue(stream, (bytes(500_000),))
    sender.read_frames()

    served: Counter[int] = Counter()
    for _ in range(30):
        sender.widen(0, 1000)
        served.update(sender.sent())
    assert served == {1: 15_000, 5: 15_000}


@pytest.mark.parametrize("increment", [0, MAX_WINDOW])
def test_an_invalid_update_of_the_connection_window_is_a_connection_error(increment: int) -> None:
    with pytest.raises(Http2Error) as error:
        Sender().widen(0, increment)

    assert error.value.code == (ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR)


def test_windows_may_grow_to_the_maximum_and_no_further() -> None:
    sender = Sender()
    sender.widen(0, MAX_WINDOW - DEFAULT_WINDOW)
    stream = sender.open(1)

    assert sender.outbox.update_stream_window(stream, MAX_WINDOW - DEFAULT_WINDOW)
    assert not sender.outbox.update_stream_window(stream, 1)


def test_the_peers_settings_move_the_windows_of_open_streams_and_are_acknowledged() -> None:
    sender = Sender()
    stream = sender.open(1)
    sender.outbox.update_window(10**6)
    sender.outbox.queue(stream, (bytes(100_000),))
    sender.read_frames()

    sender.configure(INITIAL_WINDOW_SIZE, 0)
    sender.configure(INITIAL_WINDOW_SIZE, DEFAULT_WINDOW + 1000)
    found = sender.read_frames()
    assert found[:2] == [Frame(SETTINGS, ACK, 0, b"")] * 2
    assert [len(frame.payload) for frame in found[2:]] == [1000]


def test_an_initial_window_that_overflows_a_stream_window_is_a_flow_control_error() -> None:
    sender = Sender()
    sender.open(1).credit = 1
    sender.configure(INITIAL_WINDOW_SIZE, MAX_WINDOW - 1)
    with pytest.raises(Http2Error) as error:
        sender.configure(INITIAL_WINDOW_SIZE, MAX_WINDOW)

    assert error.value.code == ErrorCode.FLOW_CONTROL_ERROR


def test_no_frame_is_larger_than_the_frame_size_of_the_peer() -> None:
    sender = Sender()
    sender.outbox.update_window(10**6)
    stream = sender.open(1)
    sender.outbox.update_stream_window(stream, 10**6)
    sender.outbox.queue(stream, (bytes(40_000),))
    assert [len(frame.payload) for frame in sender.read_frames()] == [
        MIN_FRAME_BYTES,
        MIN_FRAME_BYTES,
        40_000 - 2 * 16384,
    ]

    sender.configure(MAX_FRAME_SIZE, 30_000)
    sender.outbox.queue(stream, (bytes(40_000),))
    assert [len(frame.payload) for frame in sender.read_frames() if frame.kind == DATA] == [30_000, 10_000]


@pytest.mark.parametrize(("size", "notice"), [(4095, frames.FRAME_HEADER_BYTES), (4096, 0)])
def test_a_smaller_header_table_is_announced_once_before_the_next_block(size: int, notice: int) -> None:
    sender = Sender()
    sender.configure(HEADER_TABLE_SIZE, size)
    sender.read_frames()
    sender.outbox.send_headers(LAST)
    sender.outbox.send_headers(LAST)

    blocks = [frame.payload for frame in sender.read_frames()]
    assert blocks == [(b"\x20" if notice else b"") + b"last", b"last"]


# -- pieces ----------------------------------------------------------------------------------------------------


def test_pieces_are_joined_into_frames_and_an_empty_message_sends_no_frame() -> None:
    sender = Sender()
    sender.outbox.queue(sender.open(1), (b"head", b"", b"body"))
    assert sender.read_frames() == [Frame(DATA, 0, 1, b"headbody")]

    sender.outbox.queue(sender.open(3), (b"",))
    assert sender.read_frames() == []
    assert sender.outbox.blocked == {}


def test_a_waiting_piece_counts_in_full_until_its_last_byte_is_sent() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = 100 - DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(90), bytes(50)))
    assert sender.shared.unread.held_bytes == 50

    sender.widen(1, 39)
    assert sender.shared.unread.held_bytes == 50
    sender.widen(1, 1)
    assert sender.shared.unread.held_bytes == 0


def test_the_last_frame_follows_the_last_byte() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = 10 - DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(15),))
    assert stream.unsent is not None
    stream.unsent.last_frame = LAST
    assert sender.sent() == {1: 10}

    sender.widen(1, 5)
    assert [frame.payload for frame in sender.read_frames()] == [bytes(5), b"last"]
    assert ("end", 1) in sender.notices


@pytest.mark.parametrize(("unsent_bytes", "notified"), [(LOW_BYTES, True), (LOW_BYTES + 1, False)])
def test_a_stream_is_notified_when_little_unsent_data_is_left(unsent_bytes: int, notified: bool) -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = 10 - DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(10 + unsent_bytes),))

    assert (("left", 1) in sender.notices) == notified


def test_the_stall_time_of_a_stream_restarts_with_each_sent_byte() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = -DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(15),))
    assert stream.unsent is not None
    stream.unsent.stalled_s = 5.0
    sender.widen(0, 1)
    assert stream.unsent.stalled_s == 5.0

    sender.widen(1, 1)
    assert stream.unsent.stalled_s == 0.0
    assert stream.unsent.size == 14


def test_discarded_data_of_a_stream_is_neither_sent_nor_counted() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = -DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(15),))
    sender.outbox.discard(stream)
    sender.widen(1, 100)

    assert sender.read_frames() == []
    assert sender.shared.unread.held_bytes == 0
    assert sender.outbox.max_direct_bytes == MIN_FRAME_BYTES


def test_direct_sending_stays_off_after_a_discard_while_the_outbox_is_blocked_or_paused() -> None:
    sender = Sender()
    for stream_id in (1, 3):
        sender.open(stream_id).credit = -DEFAULT_WINDOW
        sender.outbox.queue(sender.outbox.streams[stream_id], (bytes(15),))
    sender.outbox.discard(sender.outbox.streams[1])
    assert sender.outbox.max_direct_bytes == 0

    sender.outbox.pause()
    sender.outbox.discard(sender.outbox.streams[3])
    assert sender.outbox.max_direct_bytes == 0


def test_direct_sending_is_off_while_any_data_waits() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = -DEFAULT_WINDOW
    assert sender.outbox.max_direct_bytes == MIN_FRAME_BYTES
    sender.outbox.queue(stream, (bytes(15),))
    assert sender.outbox.max_direct_bytes == 0

    sender.widen(1, 15)
    assert sender.outbox.max_direct_bytes == MIN_FRAME_BYTES


def test_only_data_frames_and_header_blocks_are_counted_as_sent_frames() -> None:
    sender = Sender()
    assert (sender.outbox.sent_frames, sender.outbox.answer_count) == (0, 0)
    sender.outbox.queue(sender.open(1), (bytes(20_000),))
    assert sender.outbox.sent_frames == 2
    sender.outbox.send_headers(LAST)
    assert sender.outbox.sent_frames == 3

    sender.outbox.write(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert sender.outbox.sent_frames == 3


# -- the transport ---------------------------------------------------------------------------------------------


def test_all_frames_of_one_turn_of_the_loop_leave_in_one_write() -> None:
    sender = Sender()
    sender.outbox.write(LAST)
    sender.outbox.write(LAST)
    sender.outbox.send_headers(LAST)
    sender.outbox.queue(sender.open(1), (b"x",))
    assert sender.transport.writes == 0

    assert len(sender.read_frames()) == 4
    assert sender.transport.writes == 1


def test_a_large_answer_is_written_in_parts_and_stops_when_the_transport_is_full() -> None:
    sender = Sender()
    sender.widen(0, 10**7)
    stream = sender.open(1)
    stream.credit = 10**7
    write = sender.transport.write

    def full(sent: bytes) -> None:
        write(sent)
        if sender.transport.writes == 2:
            sender.outbox.pause()

    sender.transport.write = full  # type: ignore[method-assign]
    sender.outbox.queue(stream, (bytes(10 * TURN),))
    assert sender.transport.writes == 2
    assert sender.sent() == {1: 2 * TURN}

    sender.outbox.resume()
    assert sender.sent() == {1: 8 * TURN}


def test_several_large_answers_take_turns_in_writes_of_the_same_size() -> None:
    sender = Sender()
    sender.outbox.pause()
    sender.widen(0, 10**7)
    for stream_id in (1, 3, 5):
        sender.open(stream_id).credit = 10**7
        sender.outbox.queue(sender.outbox.streams[stream_id], (bytes(2 * TURN),))
    written: list[int] = []
    sender.transport.write = lambda sent: written.append(len(sent))  # type: ignore[method-assign]
    sender.outbox.resume()
    sender.loop.turn()

    heads = TURN // MIN_FRAME_BYTES * frames.FRAME_HEADER_BYTES
    assert written == [TURN + heads] * 6


def test_nothing_is_written_while_the_transport_is_full_and_its_bytes_are_counted() -> None:
    sender = Sender()
    sender.transport.stuck = 1234
    sender.outbox.pause()
    assert sender.shared.unread.held_bytes == 1234
    assert sender.outbox.max_direct_bytes == 0
    sender.outbox.queue(sender.open(1), (b"x",))
    sender.outbox.write(LAST)
    assert sender.read_frames() == []
    assert sender.outbox.max_direct_bytes == 0

    sender.outbox.resume()
    assert len(sender.read_frames()) == 2
    assert sender.outbox.max_direct_bytes == MIN_FRAME_BYTES
    assert sender.shared.unread.held_bytes == 0


@pytest.mark.parametrize(("count", "dropped"), [(10_000, False), (10_001, True)])
def test_a_peer_that_causes_answers_and_never_reads_is_aborted(count: int, dropped: bool) -> None:
    sender = Sender()
    sender.outbox.pause()
    for _ in range(count):
        sender.outbox.write(LAST)
    sender.loop.turn()

    assert sender.transport.aborted == dropped


def test_frames_for_a_closing_transport_are_discarded() -> None:
    sender = Sender()
    sender.transport.close()
    sender.outbox.write(LAST)
    sender.loop.turn()

    assert sender.outbox.frames == []
    assert sender.transport.writes == 0


def test_on_flush_is_called_after_each_write_until_the_outbox_is_closed() -> None:
    sender, write_counts = Sender(), []
    sender.outbox.on_flush = lambda: write_counts.append(sender.transport.writes)
    sender.outbox.write(LAST)
    sender.loop.turn()
    sender.outbox.write(LAST)
    sender.loop.turn()
    assert write_counts == [1, 2]

    sender.outbox.close()
    sender.outbox.write(LAST)
    sender.loop.turn()
    assert write_counts == [1, 2]


def test_blocked_data_is_not_sent_after_the_outbox_is_closed() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = -DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(15),))
    sender.outbox.close()
    sender.widen(1, 100)

    assert sender.sent() == {}
    assert sender.outbox.blocked == {}


def test_a_large_write_over_tls_is_split_and_its_unsent_bytes_are_counted() -> None:
    sender = Sender()
    sender.outbox.over_tls = True
    sender.outbox.write(bytes(2 * TURN + 1))
    write = sender.transport.write

    def full(sent: bytes) -> None:
        write(sent)
        sender.outbox.paused = True
        sender.transport.stuck += len(sent)

    sender.transport.write = full  # type: ignore[method-assign]
    sender.loop.turn()

    assert sender.transport.writes == 3
    assert sender.shared.unread.held_bytes == 2 * TURN + 1


def test_a_small_write_over_tls_is_not_split() -> None:
    sender = Sender()
    sender.outbox.over_tls = True
    sender.outbox.write(bytes(TURN))
    sender.loop.turn()

    assert sender.transport.writes == 1


def test_bytes_still_in_the_transport_count_as_unsent() -> None:
    sender = Sender()
    assert sender.outbox.unsent_bytes() == 0

    sender.transport.stuck = 5
    assert sender.outbox.unsent_bytes() == 5


def test_bytes_in_a_full_socket_below_tls_count_as_unsent() -> None:
    sender = Sender()
    sender.outbox.over_tls = True
    ours, theirs = socket.socketpair()
    sender.transport.get_extra_info = {"socket": ours}.get  # type: ignore[assignment]
    with ours, theirs:
        assert sender.outbox.unsent_bytes() == 0
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1024))
        assert sender.outbox.unsent_bytes() > 0

        while select.select([theirs], [], [], 0)[0]:
            theirs.recv(1 << 20)
        assert sender.outbox.unsent_bytes() == 0
    assert sender.outbox.unsent_bytes() == 0  # a socket that is closed

    sender.transport.get_extra_info = {}.get  # type: ignore[assignment]
    assert sender.outbox.unsent_bytes() == 0


def test_shedding_an_outbox_aborts_the_connection_and_uncounts_its_streams() -> None:
    sender = Sender()
    stream = sender.open(1)
    stream.credit = -DEFAULT_WINDOW
    sender.outbox.queue(stream, (bytes(15),))
    sender.outbox.shed()

    assert sender.transport.aborted
    assert sender.shared.unread.held_bytes == 0


# -- properties ------------------------------------------------------------------------------------------------

STREAMS = (1, 3, 5)
STEPS = st.one_of(
    st.tuples(st.just("queue"), st.sampled_from(STREAMS), st.integers(0, 300_000)),
    st.tuples(st.just("widen"), st.sampled_from((0, *STREAMS)), st.integers(1, 200_000)),
    st.tuples(st.just("begin_with"), st.just(0), st.integers(0, 200_000)),
    st.tuples(st.sampled_from(["pause", "resume", "look"]), st.just(0), st.just(0)),
)


class Peer:
    """Tracks the windows that it has opened, and the data received of each stream."""

    def __init__(self) -> None:
        self.sender = Sender()
        self.queued = {stream_id: bytearray() for stream_id in STREAMS}
        self.received = {stream_id: bytearray() for stream_id in STREAMS}
        self.windows = dict.fromkeys((0, *STREAMS), DEFAULT_WINDOW)
        self._initial = DEFAULT_WINDOW
        self._unacknowledged: list[int] = []
        for stream_id in STREAMS:
            self.sender.open(stream_id)

    def queue(self, stream_id: int, size: int) -> None:
        content = bytes([len(self.queued[stream_id]) % 251]) * size
        self.queued[stream_id] += content
        pieces = (content[: size // 3], content[size // 3 :])
        self.sender.outbox.queue(self.sender.outbox.streams[stream_id], pieces)

    def widen(self, stream_id: int, size: int) -> None:
        self.windows[stream_id] += size
        self.sender.widen(stream_id, size)

    def begin_with(self, stream_id: int, size: int) -> None:
        self._unacknowledged.append(size)
        self.sender.configure(INITIAL_WINDOW_SIZE, size)

    def pause(self, *_: int) -> None:
        self.sender.outbox.pause()

    def resume(self, *_: int) -> None:
        self.sender.outbox.resume()

    def look(self, *_: int) -> None:
        for frame in self.sender.read_frames():
            if frame.kind == SETTINGS:  # in force from its acknowledgment on (RFC 9113, 6.5.3)
                size = self._unacknowledged.pop(0)
                for each in STREAMS:
                    self.windows[each] += size - self._initial
                self._initial = size
            elif frame.kind == DATA:
                size = len(frame.payload)
                self.received[frame.stream] += frame.payload
                self.windows[0] -= size
                self.windows[frame.stream] -= size
                assert 0 < size <= MIN_FRAME_BYTES
                assert min(self.windows[0], self.windows[frame.stream]) >= 0


@given(st.lists(STEPS, max_size=30))
@example(
    [
        ("begin_with", 0, 0),
        ("queue", 1, 1),
        ("begin_with", 0, 1),
        ("pause", 0, 0),
        ("begin_with", 0, 0),
        ("resume", 0, 0),
    ]
)  # framed before the window shrank, and written after it
def test_all_data_is_sent_once_in_order_and_never_beyond_the_windows(
    steps: list[tuple[str, int, int]],
) -> None:
    peer = Peer()
    for step, stream_id, size in steps:
        getattr(peer, step)(stream_id, size)
    peer.look()
    peer.resume()
    for stream_id in (0, *STREAMS):
        peer.widen(stream_id, 20_000_000)
    peer.look()

    assert peer.received == peer.queued
    assert peer.sender.outbox.blocked == {}
    assert peer.sender.shared.unread.held_bytes == 0


@given(st.lists(st.integers(1, 5000), min_size=20, max_size=40), st.integers(2, 5))
def test_no_stream_is_more_than_a_turn_behind_another(openings: list[int], count: int) -> None:
    sender = Sender()
    for number in range(count):
        stream = sender.open(2 * number + 1)
        stream.credit = 10**7
        sender.outbox.queue(stream, (bytes(10**6),))
    sender.sent()
    turns: list[int] = []
    for opening in openings:
        sender.widen(0, opening)
        turns += sender.sent()

    assert turns == [2 * (number % count) + 1 for number in range(turns[0] // 2, turns[0] // 2 + len(turns))]
