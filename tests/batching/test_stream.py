"""Answers: what has come of a request that may have several, and was not taken yet."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching import stream
from penstock.batching.request import InferRequest
from penstock.batching.stream import TAKEN_AT_ONCE, Answers, Told


def told(value: float, count: int = 1) -> Told:
    return Told({"y": np.full(count, value, np.float32)})


def ended(error: InferError | None = None) -> list[InferRequest]:
    request = InferRequest.__new__(InferRequest)
    request.error = error
    return [request]


def test_answers_are_taken_in_their_order_and_then_there_is_none() -> None:
    async def scene() -> None:
        answers = Answers()
        for value in (1, 2):
            answers.tell(told(value))
        answers.deliver(ended())
        found = [await answers.next() for _ in range(3)]
        assert [float(each.outputs["y"][0]) for each in found if each is not None] == [1, 2]
        assert found[2] is None

    asyncio.run(scene())


def test_whoever_waits_is_woken() -> None:
    async def scene() -> None:
        answers = Answers()
        waiting = asyncio.ensure_future(answers.next())
        await asyncio.sleep(0)
        answers.tell(told(3))
        found = await waiting
        assert found is not None
        assert found.outputs["y"].tolist() == [3]

    asyncio.run(scene())


def test_an_error_comes_after_the_answers_before_it() -> None:
    async def scene() -> None:
        answers = Answers()
        answers.tell(told(1))
        answers.deliver(ended(InferError(Code.NOT_READY, "died")))
        assert await answers.next() is not None
        with pytest.raises(InferError, match="died"):
            await answers.next()

    asyncio.run(scene())


def test_many_answers_that_are_there_already_leave_the_loop_its_turns() -> None:
    async def scene() -> int:
        answers, turns = Answers(), 0
        for value in range(1000):
            answers.tell(told(value))
        answers.deliver(ended())

        async def take_all() -> None:
            while await answers.next() is not None:
                pass

        taking = asyncio.ensure_future(take_all())
        while not taking.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scene()) > 1000 // TAKEN_AT_ONCE


def test_answers_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_BYTES", 100)

    async def scene() -> None:
        answers = Answers()
        answers.tell(told(1, 50))
        with pytest.raises(InferError, match="does not read them"):
            answers.tell(told(1))
        await answers.next()
        answers.tell(told(1))

    asyncio.run(scene())
