"""Latency targets in the Engine: which requests get one, which are rejected, and what is learned from the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.batching.statistics import REJECTED
from tests.fakes import PATIENCE_S, FakeBackend, Gate, ListSink, fake_loader, fake_request

pytestmark = pytest.mark.anyio

KEY = ((4,),)
TARGET_US = 60_000_000
TARGET_NS = TARGET_US * 1000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def serving(target_us: int = TARGET_US, queue_rows: int = 1024) -> AsyncIterator[tuple[Engine, Model, Gate]]:
    """A model on a thread, in batches of at most 4 rows."""
    gate = Gate(lambda inputs: inputs)
    x, y = (TensorSpec(name, "FP32", (-1, 4)) for name in "xy")
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(FakeBackend(Signature((x,), (y,)), gate))})
    policy = BatchPolicy(max_batch_rows=4, executor="thread", latency_target_us=target_us, max_queue_rows=queue_rows)
    model = await engine.load(ModelSpec("m", 1, Path("model"), policy=policy, backend="fake"))
    try:
        yield engine, model, gate
    finally:
        gate.open()
        await engine.stop(PATIENCE_S)


@asynccontextmanager
async def backlog() -> AsyncIterator[tuple[Engine, Model, ListSink]]:
    """A model with a predicted run time of 25 s and a target of 60: one batch runs, and one waits."""
    sink = ListSink()
    async with serving() as (engine, model, gate):
        for rows in (1, 2, 4):
            for _ in range(40):
                model.scheduler.learn(KEY, rows, 25_000_000_000, time.monotonic_ns())
        gate.close()
        engine.submit(fake_request(model, 4, sink=sink))
        await gate.entered()
        engine.submit(fake_request(model, 4, sink=sink))
        yield engine, model, sink


def rejected(model: Model) -> int:
    return model.statistics.snapshot().failures[REJECTED]


@pytest.mark.parametrize(
    ("own_target_ns", "target_ns"), [(0, TARGET_NS), (1_000_000_000, 1_000_000_000), (2 * TARGET_NS, TARGET_NS)]
)
async def test_a_request_has_the_models_target_unless_its_own_is_earlier(own_target_ns: int, target_ns: int) -> None:
    async with serving() as (engine, model, _):
        request = fake_request(model, sink=ListSink())
        request.start_ns = time.monotonic_ns()
        request.target_ns = request.start_ns + own_target_ns if own_target_ns else 0
        engine.submit(request)

        assert request.target_ns == request.start_ns + target_ns


async def test_time_in_the_socket_counts_toward_the_target_but_not_toward_the_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (engine, model, _):
        monkeypatch.setattr(engine._dispatcher, "earliest_arrival_ns", lambda now_ns: now_ns - 1_000_000_000)
        request = fake_request(model, sink=ListSink())
        engine.submit(request)

        assert request.target_ns == request.enqueued_ns - 1_000_000_000 + TARGET_NS
        assert request.start_ns == request.enqueued_ns


async def test_a_request_for_a_model_without_a_target_has_none() -> None:
    async with serving(target_us=0) as (engine, model, _):
        request = fake_request(model, sink=ListSink())
        engine.submit(request)

        assert (request.target_ns, engine.early_rejection(model)) == (0, None)


async def test_a_request_that_would_be_late_is_rejected_and_counted() -> None:
    async with backlog() as (engine, model, sink):
        with pytest.raises(
            InferError, match=r"Exceeds latency target: would be answered in \d+ ms, the target"
        ) as late:
            engine.submit(fake_request(model, sink=sink))

        assert late.value.code is Code.OVERLOADED
        assert late.value.retry_after_ns > 0
        assert (model.event_counts, rejected(model), model.inflight) == ({"late_refusals": 1}, 1, 8 // 4)


async def test_a_request_that_would_be_late_is_rejected_before_its_body_is_decoded() -> None:
    async with backlog() as (engine, model, _):
        error = engine.early_rejection(model)

        assert error is not None
        assert error.message.startswith("Exceeds latency target")
        assert (model.event_counts, rejected(model)) == ({"late_refusals": 1}, 1)


async def test_a_shared_rejection_error_does_not_accumulate_traceback_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    async with backlog() as (engine, model, _):
        monkeypatch.setattr(engine._dispatcher, "earliest_arrival_ns", lambda now_ns: now_ns // TARGET_NS * TARGET_NS)
        depths = []
        for _ in range(3):
            error = engine.early_rejection(model)
            assert error is not None
            with pytest.raises(InferError) as raised:
                raise error
            depths.append(len(raised.traceback))

        assert depths == [1, 1, 1]


async def test_a_full_queue_rejects_early_without_counting_the_request_as_late() -> None:
    async with serving(target_us=0, queue_rows=4) as (engine, model, gate):
        gate.close()
        sink = ListSink()
        engine.submit(fake_request(model, 4, sink=sink))
        await gate.entered()
        before = engine.early_rejection(model)
        engine.submit(fake_request(model, 4, sink=sink))
        error = engine.early_rejection(model)

        assert before is None
        assert error is not None
        assert error.message == "Exceeds maximum queue size"
        assert (model.event_counts, rejected(model)) == ({}, 1)


async def test_the_margin_learns_from_answers_later_than_promised() -> None:
    async with serving() as (engine, model, gate):
        gate.close()
        sink = ListSink()
        request = fake_request(model, sink=sink)
        engine.submit(request)
        await gate.entered()
        promised_ns, request.promised_ns = request.promised_ns, request.start_ns
        gate.open()
        await sink.holds(1)

        assert promised_ns > request.start_ns
        assert model.scheduler.promises.margin.ns > 0
