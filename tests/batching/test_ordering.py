"""Ordering: answers are delivered in the order in which their requests arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.ordering import Ordering
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from tests.fakes import FakeBackend, Gate, ListSink, fake_loader, fake_model, fake_request

MODEL = fake_model()


@given(
    st.lists(st.tuples(st.sampled_from(("enter", "end", "drop", "stray")), st.lists(st.integers(0, 50))), max_size=60)
)
def test_delivered_requests_are_always_a_prefix_of_those_that_arrived(
    steps: list[tuple[str, list[int]]],
) -> None:
    ordering = Ordering()
    came: list[InferRequest] = []
    under_way: list[InferRequest] = []
    dropped: set[InferRequest] = set()
    out: list[InferRequest] = []
    strays = 0
    for step, positions in steps:
        if step == "enter":
            came.append(fake_request(MODEL))
            under_way.append(came[-1])
            ordering.add(came[-1])
        elif step == "stray":
            strays += 1
            stray = fake_request(MODEL)
            assert ordering.record_ended([stray]) == [stray]
        elif under_way and positions:
            chosen = list(dict.fromkeys(under_way[each % len(under_way)] for each in positions))
            under_way = [each for each in under_way if each not in chosen]
            if step == "end":
                out += ordering.record_ended(chosen)
            else:
                dropped.update(chosen)
                for each in chosen:
                    out += ordering.discard(each)
        remaining = [each for each in came if each not in dropped]
        assert out == remaining[: len(out)]
        assert len(out) == len(remaining) or remaining[len(out)] in under_way
        queued = set(ordering._queue)
        assert queued - dropped == {*remaining[len(out) :]}
        assert queued == ordering._states.keys()
    out += ordering.record_ended(under_way)
    assert out == [each for each in came if each not in dropped]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Released:
    """A model's function whose runs the test ends, by the number in their first row."""

    def __init__(self) -> None:
        self.gates = {number: Gate(list) for number in range(1, 10)}
        for gate in self.gates.values():
            gate.close()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        number = int(inputs[0][0, 0])
        if number in self.gates:
            self.gates[number]([])
        if (inputs[0] < 0).any():
            raise ValueError("a row below zero")
        return list(inputs)

    async def entered(self, *numbers: int) -> None:
        for number in numbers:
            await self.gates[number].entered()

    def end(self, number: int) -> None:
        self.gates[number].open()


@asynccontextmanager
async def serving(**policy: Any) -> AsyncIterator[tuple[Engine, Model, Released]]:
    released = Released()
    tensor = TensorSpec("x", "FP32", (-1, 4))
    signature = Signature((tensor,), (TensorSpec("y", "FP32", (-1, 4)),))
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(FakeBackend(signature, released))})
    batch_policy = replace(BatchPolicy(max_batch_rows=1, executor="thread", preserve_ordering=True), **policy)
    spec = ModelSpec("m", 1, Path("m"), "fake", policy=batch_policy, instances=(InstanceGroup(3),))
    model = await engine.load(spec)
    try:
        yield engine, model, released
    finally:
        for number in released.gates:
            released.end(number)
        await engine.stop(5)


def submit(engine: Engine, model: Model, sink: ListSink, values: Sequence[float], rows: int = 1) -> list[InferRequest]:
    requests = [fake_request(model, rows, value=value, sink=sink) for value in values]
    for request in requests:
        engine.submit(request)
    return requests


async def deliveries(model: Model, in_flight: int) -> None:
    """Let the loop process finished runs until `left` requests are in flight."""
    async with asyncio.timeout(10):
        while model.inflight != in_flight:  # noqa: ASYNC110 - held answers have no event
            await asyncio.sleep(0)


@pytest.mark.anyio
async def test_answers_of_three_instances_that_finish_in_reverse_order_are_delivered_in_order() -> None:
    async with serving() as (engine, model, released):
        sink = ListSink()
        requests = submit(engine, model, sink, [1, 2, 3])
        await released.entered(1, 2, 3)
        for number, in_flight in ((3, 2), (2, 1)):
            released.end(number)
            await deliveries(model, in_flight)
            assert sink.requests == []
        released.end(1)

        assert await sink.holds(3) == requests


def submit_until(engine: Engine, model: Model, sink: ListSink, wait_ns: int) -> InferRequest:
    """Submit a request with a short queue timeout."""
    request = fake_request(model, sink=sink)
    request.deadline_ns = time.monotonic_ns() + wait_ns
    engine.submit(request)
    return request


@pytest.mark.anyio
async def test_failed_and_expired_requests_wait_their_turn_and_canceled_ones_block_no_request() -> None:
    async with serving() as (engine, model, released):
        sink = ListSink()
        running = submit(engine, model, sink, [1, 2, 3])
        await released.entered(1, 2, 3)
        cancelled, failing = submit(engine, model, sink, [10, -1])
        late = submit_until(engine, model, sink, 5_000_000)
        last = submit(engine, model, sink, [12])
        await deliveries(model, 6)
        engine.cancel(cancelled)
        released.end(2)
        await deliveries(model, 2)
        assert sink.requests == []
        released.end(3)
        released.end(1)

        assert await sink.holds(6) == [*running, failing, late, *last]
        assert [request.error.code for request in (failing, late) if request.error] == [Code.INTERNAL, Code.EXPIRED]


@pytest.mark.anyio
async def test_a_request_blocked_by_a_canceled_one_is_delivered_at_once() -> None:
    async with serving(max_batch_rows=8, max_queue_delay_us=60_000_000) as (engine, model, _):
        sink = ListSink()
        (first,) = submit(engine, model, sink, [20])
        late = submit_until(engine, model, sink, 5_000_000)
        await deliveries(model, 1)
        assert sink.requests == []
        engine.cancel(first)

        assert sink.requests == [late]


@pytest.mark.anyio
@pytest.mark.parametrize("fails", [False, True])
async def test_a_split_request_keeps_its_place_in_the_order(fails: bool) -> None:
    async with serving(split=True) as (engine, model, released):
        sink = ListSink()
        first = submit(engine, model, sink, [1])
        await released.entered(1)
        (split_request,) = submit(engine, model, sink, [-3 if fails else 30], rows=4)
        last = submit(engine, model, sink, [12, 13])
        await deliveries(model, 1)
        assert sink.requests == []
        released.end(1)

        assert await sink.holds(4) == [*first, split_request, *last]
        assert (split_request.error is not None) is fails


@pytest.mark.anyio
async def test_a_split_request_whose_part_is_rejected_cancels_its_other_parts() -> None:
    async with serving(split=True, max_queue_rows=3) as (engine, model, released):
        sink = ListSink()
        first = submit(engine, model, sink, [1, 2, 3])
        await released.entered(1, 2, 3)
        before = submit(engine, model, sink, [10, 11])
        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            submit(engine, model, sink, [12], rows=3)
        last = submit(engine, model, sink, [13])
        for number in (3, 2, 1):
            released.end(number)

        assert await sink.holds(6) == [*first, *before, *last]


@pytest.mark.anyio
async def test_a_stopping_server_delivers_answers_out_of_order() -> None:
    async with serving() as (engine, model, released):
        sink = ListSink()
        first, second, third = submit(engine, model, sink, [1, 2, 3])
        await released.entered(1, 2, 3)
        released.end(3)
        await deliveries(model, 2)
        submit(engine, model, sink, [4])
        await released.entered(4)
        (waits,) = submit(engine, model, sink, [10])
        await engine.stop(0.01)

        assert sink.requests == [third, waits]
        assert waits.error is not None
        for number, request in ((2, second), (1, first)):
            released.end(number)
            assert (await sink.holds(len(sink.requests) + 1))[-1] is request


@pytest.mark.anyio
async def test_requests_of_different_sinks_are_delivered_in_order() -> None:
    order: list[tuple[str, int]] = []

    class Named(ListSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def deliver(self, requests: Sequence[InferRequest]) -> None:
            super().deliver(requests)
            order.append((self.name, len(requests)))

    async with serving() as (engine, model, released):
        a, b = Named("a"), Named("b")
        submit(engine, model, a, [1])
        await released.entered(1)
        for sink in (b, a, a, b):
            submit(engine, model, sink, [20])
        await deliveries(model, 1)
        released.end(1)
        await b.holds(2)

        assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 1)]
