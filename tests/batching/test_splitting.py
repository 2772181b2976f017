"""Splitting: a request with more rows than a batch may have runs in parts, and ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.shapes.splitting import split
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.batching.statistics import BACKEND, CANCELED, REJECTED
from tests.fakes import FakeBackend, Function, Gate, ListSink, NoSink, fake_loader, fake_model, fake_request

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
MOST = 4
GUILTY = -1.0
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def same(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0]]


@dataclass
class House:
    engine: Engine
    model: Model
    backend: FakeBackend
    gate: Gate
    sink: ListSink

    def request(self, rows: int, first: float = 0.0) -> InferRequest:
        request = fake_request(self.model, rows, sink=self.sink)
        request.inputs = [np.arange(first, first + rows, dtype=np.float32).repeat(4).reshape(rows, 4)]
        return request

    def submit(self, rows: int, first: float = 0.0, timeout_ns: int = 0) -> InferRequest:
        request = self.request(rows, first)
        request.deadline_ns = timeout_ns
        self.engine.submit(request)
        return request

    async def busy(self) -> InferRequest:
        """Close the gate and submit a request that waits at it."""
        self.gate.close()
        request = self.submit(1, 1000.0)
        await self.gate.entered()
        return request

    @property
    def failures(self) -> dict[str, int]:
        return self.model.statistics.snapshot().failures

    @property
    def ran(self) -> list[int]:
        return [run.rows for run in self.backend.runs if run.rows]


@asynccontextmanager
async def house(function: Function = same, executor: str = "thread", **policy: Any) -> AsyncIterator[House]:
    gate = Gate(function)
    backend = FakeBackend(GRAPH, gate)
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
    batch_policy = BatchPolicy(max_batch_rows=MOST, split=True, executor=executor, **policy)
    model = await engine.load(ModelSpec("m", 1, Path("m"), "fake", policy=batch_policy))
    backend.runs.clear()
    try:
        yield House(engine, model, backend, gate, ListSink())
    finally:
        gate.open()
        await engine.stop(1.0)


def numbers(request: InferRequest) -> list[float]:
    assert request.error is None
    assert request.outputs is not None
    column: list[float] = request.outputs[0][:, 0].tolist()
    return column


def code(request: InferRequest) -> Code | None:
    return None if request.error is None else request.error.code


@given(st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None)
def test_parts_are_views_that_hold_every_row_once_in_order(rows: int, most: int) -> None:
    request = fake_request(fake_model(), rows)
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    request.inputs, request.nbytes = [array, None], array.nbytes
    request.deadline_ns, request.target_ns, request.start_ns, request.enqueued_ns, request.id = 5, 6, 1, 2, "r"
    parts = split(request, most, lambda _: None)

    inputs = [part.inputs[0] for part in parts]
    assert request.parts == parts
    assert all(each is not None and each.base is not None and 1 <= len(each) <= most for each in inputs)
    assert np.concatenate([each for each in inputs if each is not None]).tolist() == array.tolist()
    assert [part.rows for part in parts] == [len(each) for each in inputs if each is not None]
    assert all(part.inputs[1] is None for part in parts)
    assert {(p.deadline_ns, p.target_ns, p.start_ns, p.enqueued_ns, p.id, p.key) for p in parts} == {
        (5, 6, 1, 2, "r", request.key)
    }
    assert sum(part.nbytes for part in parts) <= request.nbytes


class TestJoining:
    def parts(self, *, rows: int = 6) -> tuple[InferRequest, list[InferRequest], ListSink, list[InferRequest]]:
        sink = ListSink()
        cancelled: list[InferRequest] = []
        request = fake_request(fake_model(), rows, sink=sink)
        return request, split(request, MOST // 2, cancelled.append), sink, cancelled

    def test_a_split_request_is_delivered_after_its_last_part_in_any_order_of_parts(self) -> None:
        request, parts, sink, _ = self.parts()
        for number, part in enumerate(parts):
            part.outputs = [np.full((2, 4), number), [number, number]]
        for part in (parts[2], parts[0]):
            part.sink.deliver([part])
        assert sink.requests == []
        parts[1].sink.deliver([parts[1]])

        assert sink.requests == [request]
        assert request.outputs is not None
        assert (numbers(request), request.outputs[1]) == ([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2])

    def test_the_first_error_of_a_part_ends_the_request_and_later_parts_change_nothing(self) -> None:
        request, parts, sink, cancelled = self.parts()
        for part, text in zip(parts[:2], ("first", "second"), strict=True):
            part.error = InferError(Code.INTERNAL, text)
            part.sink.deliver([part])
        parts[2].outputs = [np.zeros((2, 4))]
        parts[2].sink.deliver([parts[2]])

        assert sink.requests == [request]
        assert request.error is parts[0].error
        assert request.outputs is None
        assert cancelled == parts

    def test_part_outputs_that_cannot_be_joined_are_an_internal_error(self) -> None:
        request, parts, sink, _ = self.parts()
        for number, part in enumerate(parts):
            part.outputs = [np.zeros((2, number))]
        parts[0].sink.deliver(parts)

        assert sink.requests == [request]
        assert request.error is not None
        assert request.error.code is Code.INTERNAL
        assert request.error.message.startswith("the outputs of 'm' for the parts of 6 rows cannot be joined: ")


@pytest.mark.anyio
class TestServing:
    @pytest.mark.parametrize("executor", ["thread", "loop"])
    async def test_a_request_of_many_rows_is_returned_whole_and_in_order(self, executor: str) -> None:
        async with house(executor=executor) as place:
            requests = [place.submit(11, 0.0), place.submit(2, 50.0), place.submit(4, 80.0)]
            delivered = await place.sink.holds(3)

            assert [numbers(request) for request in requests] == [
                list(range(11)), [50, 51], [80, 81, 82, 83],
            ]  # fmt: skip
            assert sorted(map(id, delivered)) == sorted(map(id, requests))
            assert max(place.ran) <= MOST
            assert place.engine.inflight == 0

    async def test_infer_splits_large_requests(self) -> None:
        async with house() as place:
            (answer,) = await place.engine.infer(place.model, [np.ones((9, 4), np.float32)])

            assert answer.shape == (9, 4)

    async def test_each_part_counts_as_a_request_of_its_batch(self) -> None:
        async with house() as place:
            place.submit(9)
            await place.sink.holds(1)

            counted = place.model.statistics.snapshot()
            assert (counted.success.count, counted.inference_count) == (3, 9)

    async def test_a_request_with_more_rows_than_the_queue_holds_is_rejected_as_invalid(self) -> None:
        async with house(max_queue_rows=10) as place:
            with pytest.raises(InferError) as caught:
                await place.engine.infer(place.model, [np.ones((11, 4), np.float32)])

            assert caught.value.message == "inference request batch-size must be <= 10 for 'm'"

    async def test_a_request_with_more_parts_than_the_queue_takes_is_rejected_as_invalid(self) -> None:
        async with house(max_queue_requests=2) as place:
            with pytest.raises(InferError) as caught:
                await place.engine.infer(place.model, [np.ones((9, 4), np.float32)])

            assert caught.value.message == "inference request batch-size must be <= 8 for 'm'"

    async def test_a_request_with_more_bytes_than_the_queue_holds_is_rejected_as_invalid(self) -> None:
        async with house(max_queue_bytes=100) as place:
            with pytest.raises(InferError) as caught:
                await place.engine.infer(place.model, [np.ones((9, 4), np.float32)])

            assert caught.value.code is Code.INVALID
            assert caught.value.message == "request of 144 bytes for 'm' exceeds the 100 bytes that its queue may hold"

    async def test_without_splitting_a_request_larger_than_a_batch_is_rejected(self) -> None:
        backend = FakeBackend(GRAPH, same)
        engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
        batch_policy = BatchPolicy(max_batch_rows=MOST, executor="thread")
        model = await engine.load(ModelSpec("m", 1, Path("m"), "fake", policy=batch_policy))
        with pytest.raises(InferError) as caught:
            await engine.infer(model, [np.ones((5, 4), np.float32)])
        await engine.stop(1.0)

        assert caught.value.message == "inference request batch-size must be <= 4 for 'm'"

    async def test_no_part_is_enqueued_if_the_queue_has_no_room_for_all(self) -> None:
        async with house(max_queue_rows=10) as place:
            await place.busy()
            waiting = place.submit(2)
            with pytest.raises(InferError) as caught:
                place.submit(10)

            assert caught.value.code is Code.OVERLOADED
            assert (place.model.waiting_rows, place.model.waiting_requests) == (2, 1)
            assert place.failures[REJECTED] == 1
            place.gate.open()
            await place.sink.holds(2)
            assert numbers(waiting) == [0, 1]

    async def test_a_failed_part_fails_the_request_once_and_cancels_its_waiting_parts(self) -> None:
        async with house() as place:
            await place.busy()
            request = place.submit(11, GUILTY)
            other = place.submit(1, 7.0)
            place.gate.open()
            delivered = await place.sink.holds(3)
            await place.engine.stop(1.0)

            assert code(request) is Code.INVALID
            assert numbers(other) == [7]
            assert delivered.count(request) == 1
            assert place.engine.inflight == 0
            assert place.failures[BACKEND] == 1

    async def test_canceling_a_split_request_cancels_its_parts_and_delivers_nothing(self) -> None:
        async with house() as place:
            first = await place.busy()
            request = place.submit(9)
            place.engine.cancel(request)
            place.engine.cancel(request)

            assert place.model.waiting_rows == 0
            assert place.failures[CANCELED] == 3
            place.gate.open()
            assert await place.sink.holds(1) == [first]
            assert place.engine.inflight == 0

    async def test_a_split_request_canceled_while_a_part_runs_is_not_delivered(self) -> None:
        async with house() as place:
            place.gate.close()
            request = place.submit(9)
            await place.gate.entered()
            place.engine.cancel(request)
            assert request.parts is None  # so that no running part delivers it
            last = place.submit(1, 5.0)
            place.gate.open()

            assert await place.sink.holds(1) == [last]
            assert place.engine.inflight == 0

    async def test_each_part_has_the_requests_deadline_and_expiry_ends_the_request_once(self) -> None:
        async with house() as place:
            await place.busy()
            now_ns = asyncio.get_running_loop().time() * 1e9
            request = place.submit(9, timeout_ns=int(now_ns) + 2_000_000)
            assert await place.sink.holds(1) == [request]

            assert code(request) is Code.EXPIRED
            assert place.failures[REJECTED] + place.failures[CANCELED] == 3
            place.gate.open()
            assert len(await place.sink.holds(2)) == 2

    async def test_a_stopping_server_drops_a_split_request_once(self) -> None:
        async with house() as place:
            await place.busy()
            request = place.submit(9)
            stopping = asyncio.create_task(place.engine.stop(0.0))
            await stopping
            place.gate.open()

            assert place.sink.requests.count(request) == 1
            assert code(request) is Code.NOT_READY


@pytest.mark.anyio
async def test_every_request_of_any_size_gets_its_own_rows() -> None:
    rng = np.random.default_rng(2)
    async with house(max_queue_rows=4096) as place:
        sizes = rng.integers(0, 20, 60).tolist()
        requests = [place.submit(size, 100.0 * number) for number, size in enumerate(sizes)]
        await place.sink.holds(len(sizes))

        for number, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            assert numbers(request) == [100.0 * number + row for row in range(size)]
        assert len(place.sink.requests) == len(set(map(id, place.sink.requests))) == len(sizes)


def test_a_canceled_split_request_ignores_the_results_of_its_parts() -> None:
    request = fake_request(fake_model(), 4, sink=NoSink())
    parts = split(request, 2, lambda _: None)
    request.parts = None

    parts[0].sink.deliver(parts)

    assert request.outputs is None
