"""ModelReadiness: one pending check at a time, with a time limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.python_models import readiness
from penstock.server.python_models.messages import CHECK_READY
from penstock.server.python_models.readiness import ModelReadiness


class FakeWorker:
    def __init__(self) -> None:
        self.sent_kinds: list[int] = []

    def send_message(self, kind: int, number: int) -> None:
        self.sent_kinds.append(kind)


def readiness_and_worker() -> tuple[ModelReadiness, Any]:
    readiness = ModelReadiness()
    readiness.has_is_ready = True
    return readiness, FakeWorker()


def test_a_model_without_is_ready_is_ready_while_it_has_a_worker() -> None:
    async def scene() -> None:
        assert await ModelReadiness().check(FakeWorker())  # type: ignore[arg-type]
        assert not await ModelReadiness().check(None)

    asyncio.run(scene())


@pytest.mark.parametrize("ready", [True, False])
def test_concurrent_checks_share_one_answer(ready: bool) -> None:
    async def scene() -> None:
        model_readiness, worker = readiness_and_worker()
        both = asyncio.gather(model_readiness.check(worker), model_readiness.check(worker))
        await asyncio.sleep(0)
        model_readiness.answer(ready=ready)

        assert list(await both) == [ready, ready]
        assert worker.sent_kinds == [CHECK_READY]

    asyncio.run(scene())


def test_a_check_after_a_timed_out_check_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        model_readiness, worker = readiness_and_worker()
        with monkeypatch.context() as hurried:
            hurried.setattr(readiness, "ANSWER_LIMIT_S", 0.0)
            assert not await model_readiness.check(worker)
        later = asyncio.ensure_future(model_readiness.check(worker))
        await asyncio.sleep(0)
        model_readiness.answer(ready=True)

        assert await later
        assert worker.sent_kinds == [CHECK_READY]

    asyncio.run(scene())


def test_a_check_after_an_answer_asks_the_worker_again() -> None:
    async def scene() -> None:
        model_readiness, worker = readiness_and_worker()
        for ready in (True, False):
            asking = asyncio.ensure_future(model_readiness.check(worker))
            await asyncio.sleep(0)
            model_readiness.answer(ready=ready)
            assert await asking is ready

        assert worker.sent_kinds == [CHECK_READY] * 2

    asyncio.run(scene())
