"""Engine.make_room: what happens to a full queue when one more request arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.batching.statistics import REJECTED
from tests.fakes import PATIENCE_S, FakeBackend, Gate, ListSink, fake_loader, fake_request

pytestmark = pytest.mark.anyio

QUEUE_ROWS = 8
BATCH_ROWS = 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TwiceSink(ListSink):
    """A Sink whose clients send two requests per answer, before the next answer, as pipelining clients may."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self.engine: Engine | None = None

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        super().deliver(requests)
        engine = self.engine
        if engine is None:
            return
        for request in 2 * list(requests):
            try:
                if request.model.scheduler.is_full():
                    engine.make_room(request.model)
                engine.submit(fake_request(request.model, sink=self))
            except InferError:
                self.refused += 1


@asynccontextmanager
async def full_queue(executor: str) -> AsyncIterator[tuple[Engine, Model, TwiceSink]]:
    gate = Gate(lambda inputs: inputs)
    x, y = (TensorSpec(name, "FP32", (-1, 4)) for name in "xy")
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(FakeBackend(Signature((x,), (y,)), gate))})
    policy = BatchPolicy(max_batch_rows=BATCH_ROWS, cap_rows=BATCH_ROWS, executor=executor, max_queue_rows=QUEUE_ROWS)
    model = await engine.load(ModelSpec("m", 1, Path("model"), policy=policy, backend="fake"))
    sink = TwiceSink()
    if executor == "thread":
        gate.close()
        engine.submit(fake_request(model, sink=sink))
        await gate.entered()
    for _ in range(QUEUE_ROWS):
        engine.submit(fake_request(model, sink=sink))
    try:
        yield engine, model, sink
    finally:
        sink.engine = None
        gate.open()
        await engine.stop(PATIENCE_S)


def rejected(model: Model) -> int:
    return model.statistics.snapshot().failures[REJECTED]


async def test_a_batch_that_runs_on_the_loop_makes_room_at_once() -> None:
    async with full_queue("loop") as (engine, model, sink):
        engine.make_room(model)

        assert len(sink.requests) == BATCH_ROWS
        assert (model.waiting_rows, model.inflight, rejected(model)) == (QUEUE_ROWS - BATCH_ROWS,) * 2 + (0,)
        engine.submit(fake_request(model, sink=sink))
        assert len(await sink.holds(QUEUE_ROWS + 1)) == QUEUE_ROWS + 1


async def test_a_request_found_expired_while_room_is_made_fails_at_once() -> None:
    async with full_queue("loop") as (engine, model, sink):
        engine.make_room(model)
        late = fake_request(model, sink=sink)
        late.deadline_ns = time.monotonic_ns() + int(PATIENCE_S * 1e9)
        engine.submit(late)
        model.scheduler.expired += model.scheduler.expire(late.deadline_ns)
        while not model.scheduler.is_full():
            engine.submit(fake_request(model, sink=sink))
        engine.make_room(model)

        assert late in sink.requests
        assert late.error is not None
        assert late.error.code is Code.EXPIRED


async def test_a_full_queue_of_a_model_on_threads_rejects_the_request() -> None:
    async with full_queue("thread") as (engine, model, sink):
        with pytest.raises(InferError) as caught:
            engine.make_room(model)

        assert (caught.value.code, caught.value.message) == (Code.OVERLOADED, "Exceeds maximum queue size")
        assert (model.waiting_rows, rejected(model), sink.requests) == (QUEUE_ROWS, 1, [])


async def test_make_room_called_while_room_is_being_made_rejects_the_request() -> None:
    async with full_queue("loop") as (engine, model, sink):
        sink.engine = engine
        with pytest.raises(InferError):
            engine.make_room(model)

        assert len(sink.requests) == BATCH_ROWS
        # eight requests arrived for the four places that the batch had freed, and then the one that needed room
        assert (sink.refused, rejected(model), model.waiting_rows) == (4, 5, QUEUE_ROWS)
