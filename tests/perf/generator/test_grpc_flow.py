"""Flow control, limits and the end of connections."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.generator import grpc
from penstock.perf.generator.grpc import GrpcOpener
from penstock.perf.generator.orders import GrpcCall, Target
from penstock.server.http2 import frames
from tests.perf.generator.grpc_peer import END, METHOD, FakeSlot, Server, message, run, turns

REQUEST = message(b"please")


def test_a_large_request_is_sent_in_frames_as_both_windows_allow() -> None:
    async def scenario() -> None:
        server = Server(initial_window_size=20_000)
        channel = await server.open()
        large, slot, other = message(bytes(range(256)) * 200), FakeSlot(), FakeSlot()
        channel.send(large, slot)
        channel.send(REQUEST, other)
        peer = server.peer

        assert [(frame.stream, len(frame.payload)) for frame in peer.sent() if frame.kind == frames.DATA] == [
            (1, 16384), (1, 3616), (3, len(REQUEST)),
        ]  # fmt: skip
        peer.feed(frames.window_update(1, 30_000))
        assert [(frame.stream, len(frame.payload)) for frame in peer.sent()] == [(1, 16384), (1, 13616)]
        peer.feed(frames.window_update(1, 30_000))
        rest = 65535 - 50_000 - len(REQUEST)
        assert [(frame.stream, len(frame.payload)) for frame in peer.sent()] == [
            (1, min(rest, len(large) - 50_000))
        ]  # fmt: skip
        peer.feed(peer.answer(3), peer.answer(1))
        assert (slot.ends, other.ends) == ([""], [""])

    run(scenario)


def test_the_connection_window_holds_back_all_streams() -> None:
    async def scenario() -> None:
        server = Server(initial_window_size=1 << 20, max_frame_size=1 << 20)
        channel = await server.open()
        large = message(bytes(60_000))
        for _ in range(2):
            channel.send(large, FakeSlot())
        peer = server.peer
        first = {stream: len(sent) for stream, sent in peer.requests().items()}
        peer.feed(frames.window_update(0, 1_000_000))

        assert first == {1: 60_005, 3: 65_535 - 60_005}
        assert {stream: len(sent) for stream, sent in peer.requests().items()} == {3: 2 * 60_005 - 65_535}

    run(scenario)


def test_a_large_request_is_sent_whole_before_the_next_begins() -> None:
    async def scenario() -> None:
        server = Server(initial_window_size=1 << 20, max_frame_size=1 << 20)
        channel = await server.open()
        large = message(bytes(600_000))
        for _ in range(3):
            channel.send(large, FakeSlot())
        peer = server.peer
        received = dict.fromkeys((1, 3, 5), 0)
        for window in (0, 800_000):
            peer.feed(frames.window_update(0, window) if window else b"")
            for stream, sent in peer.requests().items():
                received[stream] += len(sent)
        assert received == {1: 600_005, 3: 65_535 + 800_000 - 600_005, 5: 0}

    run(scenario)


def test_a_full_transport_pauses_sending_until_it_drains() -> None:
    async def scenario() -> None:
        server = Server(initial_window_size=1 << 30)
        channel = await server.open()
        peer = server.peer
        peer.feed(frames.window_update(0, 1 << 30))
        peer.sent()
        peer.client.pause_writing()
        channel.send(message(bytes(40_000)), FakeSlot())
        channel.send(REQUEST, FakeSlot())
        assert {frame.kind for frame in peer.sent()} == {frames.HEADERS}
        peer.client.resume_writing()

        assert {stream: len(sent) for stream, sent in peer.requests().items()} == {1: 40_005, 3: len(REQUEST)}

    run(scenario)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30_000)), max_size=30),
    st.integers(0, 70_000),
)
def test_windows_are_never_exceeded_and_everything_arrives(
    sizes: list[int], updates: list[tuple[int, int]], window: int
) -> None:
    async def scenario() -> None:
        server = Server(initial_window_size=window)
        channel = await server.open()
        requests = {2 * number + 1: message(bytes((number,)) * size) for number, size in enumerate(sizes)}
        for request in requests.values():
            channel.send(request, FakeSlot())
        peer = server.peer
        received = dict.fromkeys(requests, b"")
        allowed = {0: 65535, **dict.fromkeys(requests, window)}

        def take() -> None:
            for frame in peer.sent():
                if frame.kind == frames.DATA:
                    received[frame.stream] += frame.payload
                    assert frame.flags == (END if received[frame.stream] == requests[frame.stream] else 0)
            assert all(len(received[stream]) <= allowed[stream] for stream in received)
            assert sum(map(len, received.values())) <= allowed[0]

        take()
        for which, increment in updates:
            stream = 0 if which == 0 else 2 * which - 1
            if stream in allowed:
                allowed[stream] += increment
                peer.feed(frames.window_update(stream, increment))
                take()
        peer.feed(frames.window_update(0, 1 << 20), *(frames.window_update(stream, 1 << 20) for stream in received))
        for stream in allowed:
            allowed[stream] += 1 << 20
        take()

        assert received == requests

    run(scenario)


def test_receive_windows_are_refilled_before_they_are_used_up() -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        peer, half = server.peer, frames.MAX_WINDOW // 2
        peer.sent()
        client = peer.client
        client._window_left = client.streams[1].in_left = half + 10
        peer.feed(peer.begun(1), frames.frame(frames.DATA, 0, 1, bytes(11)))
        updates = {frame.stream: int.from_bytes(frame.payload, "big") for frame in peer.sent()}
        peer.feed(peer.ended(1))

        assert updates == dict.fromkeys((0, 1), frames.MAX_WINDOW - half)
        assert slot.ends == [""]

    run(scenario)


def test_no_more_requests_are_in_flight_than_the_server_allows() -> None:
    async def scenario() -> None:
        server = Server(max_concurrent_streams=2)
        channel = await server.open()
        slots = [FakeSlot() for _ in range(4)]
        for slot in slots:
            channel.send(REQUEST, slot)
        peer = server.peer

        assert server.opener.slots_each == 2
        assert peer.requests().keys() == {1, 3}
        peer.feed(peer.answer(3))
        assert peer.requests().keys() == {5}
        peer.feed(frames.settings({frames.MAX_CONCURRENT_STREAMS: 100}))
        assert peer.requests().keys() == {7}
        peer.feed(peer.answer(7), peer.answer(1), peer.answer(5))
        assert [slot.ends for slot in slots] == [[""]] * 4

    run(scenario)


def test_an_early_answer_stops_the_rest_of_its_request() -> None:
    async def scenario() -> None:
        server, slot = Server(initial_window_size=100), FakeSlot()
        channel = await server.open()
        channel.send(message(bytes(1000)), slot)
        peer = server.peer
        peer.sent()
        peer.feed(peer.headers(1, END, __status="200", grpc_status="8", grpc_message="too%20large"))

        assert [(frame.kind, frame.stream) for frame in peer.sent()] == [(frames.RST_STREAM, 1)]
        assert slot.ends == ["RESOURCE_EXHAUSTED: too large"]
        assert not peer.client.blocked

    run(scenario)


def test_goaway_moves_requests_not_begun_to_a_new_connection() -> None:
    async def scenario() -> None:
        server = Server()
        channel = await server.open()
        slots = [FakeSlot() for _ in range(3)]
        for slot in slots[:2]:
            channel.send(REQUEST, slot)
        old = server.peer
        old.feed(frames.goaway(1, frames.ErrorCode.NO_ERROR))
        channel.send(REQUEST, slots[2])
        await turns()
        new = server.peer
        assert new is not old
        assert new.requests().keys() == {1, 3}
        old.feed(old.answer(1))
        assert old.transport.closed
        new.feed(new.answer(1), new.answer(3))
        await turns()

        assert [slot.ends for slot in slots] == [[""]] * 3
        assert len(server.peers) == 2
        assert not server.on_lost

    run(scenario)


def test_an_idle_connection_that_ended_is_reopened_when_needed() -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        server.peer.transport.close()
        await turns()
        assert not server.on_lost
        channel.send(REQUEST, slot)
        await turns()
        server.peer.feed(server.peer.answer(1))

        assert slot.ends == [""]

    run(scenario)


def test_a_lost_connection_is_reported_first_to_the_pacing_and_then_to_each_slot() -> None:
    async def scenario() -> None:
        server, events = Server(), []
        channel = await server.opener.open(lambda reason: events.append(f"channel: {reason}"))
        slots = [FakeSlot(), FakeSlot()]
        for slot in slots:
            slot.on_lost = lambda now_ns, reason: events.append(f"slot: {reason}")  # type: ignore[method-assign]
            channel.send(REQUEST, slot)
        server.peer.transport.close()
        await turns()

        reason = "the server closed the connection"
        assert events == [f"channel: {reason}", f"slot: {reason}", f"slot: {reason}"]

    run(scenario)


def test_a_failed_reconnection_is_reported_to_the_pacing_and_to_waiting_slots() -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        server.peer.feed(frames.goaway(0, frames.ErrorCode.NO_ERROR))
        server.down = True
        channel.send(REQUEST, slot)
        await turns()

        assert server.on_lost == ["nobody there"]
        assert slot.losses == ["nobody there"]

    run(scenario)


def test_requests_lost_with_a_closing_connection_are_errors_and_the_channel_lives_on() -> None:
    async def scenario() -> None:
        server, slot, other = Server(), FakeSlot(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        old = server.peer
        old.feed(frames.goaway(1, frames.ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))
        old.transport.close()
        await turns()
        channel.send(REQUEST, other)
        await turns()
        server.peer.feed(server.peer.answer(1))

        assert slot.ends == ["UNAVAILABLE: GOAWAY ENHANCE_YOUR_CALM too many pings"]
        assert other.ends == [""]
        assert not server.on_lost

    run(scenario)


def test_reconnecting_gives_up_on_a_server_that_ends_every_connection() -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        for _ in range(3):
            server.peer.feed(frames.goaway(0, frames.ErrorCode.NO_ERROR))
            await turns()

        assert len(server.peers) == 3
        assert slot.losses == server.on_lost == ["the server ends every connection as soon as it is made"]

    run(scenario)


def test_a_connection_that_has_used_all_stream_ids_is_replaced() -> None:
    async def scenario() -> None:
        server, slots = Server(), [FakeSlot(), FakeSlot()]
        channel = await server.open()
        old = server.peer
        old.client.next_id = frames.MAX_WINDOW
        for slot in slots:
            channel.send(REQUEST, slot)
        await turns()
        old.feed(old.answer(frames.MAX_WINDOW))
        server.peer.feed(server.peer.answer(1))

        assert [slot.ends for slot in slots] == [[""], [""]]
        assert old.transport.closed

    run(scenario)


@pytest.mark.parametrize(
    ("wrong", "expected_reason"),
    [
        (frames.frame(frames.DATA, frames.PADDED, 1, b"\x05abc"), "more padding than payload"),
        (frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff"), "cannot be decoded"),
        (frames.frame(frames.HEADERS, 0, 1, b"\x88") + frames.frame(frames.PING, 0, 0, bytes(8)), "not continued"),
        (frames.frame(frames.CONTINUATION, 0, 1), "CONTINUATION without HEADERS"),
        (frames.frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), "PUSH_PROMISE"),
        (frames.frame(frames.DATA, 0, 1, bytes(16385)), "a frame of 16385 bytes"),
        (frames.frame(frames.PING, 0, 0, b"1"), "of 1 bytes"),
        (frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.CONTINUATION, 0, 1, bytes(16384)) * 5, "too large"),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), "INITIAL_WINDOW_SIZE"),
        (frames.settings({frames.MAX_FRAME_SIZE: 1}), "MAX_FRAME_SIZE"),
    ],
    ids=str,
)
def test_a_protocol_violation_ends_the_connection_with_a_reason(wrong: bytes, expected_reason: str) -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        server.peer.sent()
        server.peer.feed(wrong)
        last = server.peer.sent()[-1]
        await turns()

        assert last.kind == frames.GOAWAY
        assert expected_reason in last.payload[8:].decode()
        assert expected_reason in server.on_lost[0]
        assert expected_reason in slot.losses[0]

    run(scenario)


class Greeter(asyncio.Protocol):
    """Answers whoever comes with some bytes and hangs up, or, without any, says nothing."""

    def __init__(self, answer: bytes | None, disconnected: asyncio.Event) -> None:
        self._answer = answer
        self._disconnected = disconnected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._answer is not None:
            transport.write(self._answer)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._disconnected.set()


async def _opened_to(answer: bytes | None) -> str:
    """Say what is wrong with a server that greets with `answer`."""
    disconnected = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Greeter(answer, disconnected), "127.0.0.1", 0) as server:
        opener = GrpcOpener(Target("127.0.0.1", server.sockets[0].getsockname()[1], grpc=GrpcCall(METHOD)))
        with pytest.raises(OSError, match=" ") as caught:
            await opener.open(lambda reason: None)
        await disconnected.wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "expected_reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
        (frames.frame(frames.PING, 0, 0, bytes(8)), "does not speak HTTP/2"),
        (b"", "closed the connection"),
        (frames.settings({}) + frames.goaway(0, frames.ErrorCode.NO_ERROR), "as soon as it was made"),
        (None, "no SETTINGS within"),
    ],
)
def test_a_server_that_does_not_speak_http2_is_an_error_on_opening(
    answer: bytes | None, expected_reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc, "_OPEN_S", 0.01)

    assert expected_reason in asyncio.run(_opened_to(answer))
