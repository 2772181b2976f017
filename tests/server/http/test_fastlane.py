from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.registry import STOPPING_MESSAGE
from penstock.server.health import EXITING
from penstock.server.http.connection import DRAIN_LINGER_S, REJECTED_LINGER_S
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.listening.unread_answers import UnreadAnswers
from tests.server.http.lane import Lane, Own, in_chunks, request, run, turns

LIMITS = Limits(max_body_bytes=100_000, receive_timeout_s=10, idle_timeout_s=20, write_timeout_s=30)
GET = b"GET /app HTTP/1.1\r\nhost: x\r\n\r\n"

MIXED = [
    request("/own/a", b"one"),
    request("/app/b", b"two"),
    request("/own/c"),
    in_chunks("/own/d", b"th", b"ree"),
    in_chunks("/app/e", b"fo", b"ur"),
    b"GET /app/f HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\r\n" + request("/own/g", b"five", "expect: 100-continue"),
    request("/app/h", b"six", "expect: 100-continue"),
]
ANSWERED = [
    b"own /own/a one", b"app /app/b two", b"own /own/c ", b"own /own/d three", b"app /app/e four", b"app /app/f ",
    b"own /own/g five", b"app /app/h six",
]  # fmt: skip


class TestFraming:
    @given(st.lists(st.integers(0, len(MIXED) - 1), max_size=6), st.lists(st.integers(0, 800), max_size=12))
    @settings(max_examples=60)
    def test_requests_to_service_and_application_are_answered_in_order_for_any_split(
        self, kinds: list[int], cuts: list[int]
    ) -> None:
        async def main() -> None:
            raw = b"".join(MIXED[kind] for kind in kinds)
            edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
            lane = Lane(LIMITS)
            for start, end in pairwise(edges):
                lane.feed(raw[start:end])
            await turns(10 + 20 * len(kinds))

            assert lane.bodies == [ANSWERED[kind] for kind in kinds]
            assert not lane.transport.closed

        run(main)

    @pytest.mark.parametrize("kind", range(len(MIXED)))
    def test_a_request_may_be_split_at_every_byte(self, kind: int) -> None:
        async def main() -> None:
            raw = MIXED[kind] * 2
            for cut in range(len(raw)):
                lane = Lane(LIMITS)
                lane.feed(raw[:cut], raw[cut:])
                await turns(40)
                assert lane.bodies == [ANSWERED[kind]] * 2

        run(main)

    def test_requests_fed_byte_by_byte_are_all_answered(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(*[b"".join(MIXED)[i : i + 1] for i in range(sum(map(len, MIXED)))])

            assert lane.bodies == ANSWERED

        run(main)

    def test_a_repeated_request_head_is_cached_and_answered_the_same_way(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            for _ in range(3):
                lane.feed(request("/own/a", b"one"))

            assert lane.bodies == [b"own /own/a one"] * 3
            assert len(lane.shared.heads) == 1

        run(main)

    @pytest.mark.parametrize("body", [b"", b"one"])
    def test_a_request_with_a_cached_head_is_not_answered_before_its_last_byte(self, body: bytes) -> None:
        async def main() -> None:
            raw = request("/own/a", body)
            for cut in range(1, len(raw)):
                lane = Lane(LIMITS)
                await lane.fed(raw)
                lane.feed(raw[:cut])
                assert lane.bodies == [b"own /own/a " + body]
                lane.feed(raw[cut:])
                await turns(2)
                assert lane.bodies == [b"own /own/a " + body] * 2

        run(main)

    def test_a_body_received_two_bytes_at_a_time_is_assembled(self) -> None:
        async def main() -> None:
            lane, body = Lane(LIMITS), bytes(range(256)) * 20
            lane.feed(request("/own", body)[: -len(body)], *[body[i : i + 2] for i in range(0, len(body), 2)])

            assert lane.own.bodies == [body]

        run(main)

    @pytest.mark.parametrize("blanks", [" ", "\t", " \t "])
    def test_trailing_blanks_of_header_values_are_not_passed_to_uvicorn(self, blanks: str) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/app", b"body", f"x-some:\ta b{blanks}", f"x-none:{blanks}"))

            assert lane.bodies == [b"app /app body"]
            assert [lane.app.headers[name] for name in (b"x-some", b"x-none")] == [b"a b", b""]

        run(main)

    @pytest.mark.parametrize("line", ["expect: 100-continue", "Expect: 100-Continue"])
    def test_100_continue_is_sent_exactly_once_before_the_body(self, line: str) -> None:
        async def main() -> None:
            lane, raw = Lane(LIMITS), request("/own", b"body", line)
            for _ in range(2):
                lane.transport.written.clear()
                lane.feed(raw[:-4])
                assert bytes(lane.transport.written) == b"HTTP/1.1 100 Continue\r\n\r\n"
                lane.feed(raw[-4:])
                assert lane.transport.written.count(b"100 Continue") == 1

        run(main)

    @pytest.mark.parametrize("path", ["/own", "/app"])
    def test_100_continue_is_never_sent_to_an_http_1_0_client(self, path: str) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request(path, b"body", "expect: 100-continue", version="1.0"))
            await turns()

            assert b"100 Continue" not in lane.transport.written
            assert lane.statuses == [200]

        run(main)


class TestRejections:
    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
            (b"\x00", 400),
            (b"\rX", 400),
            (b"get / HTTP/1.1\r\n\r\n", 400),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
            (b"GET / HTTP/1.9\r\n\r\n", 400),
            (b"GET / HTTP/0.9\r\n\r\n", 505),
            (b"POST /own HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
            (b"POST /own HTTP/1.1\r\nexpect: tea\r\n\r\n", 417),
            (b"POST /own HTTP/1.1\r\ncontent-length: 100001\r\n\r\n", 400),
            (b"POST /app HTTP/1.1\r\ncontent-length: 100001\r\n\r\n", 400),
            (b"POST /own HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
            (b"POST /own HTTP/1.1\r\na: " + b"b" * 70_000, 431),
            (b"POST /own HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
            (b"A" * 70_000, 431),
            (in_chunks("/own", b"x" * 60_000, b"x" * 60_000), 400),
            (in_chunks("/app", b"x" * 60_000, b"x" * 60_000), 400),
            (b"POST /own HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
            (b"POST /app HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        ],
    )
    def test_an_invalid_request_is_answered_with_an_error_and_closes_the_connection(
        self, raw: bytes, status: int
    ) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            answers = await lane.fed(raw + request("/own", b"smuggled"))

            assert [answer.status for answer in answers] == [status]
            assert answers[0].closes
            assert set(orjson.loads(answers[0].body)) == {"error"}
            assert lane.own.bodies == []

        run(main)

    @pytest.mark.parametrize(
        "head",
        [
            b"POST /own HTTP/1.1\nhost: x\n\n",
            b"GET /app HTTP/1.1\nhost: x\n\n",
            b"POST /own HTTP/1.1\r\nhost: x\r\na: b\n",
            b"POST /own HTTP/1.1\r\nhost: x\n\r\n",
            b"\r\nPOST /own HTTP/1.1\r\nhost: x\r\n\n",
        ],
    )
    def test_a_line_that_ends_in_a_bare_lf_is_rejected_at_once(self, head: bytes) -> None:
        async def main() -> None:
            ways = [[head[:cut], head[cut:]] for cut in range(len(head))]
            for pieces in [*ways, [head[i : i + 1] for i in range(len(head))]]:
                lane = Lane(LIMITS)
                lane.feed(*pieces)
                assert lane.statuses == [400]

        run(main)

    def test_an_error_answer_follows_the_answers_to_earlier_requests(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/own/a") + GET + request("/own/b") + b"nonsense\r\n\r\n")

            assert lane.statuses == [200, 200, 200, 400]

        run(main)

    def test_a_head_rejected_for_its_content_length_is_rejected_again(self) -> None:
        async def main() -> None:
            shared = Lane(replace(LIMITS, max_body_bytes=10)).shared
            for _ in range(2):
                lane = Lane(shared=shared)
                lane.feed(request("/own", b"x" * 11))
                assert lane.statuses == [400]

        run(main)

    def test_bytes_sent_after_a_rejection_are_discarded_while_the_client_reads_its_answer(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(b"POST /own HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
            assert lane.transport.ended
            lane.feed(*[b"x" * 1000] * 1000)

            assert lane.statuses == [400]
            assert not lane.transport.closed
            assert not lane.protocol.eof_received()

        run(main)

    def test_a_connection_is_aborted_when_a_rejected_client_lingers_too_long(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(b"nonsense\r\n\r\n")
            lane.tick(REJECTED_LINGER_S)
            assert not lane.transport.closed
            lane.tick(2)

            assert lane.transport.aborted

        run(main)

    def test_a_connection_over_the_limit_is_answered_503_and_closed(self) -> None:
        async def main() -> None:
            first = Lane(replace(LIMITS, max_connections=1))
            second = Lane(shared=first.shared)
            await turns()
            assert (second.statuses, second.transport.closed) == ([503], True)
            first.transport.close()
            await turns()
            third = Lane(shared=first.shared)

            assert not third.transport.closed

        run(main)

    def test_a_request_that_becomes_invalid_midway_is_rejected_and_its_application_disconnected(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(b"POST /app HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"zz\r\n")

            assert lane.statuses == [400]
            assert lane.app.disconnects == 1

        run(main)


class TestConnections:
    @pytest.mark.parametrize(
        ("raw", "closes", "header"),
        [
            (request("/own"), False, None),
            (request("/own", b"", "connection: close"), True, "close"),
            (request("/own", b"body", "connection: close"), True, "close"),
            (request("/own", b"", version="1.0"), True, "close"),
            (request("/own", b"", "connection: keep-alive", version="1.0"), False, "keep-alive"),
            (request("/app"), False, None),
            (request("/app", b"", "connection: close"), True, "close"),
            (request("/app", b"", version="1.0"), True, "close"),
        ],
    )
    def test_a_connection_is_kept_open_or_closed_as_the_client_requests(
        self, raw: bytes, closes: bool, header: str | None
    ) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            [answer] = await lane.fed(raw)

            assert lane.transport.closed is closes
            assert answer.headers.get("connection") == header

        run(main)

    @pytest.mark.parametrize("parts", [(b"one", b"", b"0\r\n\r\n", b"two"), (b"one", b""), (b"", b""), (b"one",)])
    def test_an_http_1_0_answer_without_a_length_is_unchunked_and_ends_with_the_connection(
        self, parts: tuple[bytes, ...]
    ) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.app.parts = parts
            lane.feed(request("/app", b"", version="1.0"))
            await turns()
            head, _, body = bytes(lane.transport.written).partition(b"\r\n\r\n")

            assert b"transfer-encoding" not in head
            assert body == b"".join(parts)
            assert lane.transport.closed

        run(main)

    def test_a_request_after_connection_close_is_not_answered(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/own", b"", "connection: close") + request("/own"))

            assert lane.statuses == [200]

        run(main)

    def test_answers_have_the_default_fields_and_their_content_length(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own", b"x"))

            assert lane.answers[0].headers == {"date": "today", "content-type": "text/plain", "content-length": "10"}

        run(main)

    def test_a_large_answer_is_written_without_being_copied_behind_its_head(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            written: list[bytes] = []
            monkeypatch.setattr(lane.transport, "write", written.append)
            for answer in (bytes(64 << 10), bytes(100)):
                lane.feed(request("/own"))
                lane.own.let_go(answer)
                lane.feed(request("/own"))
                lane.own.waiting.pop(0).answer(200, answer, b"text/plain")
                large, write_count = len(answer) > 100, len(written)

                assert write_count == (4 if large else 2)
                assert [each is answer for each in written] == ([False, True] * 2 if large else [False] * 2)
                written.clear()

        run(main)

    @pytest.mark.parametrize("answer", [b"{}", b""])
    def test_a_second_answer_to_the_same_request_is_ignored(self, answer: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own"))
            lane.own.let_go(answer)
            lane.protocol.answer_ok(b"again")
            lane.protocol.answer(500, b"again", b"text/plain")

            assert lane.bodies == [answer]

        run(main)

    @pytest.mark.parametrize(
        "rest", [b"", b"POST /ow", request("/own", b"body")[:-1], request("/app", b"body")[:-1], in_chunks("/own")[:-1]]
    )
    def test_a_half_closed_client_receives_every_pending_answer(self, rest: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own") * 3 + rest)
            assert lane.protocol.eof_received()
            for _ in range(3):
                assert not lane.transport.closed
                lane.own.let_go()
            await turns()

            assert lane.statuses == [200] * 3
            assert lane.transport.closed
            assert lane.app.disconnects == (b"/app" in rest)

        run(main)

    def test_a_half_closed_client_receives_the_pending_answers_of_the_application(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(GET + request("/own"))
            assert lane.protocol.eof_received()
            await turns()

            assert lane.statuses == [200, 200]
            assert lane.answers[1].closes
            assert lane.transport.closed

        run(main)

    @pytest.mark.parametrize("raw", [b"", b"POST /ow", request("/own", b"body")[:-1], request("/app", b"body")[:-1]])
    def test_a_connection_half_closed_before_a_complete_request_is_closed(self, raw: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(raw)

            assert not lane.protocol.eof_received()

        run(main)

    def test_a_request_in_progress_is_cancelled_when_its_client_disconnects(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own") * 2)
            lane.transport.lose(ConnectionResetError())
            await turns()

            assert lane.own.abandoned == 1
            assert lane.own.bodies == [b""]
            assert lane.shared.connections == set()

        run(main)

    def test_nothing_is_cancelled_when_a_client_disconnects_between_requests(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/own"))
            lane.transport.lose(None)
            await turns()

            assert lane.own.abandoned == 0

        run(main)


class TestBackPressure:
    def test_reading_pauses_when_much_data_arrives_while_an_answer_is_pending(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own") + b"x" * 70_000)

            assert not lane.transport.reading

        run(main)

    def test_reading_pauses_when_much_data_arrives_while_an_application_answer_is_pending(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.app.open.clear()
            lane.feed(GET, request("/own") * 2000)
            # uvicorn resumes reading when its application waits for a disconnect
            await turns()
            lane.feed(request("/own"))
            paused = not lane.transport.reading
            lane.app.open.set()
            await turns(100)

            assert paused
            assert lane.statuses == [200] * 2002
            assert lane.transport.reading

        run(main)

    def test_no_request_is_started_while_the_client_does_not_read(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own"))
            lane.protocol.pause_writing()
            lane.feed(request("/own"), request("/own"), GET)
            assert lane.statuses == [200]
            lane.protocol.resume_writing()
            await turns()

            assert lane.statuses == [200] * 4

        run(main)

    def test_reading_pauses_when_much_data_arrives_while_the_client_does_not_read(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.protocol.pause_writing()
            lane.feed(request("/own") * 2000)
            assert not lane.transport.reading
            lane.protocol.resume_writing()
            await turns(80)

            assert lane.statuses == [200] * 2000
            assert lane.transport.reading

        run(main)

    @pytest.mark.parametrize("half_closed", [False, True])
    def test_many_pipelined_requests_yield_to_other_connections(self, half_closed: bool) -> None:
        async def main() -> None:
            lane = Lane()
            lane.feed(request("/own", b"x") * 1000)
            at_once = len(lane.own.bodies)
            assert (0 < at_once < 100, lane.transport.reading) == (True, False)
            if half_closed:
                assert lane.protocol.eof_received()
            await turns(1)
            assert at_once < len(lane.own.bodies) < 200
            await turns(60)

            assert len(lane.own.bodies) == len(lane.answers) == 1000
            assert (lane.transport.reading, lane.transport.closed) == (True, half_closed)

        run(main)

    @pytest.mark.parametrize("half_closed", [False, True])
    @pytest.mark.parametrize("path", ["/own", "/app"])
    def test_a_body_in_many_small_chunks_yields_to_other_connections(self, path: str, *, half_closed: bool) -> None:
        async def main() -> None:
            lane = Lane()
            lane.feed(in_chunks(path, *[b"%d" % (number % 10) for number in range(20_000)]))
            assert not lane.transport.reading
            if half_closed:
                assert lane.protocol.eof_received()
            await turns(2)
            assert not lane.transport.reading
            assert lane.answers == []
            await turns(20)

            (answer,) = lane.answers
            if path == "/app":
                assert answer.body == b"app /app " + b"0123456789" * 2000
            else:
                assert lane.own.bodies == [b"0123456789" * 2000]
            assert (lane.transport.reading, lane.transport.closed) == (True, half_closed)

        run(main)

    def test_time_that_small_chunks_wait_for_their_turn_does_not_count_as_receive_time(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(in_chunks("/own", *[b"x"] * 20_000))
            lane.tick(1)
            lane.tick(1000)
            await turns(20)

            assert lane.statuses == [200]

        run(main)

    def test_a_head_larger_than_the_read_ahead_limit_is_received(self) -> None:
        async def main() -> None:
            lane = Lane(replace(LIMITS, max_header_bytes=200_000))
            lane.feed(b"POST /own HTTP/1.1\r\na: ", b"b" * 100_000, b"\r\n\r\n")

            assert lane.statuses == [200]

        run(main)

    def test_requests_sent_before_a_half_close_are_answered_when_the_client_reads_again(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.protocol.pause_writing()
            lane.feed(request("/own") * 3)
            assert lane.protocol.eof_received()
            lane.protocol.resume_writing()

            assert lane.statuses == [200] * 3
            assert lane.transport.closed

        run(main)


class Later:
    """Stands in for a loop's `call_later`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> None:
        self.calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(loop, "call_later", lambda *call: self.calls.append(call))

    def let_pass(self) -> float:
        """Make the next scheduled call; return its delay."""
        delay, call, *args = self.calls.pop(0)
        call(*args)
        return float(delay)


class TestFullQueue:
    def test_a_large_body_is_discarded_as_it_is_read_and_rejected_at_its_end(self) -> None:
        async def main() -> None:
            lane = Lane(own=Own(full=True))
            tracemalloc.start()
            lane.feed(b"POST /own HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n")
            for _ in range(99):
                lane.feed(bytes(100_000))
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()

            assert held < 200_000
            assert lane.answers == []
            assert (await lane.fed(bytes(100_000)))[0].status == 503
            assert lane.own.bodies == []

        run(main)

    def test_a_connection_serves_the_next_request_after_a_rejected_large_body(self) -> None:
        async def main() -> None:
            lane = Lane(own=Own(full=True))
            raw = request("/own", bytes(70_000))
            lane.feed(raw)
            lane.own.full = False
            lane.feed(raw, raw[:90], raw[90:])
            await turns()

            assert lane.statuses == [503, 200, 200]
            assert [len(body) for body in lane.own.bodies] == [70_000] * 2
            assert not lane.transport.closed

        run(main)

    def test_a_large_body_with_a_cached_head_is_discarded_as_it_is_read(self) -> None:
        async def main() -> None:
            lane, raw = Lane(), request("/own", bytes(1_000_000))
            lane.feed(raw)
            lane.own.full = True
            tracemalloc.start()
            lane.feed(raw[:100_000], *[bytes(100_000)] * 9)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            lane.feed(raw[1_000_000:])

            assert held < 200_000
            assert lane.statuses == [200, 503]
            assert len(lane.own.bodies) == 1

        run(main)

    @pytest.mark.parametrize("full", [False, True])
    def test_a_large_body_is_accepted_or_rejected_when_its_head_arrives(self, full: bool) -> None:
        async def main() -> None:
            lane = Lane(own=Own(full=full))
            raw = request("/own", bytes(70_000))
            lane.feed(raw[:1000])
            lane.own.full = not full
            lane.feed(raw[1000:2000], raw[2000:])
            await turns()

            assert lane.statuses == [503 if full else 200]

        run(main)

    def test_a_small_body_is_handed_on_even_if_the_queue_is_full(self) -> None:
        async def main() -> None:
            lane = Lane(own=Own(full=True))

            assert [answer.status for answer in await lane.fed(request("/own", bytes(60_000)))] == [200]

        run(main)


class TestTimeouts:
    @pytest.mark.parametrize(
        "raw",
        [
            b"P",
            b"POST /own HTTP/1.1\r\n",
            request("/own", b"body")[:-1],
            in_chunks("/own", b"body")[:-1],
            in_chunks("/own", b"body")[:-12],
            request("/app", b"body")[:-1],
            in_chunks("/app", b"body")[:-1],
        ],
    )
    def test_a_request_that_stalls_is_answered_408(self, raw: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(raw)
            lane.tick(LIMITS.receive_timeout_s)
            assert lane.statuses == []
            lane.tick(2)

            assert lane.statuses == [408]
            assert orjson.loads(lane.bodies[0]) == {"error": "request was not received within 10 s"}

        run(main)

    @pytest.mark.parametrize("make", [request, in_chunks])
    @pytest.mark.parametrize("path", ["/own", "/app"])
    def test_the_largest_incomplete_requests_are_rejected_while_all_together_hold_too_much(
        self, path: str, make: Callable[[str, bytes], bytes]
    ) -> None:
        async def main() -> None:
            first = Lane(replace(LIMITS, max_receive_bytes=LIMITS.max_body_bytes))
            lanes = [first, *(Lane(own=first.own, shared=first.shared, app=first.app) for _ in range(3))]
            sizes = [30_000, 45_000, 20_000, 4]
            for lane, size in zip(lanes, sizes, strict=True):
                await lane.fed(make(path, bytes(90_000))[: -90_000 + size])
            first.tick(1)
            assert [lane.statuses for lane in lanes] == [[], [], [], []]

            await lanes[2].fed(bytes(10_000))
            first.tick(1)

            assert [lane.statuses for lane in lanes] == [[], [503], [], []]
            assert "--http-receive-memory-bytes" in orjson.loads(lanes[1].bodies[0])["error"]
            assert lanes[1].protocol.incomplete_bytes == 0

        run(main)

    def test_requests_that_are_rejected_early_hold_nothing(self) -> None:
        async def main() -> None:
            first = Lane(replace(LIMITS, max_receive_bytes=LIMITS.max_body_bytes), own=Own(full=True))
            lanes = [first, Lane(own=first.own, shared=first.shared)]
            for lane in lanes:
                await lane.fed(request("/own", bytes(90_000))[:-1])
            first.tick(1)

            assert [lane.protocol.incomplete_bytes for lane in lanes] == [0, 0]
            assert [lane.statuses for lane in lanes] == [[], []]

        run(main)

    def test_the_receive_timeout_of_a_request_with_a_cached_head_starts_at_its_own_beginning(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/own", b"body"))
            lane.tick(LIMITS.receive_timeout_s - 1)
            lane.feed(request("/own", b"body")[:-1])
            lane.tick(LIMITS.receive_timeout_s)
            assert lane.statuses == [200]
            lane.tick(2)

            assert lane.statuses == [200, 408]

        run(main)

    def test_a_request_sent_one_byte_at_a_time_still_times_out(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            for _ in range(12):
                lane.feed(b"A")
                lane.tick(1)

            assert lane.statuses == [408]

        run(main)

    def test_an_idle_connection_is_closed_after_the_idle_timeout(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(request("/own"))
            lane.tick(LIMITS.idle_timeout_s)
            assert not lane.transport.closed
            lane.tick(2)

            assert lane.statuses == [200]
            assert lane.transport.closed

        run(main)

    def test_requests_keep_a_connection_open(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            for _ in range(5):
                await lane.fed(request("/own") + GET)
                lane.tick(LIMITS.idle_timeout_s - 1)

            assert not lane.transport.closed

        run(main)

    @pytest.mark.parametrize("raw", [request("/own"), GET])
    def test_an_answer_may_take_any_amount_of_time(self, raw: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.app.open.clear()
            await lane.fed(raw)
            lane.tick(1000)

            assert not lane.transport.closed

        run(main)

    def test_a_client_that_reads_nothing_of_its_answer_is_aborted(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own"))
            lane.transport.unsent = 1_000_000
            lane.protocol.pause_writing()
            lane.tick(LIMITS.write_timeout_s)
            assert not lane.transport.closed
            lane.tick(3)

            assert lane.transport.aborted

        run(main)

    @pytest.mark.parametrize("end", ["taken", "lost"])
    def test_unread_bytes_are_counted_until_the_client_reads_or_disconnects(self, end: str) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own"))
            lane.transport.unsent = 1_000_000
            lane.protocol.pause_writing()
            assert lane.shared.unread.held_bytes == 1_000_000
            if end == "taken":
                lane.protocol.resume_writing()
            else:
                lane.transport.lose(None)
                await turns()

            assert lane.shared.unread.held_bytes == 0

        run(main)

    def test_a_client_is_aborted_when_unread_answers_exceed_the_limit_for_all_connections(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.shared.unread = UnreadAnswers(999_999)
            lane.feed(request("/own"))
            lane.transport.unsent = 1_000_000
            lane.protocol.pause_writing()
            await turns()

            assert lane.transport.aborted
            assert lane.shared.unread.held_bytes == 0

        run(main)

    def test_a_client_that_reads_its_answer_slowly_is_not_aborted(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(request("/own"))
            lane.transport.unsent = 1_000_000
            lane.protocol.pause_writing()
            for _ in range(10):
                lane.tick(LIMITS.write_timeout_s - 5)
                lane.transport.unsent -= 1

            assert not lane.transport.closed

        run(main)

    def test_a_closing_connection_whose_client_reads_nothing_is_aborted(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(b"nonsense\r\n\r\n")
            lane.transport.unsent = 1000
            lane.tick(LIMITS.write_timeout_s)
            assert not lane.transport.closed
            lane.tick(3)

            assert lane.transport.aborted

        run(main)

    def test_a_connection_that_fails_in_its_tick_does_not_suspend_the_limits_of_others(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def main() -> None:
            broken = Lane(LIMITS)
            lanes = [broken, *(Lane(shared=broken.shared) for _ in range(3))]
            lost = Lane(shared=broken.shared)
            monkeypatch.setattr(broken.protocol, "tick", fail)
            monkeypatch.setattr(lost.protocol, "tick", fail)
            monkeypatch.setattr(lost.protocol, "shed", lambda: fail(0))
            broken.tick(LIMITS.idle_timeout_s + 2)

            assert [lane.transport.closed for lane in lanes] == [True] * 4
            assert "not of this time" in caplog.text

        def fail(_: float) -> None:
            raise ZeroDivisionError("not of this time")

        run(main)


def late_lane(before: bytes = b"") -> Lane:
    """A connection accepted while its port drains; another connection was sent `before` earlier."""
    own = Own()
    shared = HttpShared(own, LIMITS)
    Lane(own=own, shared=shared).feed(before)
    shared.draining = True
    return Lane(own=own, shared=shared)


def test_a_lost_connection_is_removed_even_if_abandoning_its_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        lane = Lane(LIMITS, Own(hold=True))
        lane.feed(request("/own"))
        monkeypatch.setattr(lane.own, "abandon", fail)
        with pytest.raises(ZeroDivisionError):
            lane.protocol.connection_lost(None)

        assert (lane.state.connections, lane.shared.connections) == (set(), set())

    def fail(_: object) -> None:
        raise ZeroDivisionError("it goes on")

    run(main)


class TestDraining:
    def test_a_request_in_progress_is_answered_and_the_connection_closed(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own"))
            lane.protocol.shutdown()
            assert not lane.transport.closed
            lane.own.let_go()

            assert lane.answers[0].closes
            assert lane.transport.ended

        run(main)

    def test_a_request_sent_after_the_last_answer_does_not_reset_the_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Closing a socket with unread bytes resets the connection, and its client may lose the answer."""

        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own"))
            lane.protocol.shutdown()
            later: list[tuple[float, Callable[[], None]]] = []
            monkeypatch.setattr(lane.protocol.loop, "call_later", lambda *call: later.append(call))
            lane.own.let_go()
            lane.feed(request("/own"))
            [(delay, close)] = later

            assert (lane.transport.ended, lane.transport.closed) == (True, False)
            assert (lane.statuses, len(lane.own.bodies), delay) == ([200], 1, DRAIN_LINGER_S)
            close()
            assert lane.transport.closed

        run(main)

    def test_a_client_that_sent_connection_close_is_closed_without_lingering(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
            lane.protocol.shutdown()
            lane.own.let_go()

            assert lane.transport.closed

        run(main)

    @pytest.mark.parametrize("rest", [request("/own"), GET, request("/own") + GET])
    def test_pipelined_requests_that_have_arrived_are_answered(self, rest: bytes) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own") + rest)
            lane.protocol.shutdown()
            await turns()
            while lane.own.waiting:
                lane.own.let_go()
                await turns()

            assert lane.statuses == [200] * (1 + rest.count(b"HTTP/1.1"))
            assert lane.transport.over

        run(main)

    def test_an_application_request_in_progress_is_answered_and_the_connection_closed(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.app.open.clear()
            await lane.fed(GET)
            lane.protocol.shutdown()
            lane.app.open.set()
            await turns()

            assert lane.answers[0].closes
            assert lane.transport.closed

        run(main)

    @pytest.mark.parametrize("more", [request("/own"), GET])
    def test_one_more_request_is_answered_after_an_answer_that_had_begun(self, more: bytes) -> None:
        """The answer that had begun announced that the connection stays open."""

        async def main() -> None:
            lane = Lane(LIMITS)
            lane.app.parts = (b"first", b"last")
            lane.app.on.clear()
            await lane.fed(GET)
            lane.protocol.shutdown()
            lane.app.on.set()
            await turns()
            assert not lane.transport.closed

            await lane.fed(more)

            assert lane.statuses == [200] * 2
            assert [answer.closes for answer in lane.answers] == [False, True]
            assert lane.transport.over

        run(main)

    def test_a_connection_is_closed_if_no_request_follows_an_answer_that_had_begun(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.app.parts = (b"first", b"last")
            lane.app.on.clear()
            await lane.fed(GET)
            lane.protocol.shutdown()
            clock = Later(monkeypatch, lane.protocol.loop)
            lane.app.on.set()
            await turns()
            del clock.calls[:-1]

            assert clock.let_pass() == DRAIN_LINGER_S
            clock.let_pass()
            assert lane.transport.closed

        run(main)

    @pytest.mark.parametrize("raw", [request("/own", b"body"), request("/app", b"body"), in_chunks("/own", b"body")])
    def test_a_partly_received_request_is_answered(self, raw: bytes) -> None:
        async def main() -> None:
            for cut in (1, 20, len(raw) - 1):
                lane = Lane(LIMITS)
                lane.feed(raw[:cut])
                lane.protocol.shutdown()
                await lane.fed(raw[cut:])

                assert lane.statuses == [200]
                assert lane.transport.over

        run(main)

    def test_an_idle_connection_is_closed_after_the_linger_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            clock = Later(monkeypatch, lane.protocol.loop)
            lane.protocol.shutdown()
            assert not lane.transport.closed

            assert clock.let_pass() == DRAIN_LINGER_S
            clock.let_pass()
            assert lane.transport.closed

        run(main)

    def test_a_client_still_reading_an_answer_may_send_another_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its answer announced that the connection stays open, so the next request must not find it closed."""

        async def main() -> None:
            lane = Lane(LIMITS)
            clock = Later(monkeypatch, lane.protocol.loop)
            lane.feed(request("/own"))
            lane.protocol.pause_writing()
            lane.protocol.shutdown()
            for _ in range(4):
                assert clock.let_pass() == DRAIN_LINGER_S
            lane.protocol.resume_writing()
            clock.let_pass()
            assert not lane.transport.closed
            lane.feed(request("/own"))

            assert [answer.closes for answer in lane.answers] == [False, True]
            assert lane.transport.over

        run(main)

    def test_a_request_received_while_the_loop_was_busy_is_read_before_an_idle_close(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A loop runs due timers before it reads."""

        async def main() -> None:
            lane = Lane(LIMITS)
            clock = Later(monkeypatch, lane.protocol.loop)
            lane.protocol.shutdown()
            clock.let_pass()
            lane.feed(request("/own"))
            clock.let_pass()

            assert lane.statuses == [200]
            assert lane.answers[0].closes

        run(main)

    @pytest.mark.parametrize(
        ("raw", "text"),
        [
            (request("/own", b"body"), STOPPING_MESSAGE), (in_chunks("/own", b"body"), STOPPING_MESSAGE),
            (b"GET /own HTTP/1.1\r\nhost: x\r\n\r\n", STOPPING_MESSAGE), (request("/app", b"body"), EXITING),
        ],
    )  # fmt: skip
    def test_requests_on_a_connection_accepted_while_draining_are_answered_503(self, raw: bytes, text: str) -> None:
        async def main() -> None:
            for cut in (1, 20, len(raw)):
                lane = late_lane(raw)
                [answer] = await lane.fed(raw[:cut], raw[cut:])

                assert (answer.status, orjson.loads(answer.body)) == (503, {"error": text})
                assert (answer.closes, answer.headers["retry-after"]) == (True, "1")
                assert len(lane.own.bodies) == raw.count(b"/own")

        run(main)

    @pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
    def test_read_only_requests_on_a_connection_accepted_while_draining_are_answered(self, method: bytes) -> None:
        async def main() -> None:
            lane = late_lane()
            await lane.fed(GET.replace(b"GET", method))

            assert lane.transport.written.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in lane.transport.written
            assert lane.transport.closed

        run(main)

    def test_a_silent_connection_accepted_while_draining_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            clock = Later(monkeypatch, asyncio.get_running_loop())
            lane = late_lane()

            assert clock.let_pass() == DRAIN_LINGER_S
            clock.let_pass()
            assert lane.transport.closed

        run(main)

    def test_a_rejected_client_does_not_delay_the_shutdown(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.feed(b"nonsense\r\n\r\n")
            lane.protocol.shutdown()

            assert lane.transport.closed

        run(main)


class TestMemory:
    def test_heads_that_are_unclaimed_large_or_expect_continue_are_not_cached(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            await lane.fed(GET, request("/own", b"", "expect: 100-continue"), request("/own", b"", "a: " + "b" * 3000))

            assert lane.statuses == [200] * 3
            assert lane.shared.heads == {}

        run(main)

    def test_the_number_of_cached_heads_is_bounded(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            for number in range(3000):
                lane.feed(request("/own", b"", f"x-request-id: {number}"))

            assert len(lane.statuses) == 3000
            assert len(lane.shared.heads) <= 1024

        run(main)

    def test_arbitrary_bytes_never_raise_an_exception(self) -> None:
        @given(st.lists(st.one_of(st.binary(max_size=50), st.sampled_from(MIXED)), max_size=5))
        @settings(max_examples=60)
        def check(pieces: list[bytes]) -> None:
            async def main() -> None:
                lane = Lane(LIMITS)
                lane.feed(*pieces)
                await turns(40)

                assert set(lane.statuses) <= {200, 400, 431, 505}

            run(main)

        check()


class TestDialectAnswers:
    def test_an_invalid_request_is_answered_in_the_error_format_of_the_dialect(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS)
            lane.shared.format_error = lambda error: (413, b"text/plain", type(error).__name__.encode())
            [answer] = await lane.fed(request("/own", b"").replace(b"content-length: 0", b"content-length: 100001"))

            assert (answer.status, answer.headers["content-type"]) == (413, "text/plain")
            assert (answer.body, answer.closes) == (b"TooLargeError", True)

        run(main)

    def test_an_answer_may_have_no_content_type(self) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own"))
            lane.own.waiting.pop().answer(204, b"", b"", b"x-one: 1\r\n")
            [answer] = lane.answers

            assert (answer.status, answer.body) == (204, b"")
            assert (answer.headers["x-one"], "content-type" in answer.headers) == ("1", False)

        run(main)

    @pytest.mark.parametrize("status", [0, 100, 199, 1000])
    def test_an_informational_or_unknown_status_is_not_sent_as_an_answer(self, status: int) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own"))
            with pytest.raises(ValueError, match=f"invalid answer status {status}"):
                lane.own.waiting[0].answer(status, b"", b"")
            lane.own.waiting.pop().answer(500, b"", b"")

            assert lane.statuses == [500]

        run(main)

    @pytest.mark.parametrize("status", [204, 304])
    def test_a_204_or_304_answer_has_no_body_and_no_content_length(self, status: int) -> None:
        async def main() -> None:
            lane = Lane(LIMITS, Own(hold=True))
            lane.feed(request("/own") * 2)
            lane.own.waiting.pop().answer(status, b"what no client expects", b"")
            lane.own.waiting.pop().answer(200, b"next", b"")
            answer, following = lane.answers

            assert (answer.status, answer.body, "content-length" in answer.headers) == (status, b"", False)
            assert (following.status, following.body) == (200, b"next")

        run(main)
