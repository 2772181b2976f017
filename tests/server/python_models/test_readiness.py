"""A model that is asked whether it is ready: one question at a time, for a while, of a worker that is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.python_models import readiness
from penstock.server.python_models.messages import ASK_READY
from penstock.server.python_models.readiness import ModelReadiness


class FakeWorker:
    def __init__(self) -> None:
        self.told: list[int] = []

    def send_message(self, kind: int, number: int) -> None:
        self.told.append(kind)


def asked() -> tuple[ModelReadiness, Any]:
    made = ModelReadiness()
    made.asked = True
    return made, FakeWorker()


def test_a_model_without_a_say_is_ready_while_it_has_a_worker() -> None:
    async def scene() -> None:
        assert await ModelReadiness().ask(FakeWorker())  # type: ignore[arg-type]
        assert not await ModelReadiness().ask(None)

    asyncio.run(scene())


@pytest.mark.parametrize("ready", [True, False])
def test_who_asks_meanwhile_gets_the_same_answer(ready: bool) -> None:
    async def scene() -> None:
        saying, worker = asked()
        both = asyncio.gather(saying.ask(worker), saying.ask(worker))
        await asyncio.sleep(0)
        saying.answer(ready=ready)

        assert list(await both) == [ready, ready]
        assert worker.told == [ASK_READY]

    asyncio.run(scene())


def test_who_asks_after_one_that_did_not_wait_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        saying, worker = asked()
        with monkeypatch.context() as hurried:
            hurried.setattr(readiness, "WITHIN_S", 0.0)
            assert not await saying.ask(worker)
        later = asyncio.ensure_future(saying.ask(worker))
        await asyncio.sleep(0)
        saying.answer(ready=True)

        assert await later
        assert worker.told == [ASK_READY]

    asyncio.run(scene())


def test_each_question_after_an_answer_is_a_new_one() -> None:
    async def scene() -> None:
        saying, worker = asked()
        for ready in (True, False):
            asking = asyncio.ensure_future(saying.ask(worker))
            await asyncio.sleep(0)
            saying.answer(ready=ready)
            assert await asking is ready

        assert worker.told == [ASK_READY] * 2

    asyncio.run(scene())
