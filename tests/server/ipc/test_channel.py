from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.server.ipc.arena import MAX_IDLE_BYTES, SEGMENT_BYTES
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.wire import FIRST_KIND, Message
from tests.server.ipc.wire_pairs import mappings, memory_use, same, sockets

PATIENCE_S = 10.0


@contextmanager
def channels(arena_bytes: int = 64 << 20) -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(sock, arena_bytes) for sock in sockets())
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def test_messages_arrive_as_they_were_sent() -> None:
    with channels() as (here, there):
        here.send(FIRST_KIND, 1, b"abc", [np.arange(100_000), None])
        ((kind, number, body, (array, nothing), _),) = there.receive(PATIENCE_S)
        assert (kind, number, body, nothing) == (FIRST_KIND, 1, b"abc", None)
        assert same(np.arange(100_000), array)


def test_receive_returns_after_its_time_limit() -> None:
    with channels() as (here, _):
        assert here.receive(0.0) == []
        assert here.receive(0.001) == []


def test_a_message_is_received_after_a_poll_that_took_all_of_the_time_limit() -> None:
    with channels() as (here, there):
        real, waits = there._readable, []

        def poll(timeout_ms: float) -> list[tuple[int, int]]:
            """Return nothing the first time, as on a machine that stood still while the other side sent."""
            waits.append(timeout_ms)
            if len(waits) == 1:
                here.send(FIRST_KIND, 1, b"late")
                return []
            return real.poll(timeout_ms)

        there._readable = SimpleNamespace(poll=poll)  # type: ignore[assignment]
        assert [body for _, _, body, _, _ in there.receive(PATIENCE_S)] == [b"late"]


def test_freed_slots_are_reported_on_request_or_before_waiting() -> None:
    with channels() as (here, there):
        for again in (there.report_freed, lambda: there.receive(0.0)):
            here.send(FIRST_KIND, 1, b"", [np.zeros(100_000)])
            there.receive(PATIENCE_S).clear()
            again()
            assert here.receive(0.0) == []
            assert here._wire.arena.leases == 0


def test_both_sides_unmap_removed_segments_without_further_messages() -> None:
    with channels(256 << 20) as (here, there):
        for _ in range(40):
            here.send(FIRST_KIND, 1, b"", [np.zeros(SEGMENT_BYTES, np.uint8)])
        come: list[Message] = []
        while len(come) < 40:
            come += there.receive(PATIENCE_S)
        come.clear()
        there.report_freed()
        assert here.receive(0.0) == []
        assert here._wire.arena.total_bytes == MAX_IDLE_BYTES
        assert there.receive(0.0) == []
        assert len(there._wire.mirror._segments) == MAX_IDLE_BYTES // SEGMENT_BYTES


def test_a_peer_that_closes_after_freeing_memory_is_an_end_of_file() -> None:
    with channels(256 << 20) as (here, there):
        for _ in range(40):
            here.send(FIRST_KIND, 1, b"", [np.zeros(SEGMENT_BYTES, np.uint8)])
        come: list[Message] = []
        while len(come) < 40:
            come += there.receive(PATIENCE_S)
        come.clear()
        there.report_freed()
        there.close()
        with pytest.raises(EOFError):
            here.receive(PATIENCE_S)


def test_several_threads_can_send_in_parallel() -> None:
    with channels() as (here, there):
        threads = [threading.Thread(target=_send_many, args=(here, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        come: list[Message] = []
        while len(come) < 400:
            come += there.receive(PATIENCE_S)
        for thread in threads:
            thread.join(PATIENCE_S)
        for sender in range(4):
            assert [message[2] for message in come if message[1] == sender] == [b"%d" % turn for turn in range(100)]
        assert all(set(message[3][0].tolist()) == {message[1]} for message in come)  # type: ignore[union-attr]


def _send_many(channel: Channel, number: int) -> None:
    for turn in range(100):
        channel.send(FIRST_KIND, number, b"%d" % turn, [np.full(turn * 100, number) if turn else np.array([number])])


def test_the_end_of_the_peer_is_an_end_of_file_after_its_last_message() -> None:
    with channels() as (here, there):
        here.send(FIRST_KIND, 1, b"last")
        here.close()
        assert there.receive(PATIENCE_S)[0][2] == b"last"
        with pytest.raises(EOFError):
            there.receive(PATIENCE_S)
        with pytest.raises(OSError, match="Broken pipe"):
            there.send(FIRST_KIND, 1)


def test_closing_a_channel_wakes_a_waiting_receive() -> None:
    with channels() as (here, _):
        ended = []

        def wait() -> None:
            try:
                here.receive()
            except (EOFError, OSError):
                ended.append(True)

        thread = threading.Thread(target=wait)
        thread.start()
        here.close()
        thread.join(PATIENCE_S)
        assert ended == [True]


def test_closed_channels_leave_no_descriptors_or_mappings() -> None:
    before = memory_use()
    with channels() as (here, there):
        here.send(FIRST_KIND, 1, b"", [np.zeros(100_000)], [0])
        there.send(FIRST_KIND, 1, b"", [np.zeros(100_000)], [0])
        assert mappings() > before[1]
    assert memory_use() == before
