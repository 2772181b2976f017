"""What the Services of the fast lane share: where compressed bodies are decompressed, and how many in parallel."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.server import answering
from penstock.server.answering import LARGE_BYTES, LargeJsonReader, answer_compressed, read_compressed
from penstock.server.http.coding import compress
from penstock.server.http.head import HttpError
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from tests.server.http.lane import Lane, Own, request, run, turns

LIMITS = Limits(max_body_bytes=1 << 20)
BOMB = compress(bytes(1 << 20), b"gzip")


def test_a_small_body_that_expands_to_a_large_one_is_decompressed_on_a_thread() -> None:
    assert len(BOMB) < LARGE_BYTES
    threads = [
        asyncio.run(read_compressed(body, b"gzip", LIMITS, lambda plain: threading.current_thread()))
        for body in (compress(b"small", b"gzip"), BOMB)
    ]

    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_a_body_stays_compressed_while_it_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def decompress(body: bytes, coding: bytes, limits: Limits) -> bytes:
        steps.append("unpacked")
        return bytes(1 << 20)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        monkeypatch.setattr(answering, "decompress", decompress)
        await asyncio.gather(
            *(read_compressed(BOMB, b"gzip", LIMITS, lambda plain: steps.append("read")) for _ in range(3))
        )

    asyncio.run(main())
    assert steps == ["unpacked", "read"] * 3


@pytest.mark.parametrize(("size", "at_once"), [(1 << 20, 1), (None, 1), (LARGE_BYTES, 3)])
def test_large_texts_are_read_one_after_another(size: int | None, at_once: int) -> None:
    texts, reading, most, all_there = LargeJsonReader(), [0], [0], threading.Barrier(at_once)
    lock = threading.Lock()

    def read() -> None:
        with lock:
            reading[0] += 1
            most[0] = max(most[0], reading[0])
        all_there.wait(10)
        with lock:
            reading[0] -= 1

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        await asyncio.gather(*(texts.read(size, read) for _ in range(3)))

    asyncio.run(main())
    assert most == [at_once]


def test_compressed_bodies_that_expand_to_large_texts_are_read_one_after_another() -> None:
    texts = LargeJsonReader()

    async def main() -> set[threading.Thread]:
        calls = (read_compressed(BOMB, b"gzip", LIMITS, lambda _: threading.current_thread(), texts) for _ in range(5))
        return set(await asyncio.gather(*calls))

    assert [thread.name for thread in asyncio.run(main())] == ["penstock-json_0"]


@pytest.mark.parametrize(
    "body", [b"junk", BOMB[:-9], compress(bytes(300), b"gzip")[:-1], compress(bytes((1 << 20) + 1), b"gzip")]
)
def test_a_corrupt_or_too_large_compressed_body_is_rejected(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        asyncio.run(read_compressed(body, b"gzip", LIMITS, bytes))
    assert caught.value.status == 400


class TestLargeAnswers:
    """Large answers that a thread compresses."""

    def lane_with_request(self, shared: HttpShared, size: int) -> Lane:
        """Return a connection whose answer of this size waits for a thread."""
        lane = Lane(shared=shared)
        lane.feed(request("/own"))
        answer_compressed(lane.protocol, bytes(size), b"text/plain", b"x-a: b\r\n", b"gzip")
        return lane

    def test_large_answers_are_counted_while_waiting_and_sent_uncompressed_over_the_limit(self) -> None:
        async def main() -> None:
            free, threads = threading.Event(), ThreadPoolExecutor(1)
            asyncio.get_running_loop().set_default_executor(threads)
            threads.submit(free.wait)
            shared = HttpShared(Own(hold=True), LIMITS)
            shared.unread.max_bytes = 1_000_000
            try:
                first, second = self.lane_with_request(shared, 400_000), self.lane_with_request(shared, 300_000)
                await turns()
                assert (first.answers, second.answers, shared.unread.held_bytes) == ([], [], 700_000)

                third = self.lane_with_request(shared, 310_000)
                await turns()
                (answer,) = first.answers
                assert (len(answer.body), "content-encoding" in answer.headers) == (400_000, False)
                assert (second.answers, third.answers, shared.unread.held_bytes) == ([], [], 610_000)
            finally:
                free.set()  # otherwise the end of the test would wait for the thread
            await asyncio.get_running_loop().run_in_executor(None, int)
            await turns()
            for lane, size in ((second, 300_000), (third, 310_000)):
                (answer,) = lane.answers
                assert (answer.body, answer.headers["x-a"]) == (compress(bytes(size), b"gzip"), "b")
                assert answer.headers["content-encoding"] == "gzip"
            assert len(first.answers) == 1
            assert shared.unread.held_bytes == 0

        run(main)

    def test_large_answers_are_sent_uncompressed_when_no_thread_can_be_started(self) -> None:
        async def main() -> None:
            threads = ThreadPoolExecutor(1)
            asyncio.get_running_loop().set_default_executor(threads)
            threads.shutdown()
            shared = HttpShared(Own(hold=True), LIMITS)
            (answer,) = self.lane_with_request(shared, 300_000).answers

            assert (len(answer.body), "content-encoding" in answer.headers) == (300_000, False)
            assert shared.unread.held_bytes == 0

        run(main)
