"""Sequences in the Engine: on a real event loop, over a model that waits for the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, InSequence, RequestOptions
from penstock.batching.spec import BatchPolicy, Control, InstanceGroup, ModelSpec, SequenceSpec, State
from penstock.batching.statistics import CANCELED, REJECTED
from tests.fakes import PATIENCE_S, FakeBackend, Gate, ListSink, fake_loader, fake_request

pytestmark = pytest.mark.anyio

COLUMN = (-1, 1)
GRAPH = Signature(
    (TensorSpec("x", "FP32", COLUMN), TensorSpec("start", "INT32", COLUMN), TensorSpec("ready", "INT32", COLUMN),
     TensorSpec("in", "FP32", COLUMN)),
    (TensorSpec("y", "FP32", COLUMN), TensorSpec("out", "FP32", COLUMN)),
)  # fmt: skip
SEQUENCE = SequenceSpec(
    idle_us=60_000_000,
    controls=(Control("start", "start", "INT32"), Control("ready", "ready", "INT32")),
    states=(State("in", "out", "FP32", (1,)),),
)
GUILTY = -1.0


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def add_up(inputs: list[Any]) -> list[Any]:
    x, start, ready, state = inputs
    if (x == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    assert not state[ready == 0].any()
    total = x + state * (1 - start)
    return [total, total.astype(np.float32)]


def append(inputs: list[Any]) -> list[Any]:
    x, cache = inputs
    longer = np.concatenate([cache, x], axis=1)
    return [longer.sum(axis=1, keepdims=True), longer]


@dataclass
class Served:
    engine: Engine
    model: Model
    backend: FakeBackend
    gate: Gate

    async def infer(self, value: float, identity: int | str, flags: str = "", deadline_ns: int = 0) -> float:
        terms = RequestOptions(deadline_ns, 0, InSequence(identity, "s" in flags, "e" in flags))
        (answer,) = await self.engine.infer(self.model, [np.full((1, 1), value, np.float32)], options=terms)
        return float(answer.item())

    def ask(self, value: float, identity: int | str, flags: str = "") -> asyncio.Task[float]:
        return asyncio.create_task(self.infer(value, identity, flags))

    @property
    def instance_count(self) -> int:
        scheduler = self.model.scheduler
        return len(scheduler.sequences or ()) + scheduler.request_count + self.model.inflight


@asynccontextmanager
async def served(
    sequence: SequenceSpec = SEQUENCE, rows: int = 2, executor: str = "thread", count: int = 1,
    graph: Signature = GRAPH, function: Callable[[list[Any]], list[Any]] = add_up,
) -> AsyncIterator[Served]:  # fmt: skip
    gate = Gate(function)
    backend = FakeBackend(graph, gate)
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
    policy = BatchPolicy(max_batch_rows=rows, executor=executor)
    model = await engine.load(
        ModelSpec("m", 1, Path("m"), "fake", policy=policy, sequence=sequence, instances=(InstanceGroup(count),))
    )
    backend.runs.clear()
    try:
        yield Served(engine, model, backend, gate)
    finally:
        gate.open()
        await engine.stop(PATIENCE_S)


async def come(each: asyncio.Task[float]) -> None:
    """Let a request proceed as far as it can."""
    await asyncio.sleep(0)
    assert not each.done()


@pytest.fixture(params=["thread", "loop"])
def executor(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


class TestRunning:
    @pytest.mark.parametrize("direct", [True, False])
    async def test_each_sequence_accumulates_its_own_state(self, direct: bool, executor: str) -> None:
        async with served(replace(SEQUENCE, direct=direct), executor=executor) as it:
            calls = [it.ask(10 * i + j, i, flags) for j, flags in enumerate(("s", "", "e")) for i in (1, 2, 3, 4)]
            answers = await asyncio.gather(*calls)

            assert answers == [10, 20, 30, 40, 21, 41, 61, 81, 33, 63, 93, 123]
            assert it.instance_count == 0

    @pytest.mark.parametrize("direct", [True, False])
    async def test_a_state_may_begin_without_elements_as_the_cache_of_a_decoder_does(self, direct: bool) -> None:
        row, free = TensorSpec("x", "FP32", COLUMN), (-1, -1)
        graph = Signature(
            (row, TensorSpec("past", "FP32", free)), (replace(row, name="y"), TensorSpec("present", "FP32", free))
        )
        cache = State("past", "present", "FP32", (-1,), initial_shape=(0,))
        sequence = SequenceSpec(direct=direct, states=(cache,))
        async with served(sequence, rows=4, graph=graph, function=append) as it:
            asked = [it.ask(10 * i + j, i, flags) for j, flags in enumerate(("s", "", "e")) for i in (1, 2, 3)]
            answers = await asyncio.gather(*asked)

            assert answers == [10, 20, 30, 21, 41, 61, 33, 63, 93]

    async def test_sequences_are_removed_when_their_model_is_unloaded(self) -> None:
        async with served() as it:
            await it.infer(1, 9, "s")
            assert it.instance_count == 1

            await it.engine.unload("m", 1)

            assert it.instance_count == 0

    async def test_a_failed_request_leaves_the_state_of_its_sequence_unchanged(self) -> None:
        async with served() as it:
            it.gate.close()
            first = it.ask(1, 9, "s")
            await it.gate.entered()
            calls = [it.ask(5, 1, "s"), it.ask(GUILTY, 1), it.ask(6, 1, "e"), it.ask(7, 9, "e")]
            it.gate.open()
            answers = await asyncio.gather(first, *calls, return_exceptions=True)

            assert [str(answer) for answer in answers] == ["1.0", "5.0", "a guilty row", "11.0", "8.0"]
            assert it.instance_count == 0

    async def test_a_failed_batch_is_retried_in_parts_at_the_same_rows(self) -> None:
        async with served(rows=3) as it:
            for identity in (1, 2, 3):
                await it.infer(identity, identity, "s")
            it.gate.close()
            calls = [it.ask(0, 1)]
            await it.gate.entered()
            calls += [it.ask(value, identity) for identity, value in ((2, GUILTY), (3, 5))]
            await come(calls[-1])
            it.gate.open()
            answers = await asyncio.gather(*calls, return_exceptions=True)

            assert [str(answer) for answer in answers] == ["1.0", "a guilty row", "8.0"]
            (ready,) = [run.inputs[2].ravel().tolist() for run in it.backend.runs[-1:] if run.inputs[2] is not None]
            assert ready in ([0, 0, 1], [0, 1])

    async def test_statistics_count_requests_and_not_empty_rows(self) -> None:
        async with served(rows=4) as it:
            for identity in (1, 2, 3):
                await it.infer(1, identity, "s")
            await it.infer(1, 3, "e")

            assert it.backend.runs[-1].rows == 3
            counted = it.model.statistics.snapshot()
            assert (counted.inference_count, counted.execution_count) == (4, 4)
            assert [(each.rows, each.count) for each in counted.batch_stats] == [(1, 1), (2, 1), (3, 2)]


class TestLeaving:
    @pytest.mark.parametrize("direct", [True, False])
    async def test_canceling_a_request_cancels_later_requests_of_its_sequence(self, direct: bool) -> None:
        async with served(replace(SEQUENCE, direct=direct)) as it:
            it.gate.close()
            first = it.ask(1, 1, "s")
            await it.gate.entered()
            second, third = it.ask(2, 1), it.ask(3, 1)
            await come(third)
            second.cancel()
            await asyncio.wait({second})
            it.gate.open()

            with pytest.raises(InferError, match="cancelled") as caught:
                await third
            assert caught.value.code is Code.CANCELLED
            assert await first == 1
            assert it.model.statistics.snapshot().failures[CANCELED] == 2
            with pytest.raises(InferError, match="must specify the START flag"):
                await it.infer(1, 1)
            assert it.instance_count == 0

    async def test_a_waiting_sequence_is_served_when_an_active_one_is_canceled(self) -> None:
        async with served(rows=1) as it:
            it.gate.close()
            first = it.ask(1, 1, "s")
            await it.gate.entered()
            second, other = it.ask(2, 1), it.ask(5, 2, "se")
            await come(other)
            second.cancel()
            await asyncio.wait({second})
            it.gate.open()

            assert [await first, await other] == [1, 5]
            assert it.instance_count == 0

    async def test_a_timeout_of_a_waiting_sequence_ends_the_whole_sequence(self) -> None:
        async with served(rows=1) as it:
            await it.infer(1, 1, "s")
            forever = it.ask(5, 2, "s")
            await come(forever)

            with pytest.raises(InferError, match="timeout of the corresponding sequence has been expired") as caught:
                await it.infer(6, 2, deadline_ns=1)
            assert caught.value.code is Code.EXPIRED
            with pytest.raises(InferError, match="timeout of the corresponding sequence has been expired"):
                await forever
            assert await it.infer(2, 1, "e", deadline_ns=1) == 3
            assert it.model.statistics.snapshot().failures[REJECTED] == 2
            assert it.instance_count == 0

    async def test_an_idle_sequence_is_forgotten_and_its_slot_is_reused(self, executor: str) -> None:
        async with served(replace(SEQUENCE, idle_us=20_000), rows=1, executor=executor) as it:
            loop = asyncio.get_running_loop()
            await it.infer(1, 1, "s")
            before = loop.time()
            assert await it.infer(5, 2, "se") == 5

            assert loop.time() - before > 0.01
            assert it.instance_count == 0

    async def test_accepted_requests_are_finished_when_the_engine_stops(self) -> None:
        async with served() as it:
            it.gate.close()
            calls = [it.ask(1, 1, "s")]
            await it.gate.entered()
            calls += [it.ask(2, 1), it.ask(3, 1, "e")]
            await come(calls[-1])
            stopping = asyncio.create_task(it.engine.stop(PATIENCE_S))
            await asyncio.sleep(0)
            it.gate.open()

            assert [await each for each in calls] == [1, 3, 6]
            assert await stopping == 0

    async def test_requests_left_when_the_engines_time_is_up_are_dropped(self) -> None:
        async with served(rows=1) as it:
            it.gate.close()
            sink = ListSink()
            running = it.ask(1, 1, "s")
            await it.gate.entered()
            for identity, flags in ((1, ""), (2, "s"), (2, "")):
                it.engine.submit(_request(it.model, identity, flags, sink))
            stopping = asyncio.create_task(it.engine.stop(0.01))
            dropped = await sink.holds(3)
            it.gate.open()

            assert {each.error.code for each in dropped if each.error} == {Code.NOT_READY}
            assert await stopping == 4
            assert await running == 1


def _request(model: Model, identity: int, flags: str, sink: ListSink) -> InferRequest:
    request = fake_request(model, 1, ((1,),), sink=sink)
    request.sequence = InSequence(identity, "s" in flags, "e" in flags)
    return request


async def test_remaining_requests_of_a_sequence_run_on_other_instances_when_one_ends() -> None:
    first, second = threading.Event(), threading.Event()

    def asleep(instance: Any) -> bool:
        return bool(instance.idle)

    def wait(inputs: list[Any]) -> list[Any]:
        if inputs[0].flat[0] != 1:
            assert (first if threading.current_thread().name.endswith("#0") else second).wait(PATIENCE_S)
        return add_up(inputs)

    async with served(replace(SEQUENCE, direct=False), rows=1, count=2) as it:
        model = it.model
        it.backend.function = wait
        calls = [it.ask(10, 1, "s"), it.ask(20, 2, "s"), it.ask(1, 1, "e"), it.ask(1, 2, "e")]
        stays, goes = model.instances
        while asleep(stays) or asleep(goes):  # noqa: ASYNC110 - an Instance that goes to work has no event
            await asyncio.sleep(0)
        first.set()
        while not asleep(stays):  # noqa: ASYNC110 - nor has one that goes to sleep
            await asyncio.sleep(0)
        change = await it.engine.change(model, replace(model.spec, instances=(InstanceGroup(1),)))
        assert change is not None
        change.commit()
        for _ in range(3):
            await asyncio.sleep(0)  # the loop looks at the model once more, and finds nothing

        second.set()

        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*calls) == [10, 20, 11, 21]
