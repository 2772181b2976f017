"""Predictions: `predict` with a small sample, over a fake transport and an Engine that answers on demand."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.hooks.runner import Hooks
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.v2.inference import Inference
from tests.server.http.lane import Lane, request, run, turns
from tests.server.v2.held_engine import HeldEngine

PATH = "/v2/models/m/predict"
SAMPLE = b"[[1, 2, 3, 4]]"
ANSWER = b"[[[1.0,2.0,3.0,4.0]]]"


class Predicting(Lane):
    """A connection whose Service is Inference, and the Hooks of its one model, which has no hooks file."""

    def __init__(self, engine: HeldEngine, hooks: Hooks) -> None:
        self.engine, self.hooks = engine, hooks
        service = Inference(cast(Any, engine), Limits(), lambda _: hooks)
        super().__init__(shared=HttpShared(service, Limits()))

    @classmethod
    async def create(cls) -> Predicting:
        engine = HeldEngine()
        engine.loaded[0].max_request_rows = 8
        return cls(engine, await Hooks.load(cast(Any, engine), engine.loaded[0]))

    async def closed(self) -> bool:
        """Whether the hooks close immediately because all their requests have ended."""
        closing = asyncio.ensure_future(self.hooks.close())
        await turns()
        through = closing.done()
        closing.cancel()
        return through


def test_a_prediction_is_answered_without_a_task_when_its_batch_is_done() -> None:
    async def main() -> None:
        served = await Predicting.create()
        assert await served.fed(request(PATH, SAMPLE)) == []
        tasks = len(asyncio.all_tasks())
        served.engine.let_go()

        assert served.bodies == [ANSWER]
        assert served.protocol.task is None
        assert tasks == 1
        assert await served.closed()

    run(main)


def test_pipelined_predictions_run_one_after_another() -> None:
    async def main() -> None:
        served = await Predicting.create()
        await served.fed(request(PATH, SAMPLE) * 2)
        assert len(served.engine.held) == 1
        served.engine.let_go()
        assert len(served.engine.held) == 1
        assert served.protocol.task is not None
        served.engine.let_go()

        assert served.bodies == [ANSWER, ANSWER]

    run(main)


def test_the_prediction_of_a_client_that_disconnects_is_canceled_and_no_longer_counted() -> None:
    async def main() -> None:
        served = await Predicting.create()
        await served.fed(request(PATH, SAMPLE))
        [cancelled] = served.engine.held
        served.transport.lose(ConnectionResetError())
        await turns()
        through = await served.closed()
        served.engine.let_go()

        assert served.engine.cancelled == [cancelled]
        assert through
        assert served.answers == []

    run(main)


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (InferError(Code.OVERLOADED, "Exceeds maximum queue size"), 503, b"Exceeds maximum queue size"),
        (ZeroDivisionError("ours"), 500, b"internal error, request id abc"),
    ],
    ids=["refused", "our own"],
)
def test_a_prediction_that_fails_immediately_is_answered_immediately(
    failure: Exception, status: int, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        served = await Predicting.create()
        served.engine.failure = failure
        with caplog.at_level(logging.CRITICAL, "penstock.server"):
            [answer] = await served.fed(request(PATH, SAMPLE, "x-request-id: abc"))

        assert (answer.status, answer.body) == (status, b'{"error":"%b"}' % message)
        assert served.protocol.task is None
        assert await served.closed()

    run(main)


def test_a_prediction_that_fails_later_is_answered_with_its_error() -> None:
    async def main() -> None:
        served = await Predicting.create()
        await served.fed(request(PATH, SAMPLE))
        [held] = served.engine.held
        held.error = InferError(Code.EXPIRED, "Request timeout expired")
        held.sink.deliver([held])

        assert served.statuses == [503]
        assert await served.closed()

    run(main)


def test_a_sample_that_is_not_json_is_rejected() -> None:
    async def main() -> None:
        served = await Predicting.create()
        [answer] = await served.fed(request(PATH, b"[1,"))

        assert answer.status == 400
        assert await served.closed()

    run(main)
