from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from penstock.server.http.connection import REJECTED_LINGER_S
from penstock.server.http.fastlane import FastLane
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.listening.body_buffer import LARGE_BYTES, SCRATCH_BYTES
from penstock.server.listening.listener import make_config
from tests.server.http.lane import App, Lane, Own, in_chunks, read_answers, request, run, turns

LIMITS = Limits(max_body_bytes=4 << 20, receive_timeout_s=10)
LARGE = random.Random(1).randbytes(LARGE_BYTES)
LARGEST = random.Random(2).randbytes(2_500_000)
KINDS = [
    ("/own/a", LARGE, request("/own/a", LARGE)),
    ("/own/b", LARGEST, request("/own/b", LARGEST)),
    ("/own/c", b"small", request("/own/c", b"small")),
    ("/own/d", LARGE, request("/own/d", LARGE, "x-other: a longer head than the one before")),
    ("/own/e", LARGE, request("/own/e", LARGE, "expect: 100-continue")),
    ("/own/f", LARGE, in_chunks("/own/f", LARGE[:70_000], LARGE[70_000:])),
    ("/app/g", LARGE, request("/app/g", LARGE)),
    ("/app/h", b"", b"GET /app/h HTTP/1.1\r\nhost: x\r\n\r\n"),
    ("/own/i", LARGE[:100_000], request("/own/i", LARGE[:100_000])),
]


def answered(path: str, body: bytes) -> bytes:
    return f"{path[1:4]} {path} ".encode() + body


async def in_pieces(lane: Lane, raw: bytes, cuts: list[int]) -> None:
    """Send bytes in pieces, as a transport does: nothing while reading is paused."""
    for start, end in pairwise([0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]):
        while not lane.transport.reading:
            await turns(1)
        lane.feed(raw[start:end])


class TestFraming:
    @given(
        st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=6),
        st.lists(st.one_of(st.integers(0, 4_000_000), st.integers(0, 400)), max_size=12),
    )
    @settings(max_examples=60, deadline=None)
    def test_requests_of_all_sizes_are_answered_in_order_for_any_split(self, kinds: list[int], cuts: list[int]) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await in_pieces(lane, b"".join(KINDS[kind][2] for kind in kinds), cuts)
            await turns(10 + 20 * len(kinds))

            assert lane.bodies == [answered(*KINDS[kind][:2]) for kind in kinds]
            assert not lane.transport.closed

        run(main)

    @pytest.mark.parametrize("at_once", [True, False])
    def test_a_large_body_after_another_is_received_directly_into_its_buffer(self, at_once: bool) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw)
            assert lane.transport.straight
            lane.feed(raw) if at_once else lane.feed(*[raw[at : at + 1000] for at in range(0, len(raw), 1000)])

            assert lane.own.bodies == [LARGE] * 2
            assert lane.transport.straight

        run(main)

    def test_only_the_head_of_the_next_large_request_is_read_into_the_scratch_buffer(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw)
            head = len(raw) - len(LARGE)

            assert len(lane.protocol.read_buffer()) == head
            lane.feed(raw[:head])
            assert len(lane.protocol.read_buffer()) == len(LARGE)

        run(main)

    @pytest.mark.parametrize("kind", [2, 5, 6, 7, 8])
    def test_reading_returns_to_the_usual_way_after_another_kind_of_request(self, kind: int) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own/a", LARGE), KINDS[kind][2])
            await turns()

            assert not lane.transport.straight
            lane.feed(request("/own/c", b"small"))
            assert lane.bodies[1:] == [answered(*KINDS[kind][:2]), b"own /own/c small"]

        run(main)

    def test_smaller_bodies_are_always_read_in_the_usual_way(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE[: LARGE_BYTES - 1])
            lane.feed(raw, raw[:300], raw[300:])

            assert lane.own.bodies == [LARGE[: LARGE_BYTES - 1]] * 2
            assert not lane.transport.straight

        run(main)

    def test_a_request_sent_before_the_answer_waits_and_reading_pauses(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            raw = request("/own/a", LARGE)
            lane.feed(raw, raw[:SCRATCH_BYTES], raw[SCRATCH_BYTES : SCRATCH_BYTES + 100])
            assert not lane.transport.reading
            lane.own.let_go()
            lane.feed(raw[SCRATCH_BYTES + 100 :])
            lane.own.let_go()

            assert lane.own.bodies == [LARGE] * 2
            assert lane.statuses == [200] * 2

        run(main)


class TestInterruptedBodies:
    def test_the_rest_of_a_timed_out_body_is_discarded(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw, raw[:100_000])
            lane.tick(12)
            assert lane.statuses == [200, 408]
            lane.feed(raw[100_000:], raw)

            assert lane.own.bodies == [LARGE]
            assert lane.statuses == [200, 408]
            lane.tick(REJECTED_LINGER_S + 2)
            assert lane.transport.aborted

        run(main)

    def test_a_large_body_sent_in_small_pieces_still_times_out(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw)
            for at in range(12):
                lane.feed(raw[at * 1000 : at * 1000 + 1000])
                lane.tick(1)

            assert lane.statuses == [200, 408]

        run(main)

    @pytest.mark.parametrize("sent", [50, 100_000])
    def test_a_client_that_disconnects_in_the_middle_of_a_body_is_removed(self, sent: int) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw, raw[:sent])
            lane.transport.lose(None)
            await turns()

            assert lane.own.bodies == [LARGE]
            assert not lane.shared.connections

        run(main)

    def test_a_client_that_half_closes_in_the_middle_of_a_body_is_closed(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw, raw[:100_000])

            assert not lane.transport.protocol.eof_received()

        run(main)

    def test_a_body_that_arrives_while_the_server_drains_is_answered(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw, raw[:100_000])
            lane.protocol.shutdown()
            lane.feed(raw[100_000:])
            await turns()

            assert lane.own.bodies == [LARGE] * 2
            assert lane.answers[1].closes
            assert lane.transport.over

        run(main)

    def test_a_rejected_large_body_is_not_kept(self) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own/a", LARGE)
            lane.feed(raw)
            lane.own.full = True
            lane.feed(raw)
            lane.own.full = False
            lane.feed(raw)

            assert lane.statuses == [200, 503, 200]
            assert lane.own.bodies == [LARGE] * 2

        run(main)


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_real_transports_receive_large_and_small_requests_in_any_order(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        own, config = Own(), make_config(App(), "httptools", idle_s=5, access_log=False)
        connection = type("Connection", (FastLane,), {"shared": HttpShared(own, LIMITS)})
        server = await asyncio.get_running_loop().create_server(
            lambda: connection(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        order = [0, 0, 2, 1, 1, 5, 0, 7, 3, 8, 3, 4]
        for kind in order:
            writer.write(KINDS[kind][2])
        writer.write(request("/own/z", b"", "connection: close"))
        raw = await reader.read(-1)
        writer.close()
        server.close()

        assert [answer.body for answer in read_answers(raw)] == [
            *[answered(*KINDS[kind][:2]) for kind in order], b"own /own/z ",
        ]  # fmt: skip

    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 30))
    finally:
        loop.close()
