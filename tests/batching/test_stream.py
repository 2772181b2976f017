"""AnswerStream: the answers of one request that were received but not yet read."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching import stream
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.stream import MAX_TAKEN_PER_TURN, AnswerStream, StreamedAnswer, answer_bytes


def answer_of(value: float, count: int = 1) -> StreamedAnswer:
    return StreamedAnswer({"y": np.full(count, value, np.float32)})


class Counted(Model):
    """The counters of a model."""

    def __init__(self) -> None:
        self.unread_bytes = 0
        self.streams = set[AnswerStream]()


def ended(error: InferError | None = None) -> list[InferRequest]:
    request = InferRequest.__new__(InferRequest)
    request.error = error
    return [request]


def test_answers_are_read_in_order_and_then_the_stream_ends() -> None:
    async def scene() -> None:
        answers = AnswerStream()
        for value in (1, 2):
            answers.send(answer_of(value))
        answers.deliver(ended())
        found = [await answers.next() for _ in range(3)]
        assert [float(each.outputs["y"][0]) for each in found if each is not None] == [1, 2]
        assert found[2] is None

    asyncio.run(scene())


def test_a_waiting_reader_is_woken_by_an_answer() -> None:
    async def scene() -> None:
        answers = AnswerStream()
        waiting = asyncio.ensure_future(answers.next())
        await asyncio.sleep(0)
        answers.send(answer_of(3))
        found = await waiting
        assert found is not None
        assert found.outputs["y"].tolist() == [3]

    asyncio.run(scene())


def test_an_error_is_raised_after_the_answers_before_it_were_read() -> None:
    async def scene() -> None:
        answers = AnswerStream()
        answers.send(answer_of(1))
        answers.deliver(ended(InferError(Code.NOT_READY, "died")))
        assert await answers.next() is not None
        with pytest.raises(InferError, match="died"):
            await answers.next()

    asyncio.run(scene())


def test_reading_many_available_answers_yields_to_the_event_loop() -> None:
    async def scene() -> int:
        answers, turns = AnswerStream(), 0
        for value in range(1000):
            answers.send(answer_of(value))
        answers.deliver(ended())

        async def take_all() -> None:
            while await answers.next() is not None:
                pass

        taking = asyncio.ensure_future(take_all())
        while not taking.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scene()) > 1000 // MAX_TAKEN_PER_TURN


def test_has_next_reports_whether_an_answer_is_available_without_a_loop_turn() -> None:
    async def scene() -> None:
        answers, availability = AnswerStream(), []
        for value in range(MAX_TAKEN_PER_TURN + 2):
            answers.send(answer_of(value))
        for _ in range(MAX_TAKEN_PER_TURN + 2):
            await answers.next()
            availability.append(answers.has_next)
        assert availability == [*[True] * (MAX_TAKEN_PER_TURN - 2), False, True, True, False]

    asyncio.run(scene())


def test_unread_answers_are_limited_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD_BYTES", 100)

    async def scene() -> None:
        answers = AnswerStream()
        answers.send(answer_of(1, 50))
        with pytest.raises(InferError, match="does not read them"):
            answers.send(answer_of(1))
        await answers.next()
        answers.send(answer_of(1))

    asyncio.run(scene())


def test_the_size_of_an_answer_is_the_memory_it_takes() -> None:
    def small() -> StreamedAnswer:
        return StreamedAnswer(
            {"y": np.frombuffer(bytearray(4), np.float32)}, parameters=None, infer_ns=time.monotonic_ns()
        )

    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        answers = [small() for _ in range(10_000)]
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert allocated <= sum(map(answer_bytes, answers)) <= 1.5 * allocated


def test_the_size_of_an_answer_includes_its_strings() -> None:
    texts = StreamedAnswer({"y": np.array([b"x" * 100_000, b"y" * 50_000], np.object_)})

    assert 150_000 < answer_bytes(texts) < 152_000


def test_answers_received_after_the_stream_was_closed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD_BYTES", 1)

    async def scene() -> None:
        answers = AnswerStream()
        answers.send(answer_of(1))
        answers.close()
        for _ in range(3):
            answers.send(answer_of(2))
        answers.deliver(ended())
        assert await answers.next() is None

    asyncio.run(scene())


def test_leaving_a_stream_releases_its_unread_answers() -> None:
    class Engine:
        def submit(self, request: InferRequest) -> None:
            for value in range(5):
                request.answer_sink.send(answer_of(value))

        def cancel(self, request: InferRequest) -> None:
            request.answer_sink.send(answer_of(5))

    async def scene() -> None:
        request = InferRequest.__new__(InferRequest)
        model = request.model = Counted()
        with stream.open_stream(Engine(), request) as answers:
            await answers.next()
            assert model.unread_bytes == 4 * answer_bytes(answer_of(0))
        assert model.unread_bytes == 0
        assert not model.streams

    asyncio.run(scene())


def test_a_rejected_request_leaves_no_stream_on_the_model() -> None:
    class Full:
        def submit(self, request: InferRequest) -> None:
            raise InferError(Code.OVERLOADED, "full")

        def cancel(self, request: InferRequest) -> None:
            raise AssertionError("what was not taken in is not cancelled")

    async def scene() -> None:
        request = InferRequest.__new__(InferRequest)
        model = request.model = Counted()
        with pytest.raises(InferError, match="full"), stream.open_stream(Full(), request):
            pass
        assert not model.streams

    asyncio.run(scene())


def test_a_stream_without_unread_answers_accepts_one_however_much_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_MODEL_UNREAD_BYTES", answer_bytes(answer_of(0, 1000)))

    async def scene() -> None:
        model = Counted()
        slow, prompt = AnswerStream(model), AnswerStream(model)
        slow.send(answer_of(1, 2000))  # more than all may, in one
        with pytest.raises(InferError):
            slow.send(answer_of(2))
        for value in range(3):
            prompt.send(answer_of(value, 2000))
            assert await prompt.next() is not None

    asyncio.run(scene())


def test_a_stream_that_is_read_promptly_does_not_fail_because_of_unread_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_MODEL_UNREAD_BYTES", 100 * answer_bytes(answer_of(0)))

    async def scene() -> None:
        model = Counted()
        prompt, *slow = (AnswerStream(model) for _ in range(5))
        failed = set[AnswerStream]()
        for value in range(100):
            for each in slow:
                try:
                    each.send(answer_of(value))
                except InferError:
                    failed.add(each)
            for _ in range(3):
                prompt.send(answer_of(value))
            assert [await prompt.next() is not None for _ in range(3)] == [True] * 3
            assert model.unread_bytes <= 100 * answer_bytes(answer_of(0))
        assert failed == set(slow)

    asyncio.run(scene())


def test_the_stream_with_the_most_unread_answers_fails_and_its_answers_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MAX_MODEL_UNREAD_BYTES", 10 * answer_bytes(answer_of(0)))

    async def scene() -> None:
        model = Counted()
        slow, others = AnswerStream(model), AnswerStream(model)
        for _ in range(6):
            slow.send(answer_of(1))
        for _ in range(5):
            others.send(answer_of(2))
        assert model.unread_bytes == 5 * answer_bytes(answer_of(0))
        with pytest.raises(InferError, match="does not read them"):
            slow.send(answer_of(1))
        with pytest.raises(InferError, match="does not read them"):
            await slow.next()
        assert await others.next() is not None

    asyncio.run(scene())


def test_a_waiting_reader_gets_an_error_when_its_stream_is_dropped() -> None:
    async def scene() -> None:
        answers = AnswerStream(Counted())
        waiting = asyncio.ensure_future(answers.next())
        await asyncio.sleep(0)
        answers.drop()
        with pytest.raises(InferError, match="does not read them"):
            await waiting

    asyncio.run(scene())
