from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.generator.grpc import Compressed, GrpcOpener
from penstock.perf.generator.http2_request_headers import Openings
from penstock.perf.generator.orders import GrpcCall, Target, Tls
from penstock.server.http2 import frames
from tests.perf.generator.grpc_peer import END, METHOD, FakeSlot, Peer, Server, counted, message, run, turns

REQUEST = message(b"please")


def reset(code: int) -> Callable[[Peer], bytes]:
    return lambda peer: frames.frame(frames.RST_STREAM, 0, 1, code.to_bytes(4, "big"))


def test_only_the_first_request_on_a_connection_has_a_full_header_block() -> None:
    async def scenario() -> None:
        server = Server(GrpcCall(METHOD, metadata=(("X-Team", "blue"),)))
        channel = await server.open()
        for _ in range(3):
            channel.send(REQUEST, FakeSlot())

        sent = server.peer.sent()

        assert [(frame.kind, frame.flags) for frame in sent] == [(frames.HEADERS, 4), (frames.DATA, END)] * 3
        assert [frame.stream for frame in sent] == [1, 1, 3, 3, 5, 5]
        assert {frame.payload for frame in sent[1::2]} == {REQUEST}
        heads = [server.peer.fields(frame) for frame in sent[::2]]
        assert heads[0] == heads[1] == heads[2]
        assert heads[0] == {
            ":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": "[::1]:8001", "te": "trailers",
            "content-type": "application/grpc", "user-agent": "penstock-perf",
            "grpc-accept-encoding": "identity,deflate,gzip", "x-team": "blue",
        }  # fmt: skip
        assert sent[2].payload == sent[4].payload
        assert len(sent[2].payload) == len(heads[0])

    run(scenario)


@pytest.mark.parametrize("metadata", [(), (("x", "y" * 5000),), tuple((f"x-{n}", "y" * 200) for n in range(20))])
@pytest.mark.parametrize("settings", [{}, {"header_table_size": 0}, {"header_table_size": 100}])
def test_the_server_decodes_the_same_fields_whatever_its_table_size(
    metadata: tuple[tuple[str, str], ...], settings: dict[str, int]
) -> None:
    async def scenario() -> None:
        server = Server(GrpcCall(METHOD, metadata=metadata), **settings)
        channel = await server.open()
        for _ in range(3):
            channel.send(REQUEST, FakeSlot())
        if not settings:
            await turns()
            server.peer.feed(frames.settings({frames.HEADER_TABLE_SIZE: 64}))
            channel.send(REQUEST, FakeSlot())
            channel.send(REQUEST, FakeSlot())

        heads = [server.peer.fields(frame) for frame in server.peer.sent() if frame.kind == frames.HEADERS]

        assert heads == [heads[0]] * (3 if settings else 5)
        assert [(name, heads[0][name]) for name, _ in metadata] == list(metadata)

    run(scenario)


def test_header_fields_too_large_for_a_frame_are_rejected() -> None:
    with pytest.raises(ValueError, match="header fields of"):
        Openings([(b"x", b"y" * 20_000)])


def test_answers_of_one_read_are_delivered_and_written_together() -> None:
    async def scenario() -> None:
        server = Server()
        channel = await server.open()
        slots = [FakeSlot(again=2, send=lambda slot: channel.send(REQUEST, slot)) for _ in range(3)]
        for slot in slots:
            channel.send(REQUEST, slot)
        peer = server.peer
        assert peer.requests() == {1: REQUEST, 3: REQUEST, 5: REQUEST}
        writes = peer.transport.writes

        peer.feed(*(peer.answer(stream) for stream in (5, 1, 3)))

        assert peer.transport.writes == writes + 1
        assert peer.requests() == {7: REQUEST, 9: REQUEST, 11: REQUEST}
        assert [slot.ends for slot in slots] == [[""]] * 3
        assert len({slot.times[0] for slot in slots}) == 1
        assert not server.on_lost

    run(scenario)


def test_everything_sent_in_one_loop_turn_leaves_in_one_write() -> None:
    async def scenario() -> None:
        server = Server()
        channel = await server.open()
        await turns()
        writes = server.peer.transport.writes
        for _ in range(5):
            channel.send(REQUEST, FakeSlot())
        await turns()

        assert server.peer.transport.writes == writes + 1

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"grpc_status": "14", "grpc_message": "no%20more%3A 100%25 \xe2"}, "UNAVAILABLE: no more: 100% \ufffd"),
        ({"grpc_status": "0"}, "INTERNAL: the answer has no message"),
        ({"grpc_status": "3"}, "INVALID_ARGUMENT"),
        ({"grpc_status": "77", "grpc_message": "odd"}, "status 77: odd"),
        ({"grpc_status": "x"}, "status x"),
        ({"__status": "503"}, "UNAVAILABLE: HTTP status 503"),
        ({"__status": "404"}, "UNIMPLEMENTED: HTTP status 404"),
        ({"__status": "418"}, "UNKNOWN: HTTP status 418"),
        ({"__status": "200"}, "UNKNOWN: the answer has no status"),
    ],
)
def test_a_trailers_only_answer_reports_its_error(fields: dict[str, str], error: str) -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        block = server.peer.block(**{name: value for name, value in fields.items() if name != "grpc_message"})
        if "grpc_message" in fields:
            block += (
                b"\x00\x0cgrpc-message"
                + bytes((len(fields["grpc_message"]),))
                + fields["grpc_message"].encode("latin-1")
            )
        server.peer.feed(frames.frame(frames.HEADERS, frames.END_HEADERS | END, 1, block))

        assert slot.ends == [error]

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reset(7), "UNAVAILABLE: the server reset the stream (REFUSED_STREAM)"),
        (reset(8), "CANCELLED: the server reset the stream (CANCEL)"),
        (reset(99), "UNKNOWN: the server reset the stream (99)"),
        (lambda peer: peer.begun(1) + frames.frame(frames.DATA, END, 1, b"12345"), "UNKNOWN: the answer has no status"),
        (lambda peer: peer.headers(1, __status="502") + frames.frame(0, END, 1), "UNAVAILABLE: HTTP status 502"),
        (lambda peer: peer.begun(1) + peer.message(1) + peer.ended(1, "13"), "INTERNAL"),
    ],
)  # fmt: skip
def test_a_slot_is_notified_once_however_the_server_ends_its_request(answer: object, error: str) -> None:
    async def scenario() -> None:
        server, slot, other = Server(), FakeSlot(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        channel.send(REQUEST, other)
        assert callable(answer)
        server.peer.feed(answer(server.peer), server.peer.answer(3))

        assert slot.ends == [error]
        assert other.ends == [""]
        assert not server.on_lost
        assert not server.peer.client.streams

    run(scenario)


def _session(peer: Peer) -> bytes:
    """Give answers of every shape; header blocks are made in the order of sending."""
    front = (
        frames.frame(frames.PING, 0, 0, b"12345678") + peer.answer(1) + frames.frame(0x42, 0xFF, 1, b"from the future")
    )
    front += peer.begun(3)
    block = peer.block(grpc_status="0", x_long="y" * 40)
    return front + b"".join((
        frames.frame(frames.DATA, frames.PADDED, 3, b"\x03" + message(b"yes") + bytes(3)),
        frames.frame(frames.DATA, 0, 3),
        frames.frame(frames.HEADERS, END, 3, block[:5]),
        frames.frame(frames.CONTINUATION, 0, 3, block[5:6]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 3, block[6:]),
        frames.frame(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY | frames.PADDED, 5,
                     b"\x02" + bytes(5) + peer.block(__status="200") + b"\0\0"),
        peer.message(5), frames.window_update(0, 1000), frames.window_update(5, 1),
        peer.ended(5, "8", grpc_message="full"),
        frames.reset(7, frames.ErrorCode.CANCEL),
        frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20, frames.MAX_FRAME_SIZE: 1 << 15}),
        frames.frame(frames.SETTINGS, frames.ACK, 0),
        peer.begun(9), peer.message(9, bytes(5000)), peer.message(99), peer.ended(9),
        peer.answer(11),
    ))  # fmt: skip


@settings(max_examples=50)
@given(st.lists(st.integers(1, 400), max_size=30))
def test_answers_are_the_same_wherever_the_bytes_are_split(sizes: list[int]) -> None:
    async def scenario() -> None:
        server = Server()
        channel = await server.open()
        slots = [FakeSlot() for _ in range(6)]
        for slot in slots:
            channel.send(REQUEST, slot)
        peer = server.peer
        peer.sent()
        session, at = _session(peer), 0
        for size in sizes:
            peer.feed(session[at : at + size])
            at += size
        peer.feed(session[at:])

        assert [slot.ends for slot in slots] == [
            [""], [""], ["RESOURCE_EXHAUSTED: full"], ["CANCELLED: the server reset the stream (CANCEL)"], [""], [""],
        ]  # fmt: skip
        assert [(frame.kind, frame.flags) for frame in peer.sent()] == [(frames.PING, 1), (frames.SETTINGS, 1)]
        assert peer.client.peer_frame == 1 << 15
        assert not server.on_lost

    run(scenario)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_a_slot_is_notified_once_whatever_a_broken_server_sends(garbage: bytes) -> None:
    async def scenario() -> None:
        server = Server()
        channel = await server.open()
        slots = [FakeSlot() for _ in range(3)]
        for slot in slots:
            channel.send(REQUEST, slot)
        peer = server.peer
        peer.feed(peer.answer(3), garbage)
        if not peer.transport.closed:
            peer.transport.close()
        server.down = True
        await turns()

        assert all(len(slot.ends) + len(slot.losses) == 1 for slot in slots)
        assert slots[1].ends == [""]

    run(scenario)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_requests_are_compressed_once_and_only_if_that_makes_them_smaller(coding: str) -> None:
    opener = GrpcOpener(Target("h", 1, grpc=GrpcCall(METHOD, compression=coding)))
    encode = opener._encode
    assert encode is not None
    large, small = message(bytes(1000)), message(b"\x01\x02")

    sent = encode(large)

    assert sent[0] == 1
    assert int.from_bytes(sent[1:5], "big") == len(sent) - 5 < 100
    assert (gzip if coding == "gzip" else zlib).decompress(sent[5:]) == bytes(1000)
    assert encode(large) is sent
    assert encode(small) is small


def test_the_cache_of_compressed_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.generator.grpc._CACHED_BYTES", 5000)
    encode = Compressed(b"gzip")
    for number in range(100):
        encode(message(bytes((number,)) * 1000))

    assert len(encode._known) <= 5


def test_compression_is_declared_in_the_headers() -> None:
    async def scenario() -> None:
        server = Server(GrpcCall(METHOD, compression="gzip"))
        channel = await server.open()
        channel.send(message(bytes(1000)), FakeSlot())
        head, body = server.peer.sent()

        assert server.peer.fields(head)["grpc-encoding"] == "gzip"
        assert body.payload[0] == 1

    run(scenario)


def test_a_missing_tls_file_is_an_error_on_opening() -> None:
    async def scenario() -> None:
        opener = GrpcOpener(Target("h", 1, tls=Tls(roots="/nowhere/roots.pem"), grpc=GrpcCall(METHOD)))
        with pytest.raises(OSError, match="No such file"):
            await opener.open(lambda reason: None)

    run(scenario)


def test_closing_notifies_no_slot() -> None:
    async def scenario() -> None:
        server, slot = Server(), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        channel.close()
        await turns()

        assert server.peer.transport.closed
        assert not server.on_lost
        assert counted([slot]) == {}
        assert not slot.losses

    run(scenario)
