"""ModelStreamInfer: a conversation for each request that is under way."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.generator.orders import GrpcCall
from penstock.server.http2 import frames
from penstock.server.protobuf import service_pb2
from tests.perf.generator.grpc_peer import END, FakeSlot, Peer, Server, message, run, turns

CALL = GrpcCall("/inference.GRPCInferenceService/ModelStreamInfer", streaming=True)
REQUEST, NEXT = message(b"first"), message(b"next")


def response(*, final: bool | None = None, error: str = "", outputs: int = 0) -> bytes:
    message = service_pb2().ModelStreamInferResponse(error_message=error)
    message.infer_response.model_name = "m"
    if final is not None:
        message.infer_response.parameters["triton_final_response"].bool_param = final
    if outputs:
        message.infer_response.outputs.add(name="y")
        message.infer_response.raw_output_contents.append(bytes(outputs))
    written: bytes = message.SerializeToString()
    return written


def test_the_message_parser_is_loaded_before_the_first_request() -> None:
    code = """
import sys
from penstock.perf.generator.grpc_streams import StreamingChannel
StreamingChannel(None, print, None)
sys.exit("tritonclient.grpc.service_pb2" not in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_slot_learns_the_number_of_responses_of_each_good_answer() -> None:
    async def scenario() -> None:
        server = Server(CALL)
        channel = await server.open()
        slot = FakeSlot(again=2, send=lambda slot: channel.send(NEXT, slot))
        channel.send(REQUEST, slot)
        peer, some = server.peer, response(final=False, outputs=4)
        peer.feed(peer.begun(1), peer.message(1, some), peer.message(1, some), peer.message(1, response(final=True)))
        peer.feed(peer.message(1, some), peer.message(1, response(final=True, error="no")))
        peer.feed(peer.message(1, response(final=True, outputs=4)))

        assert (slot.ends, slot.parts) == (["", "no", ""], [(2, 2), (0, 1)])

    run(scenario)


def test_requests_of_a_slot_follow_each_other_on_one_stream() -> None:
    async def scenario() -> None:
        server = Server(CALL)
        channel = await server.open()
        slot = FakeSlot(again=1, send=lambda slot: channel.send(NEXT, slot))
        channel.send(REQUEST, slot)
        peer = server.peer
        opened, first = peer.sent()
        peer.feed(peer.begun(1), peer.message(1, response(final=True)))
        (second,) = peer.sent()
        peer.feed(peer.message(1, response(final=True)))

        assert (opened.kind, opened.flags) == (frames.HEADERS, frames.END_HEADERS)
        assert [(each.stream, each.flags, each.payload) for each in (first, second)] == [(1, 0, REQUEST), (1, 0, NEXT)]
        assert slot.ends == ["", ""]

    run(scenario)


def test_concurrent_requests_have_their_own_streams_and_idle_streams_are_reused() -> None:
    async def scenario() -> None:
        server, slots = Server(CALL), [FakeSlot() for _ in range(4)]
        channel = await server.open()
        peer = server.peer
        channel.send(REQUEST, slots[0])
        channel.send(REQUEST, slots[1])
        assert peer.requests().keys() == {1, 3}
        peer.feed(peer.begun(3), peer.message(3, response()))
        channel.send(NEXT, slots[2])
        channel.send(NEXT, slots[3])

        assert peer.requests() == {3: NEXT, 5: NEXT}
        peer.feed(peer.message(3, response()), peer.begun(5), peer.message(5, response()))
        assert [slot.ends for slot in slots] == [[], [""], [""], [""]]

    run(scenario)


def test_a_decoupled_request_ends_with_its_final_response() -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        peer = server.peer
        peer.feed(peer.begun(1), *(peer.message(1, response(final=False, outputs=10)) for _ in range(3)))
        before = list(slot.ends)
        peer.feed(peer.message(1, response(final=True)))

        assert before == []
        assert slot.ends == [""]

    run(scenario)


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ([response(error="no such model")], ["no such model"]),
        ([response(error="bad", final=False), response(final=True)], ["bad"]),
        ([response(final=False), response(error="late", final=True)], ["late"]),
        ([response(final=True), response(final=True)], [""]),
        ([b"\xff\xff"], ["INTERNAL: an answer that is no ModelStreamInferResponse"]),
    ],
)
def test_an_error_in_a_response_fails_its_request_and_unexpected_messages_are_dropped(
    answers: list[bytes], ends: list[str]
) -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        peer = server.peer
        peer.feed(peer.begun(1), *(peer.message(1, answer) for answer in answers))

        assert slot.ends == ends
        peer.sent()
        channel.send(NEXT, slot)
        assert list(peer.requests().values()) == [NEXT]
        assert len(peer.client.streams) == 1

    run(scenario)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200)), min_size=1, max_size=3),
    st.lists(st.integers(1, 80), min_size=1),
)
def test_messages_are_assembled_however_frames_split_them(answers: list[tuple[int, int]], sizes: list[int]) -> None:
    async def scenario() -> None:
        server = Server(CALL)
        channel = await server.open()
        slot = FakeSlot(again=len(answers) - 1, send=lambda slot: channel.send(NEXT, slot))
        channel.send(REQUEST, slot)
        peer = server.peer
        peer.feed(peer.begun(1, grpc_encoding="gzip"))
        cuts = itertools.cycle(sizes)
        for more, size in answers:
            content = message(response(final=False, outputs=size)) * more
            content += message(gzip.compress(response(final=True)), 1) if size % 2 else message(response(final=True))
            while content:
                cut = next(cuts)
                peer.feed(frames.frame(frames.DATA, 0, 1, content[:cut]))
                content = content[cut:]

        assert slot.ends == [""] * len(answers)

    run(scenario)


@pytest.mark.parametrize(
    ("ended", "error"),
    [
        (lambda peer: peer.ended(1, "14", grpc_message="going"), "UNAVAILABLE: going"),
        (lambda peer: peer.ended(1), "UNKNOWN: the server ended the stream before its answer"),
        (lambda peer: frames.reset(1, frames.ErrorCode.CANCEL), "CANCELLED: the server reset the stream (CANCEL)"),
        (lambda peer: peer.message(1, b"x", 1), "INTERNAL: a compressed message without a known grpc-encoding"),
        (lambda peer: peer.message(1, b"x", 7), "INTERNAL: message with unknown flags 0x07"),
    ],
)
def test_a_stream_ended_by_the_server_is_an_error_and_the_next_request_opens_another(ended: object, error: str) -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        peer = server.peer
        assert callable(ended)
        peer.feed(peer.begun(1), ended(peer))
        peer.sent()
        channel.send(NEXT, slot)

        assert slot.ends == [error]
        assert peer.requests() == {3: NEXT}

    run(scenario)


def test_the_end_of_an_idle_stream_is_not_an_error() -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        peer = server.peer
        peer.feed(peer.begun(1), peer.message(1, response()), peer.ended(1, "14"))
        peer.sent()
        channel.send(NEXT, slot)

        assert slot.ends == [""]
        assert peer.requests() == {3: NEXT}

    run(scenario)


def _ends(peer: Peer) -> list[int]:
    return [frame.stream for frame in peer.sent() if frame.kind == frames.DATA and frame.flags == END]


def test_goaway_ends_idle_streams_at_once_and_others_with_their_answers() -> None:
    async def scenario() -> None:
        server, slots = Server(CALL), [FakeSlot() for _ in range(3)]
        channel = await server.open()
        for slot in slots:
            channel.send(REQUEST, slot)
        old = server.peer
        old.feed(old.begun(1), old.message(1, response()))
        old.sent()
        old.feed(frames.goaway(3, frames.ErrorCode.NO_ERROR))
        assert _ends(old) == [1]
        await turns()
        new = server.peer
        assert new.requests() == {1: REQUEST}  # the third was not begun
        channel.send(NEXT, slots[0])
        assert new.requests() == {3: NEXT}
        old.feed(old.begun(3), old.message(3, response()))
        assert _ends(old) == [3]
        old.feed(old.ended(1), old.ended(3))
        new.feed(new.begun(1), new.message(1, response()), new.begun(3), new.message(3, response()))

        assert [slot.ends for slot in slots] == [["", ""], [""], [""]]
        assert old.transport.closed

    run(scenario)


def test_streams_beyond_the_servers_limit_are_errors() -> None:
    async def scenario() -> None:
        server, slots = Server(CALL, max_concurrent_streams=1), [FakeSlot(), FakeSlot()]
        channel = await server.open()
        for slot in slots:
            channel.send(REQUEST, slot)
        assert slots[1].ends == []
        await turns()

        assert slots[1].ends == ["RESOURCE_EXHAUSTED: the server allows 1 streams a connection"]
        assert server.opener.slots_each == 1

    run(scenario)


def test_a_connection_with_only_idle_streams_may_close() -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        server.peer.feed(server.peer.begun(1), server.peer.message(1, response()))
        server.peer.transport.close()
        await turns()
        channel.send(NEXT, slot)
        await turns()

        assert not server.on_lost
        assert not slot.losses
        assert server.peer.requests() == {1: NEXT}

    run(scenario)


def test_a_request_in_flight_on_a_stream_is_lost_with_its_connection() -> None:
    async def scenario() -> None:
        server, slot = Server(CALL), FakeSlot()
        channel = await server.open()
        channel.send(REQUEST, slot)
        server.peer.transport.close()
        await turns()

        assert slot.losses == server.on_lost == ["the server closed the connection"]

    run(scenario)
