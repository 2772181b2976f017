"""Arrivals: requests of one turn of the loop are queued at the end of the turn, or their sinks receive an error."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.arrivals import LARGE_BYTES, MAX_ARRIVALS
from penstock.batching.statistics import CANCELED, REJECTED
from tests.batching.loop_models import KEYS, housed, right
from tests.fakes import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_requests_that_arrive_in_one_turn_run_in_one_batch() -> None:
    async with housed() as house:
        model = await house.load()
        came = [house.come(model, rows) for rows in (1, 2, 1, 3)]
        assert model.scheduler.request_count == 1
        assert model.inflight == 4

        await house.sink.holds(5)

        assert house.rows_run == [7]
        assert house.sink.deliveries[-1] == came
        assert [right(request, 2.0 + index) for index, request in enumerate(came)] == [True] * 4
        assert model.inflight == 0


async def test_awaited_infer_calls_of_one_turn_run_in_one_batch() -> None:
    async with housed() as house:
        model = await house.load()
        awaited = [asyncio.ensure_future(house.engine.infer(model, [np.full((1, 4), at, "<f4")])) for at in range(3)]
        await asyncio.sleep(0)
        counts = model.scheduler.request_count, model.inflight

        answers = await asyncio.gather(*awaited)

        assert counts == (1, 3)
        assert house.rows_run == [3]
        assert [output[0, 0] for (output,) in answers] == [1, 2, 3]


async def test_arrivals_are_enqueued_early_once_their_maximum_number_is_reached() -> None:
    async with housed() as house:
        model = await house.load()
        for _ in range(1 + MAX_ARRIVALS - 1):
            house.come(model)
        assert model.scheduler.request_count == 1

        house.come(model)

        assert model.scheduler.request_count == 1 + MAX_ARRIVALS


@pytest.mark.parametrize(
    "attributes", [{"deadline_ns": 1 << 62}, {"nbytes": LARGE_BYTES}], ids=lambda attributes: next(iter(attributes))
)
async def test_a_request_with_a_deadline_or_a_large_body_is_enqueued_at_once(attributes: dict[str, int]) -> None:
    async with housed() as house:
        model = await house.load()
        house.come(model)

        request = house.come(model, **attributes)

        assert request.waiting


@pytest.mark.parametrize(
    "policy",
    [
        {"latency_target_us": 10_000_000},
        {"priority_levels": 2, "default_priority": 1},
        {"preserve_ordering": True},
        {"executor": "thread"},
    ],
    ids=lambda policy: next(iter(policy)),
)
async def test_requests_are_enqueued_at_once_if_the_policy_considers_each_one_separately(
    policy: dict[str, Any],
) -> None:
    async with housed() as house:
        model = await house.load(**policy)
        house.come(model)
        await house.sink.holds(2)

        came = [house.come(model), house.come(model)]

        assert model.arrivals == []
        assert [request.enqueued_ns > 0 for request in came] == [True, True]
        assert model.inflight == 2
        await house.sink.holds(4)


async def test_a_turn_whose_requests_were_all_canceled_queues_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with housed() as house:
        model = await house.load()
        house.come(model)
        canceled = house.come(model)
        house.engine.cancel(canceled)
        await house.sink.holds(2)
        await asyncio.sleep(0)

        assert house.rows_run == [1]
        assert caplog.records == []


async def test_requests_that_do_not_fit_the_queue_together_are_still_served_one_by_one() -> None:
    async with housed() as house:
        model = await house.load(max_queue_requests=2, max_batch_rows=1, cap_rows=1)
        came = [house.come(model, 1) for _ in range(3)]
        large = house.come(model, 1, nbytes=1 << 12)

        await house.sink.holds(5)

        assert all(right(request, 2.0 + index) for index, request in enumerate([*came, large]))
        assert model.inflight == 0


async def test_a_request_that_does_not_fit_the_queue_is_rejected_after_the_turn() -> None:
    async with housed() as house:
        model = await house.load(max_queue_bytes=100)
        fits = house.come(model, 1, nbytes=60)
        small = house.come(model, 1, nbytes=30)
        much = house.come(model, 1, nbytes=70)

        await house.sink.holds(4)

        assert (fits.error, small.error) == (None, None)
        assert much.error is not None
        assert (much.error.code, much.error.message) == (Code.OVERLOADED, "Exceeds maximum queue size")
        assert model.statistics.snapshot().failures[REJECTED] == 1
        assert model.inflight == 0


async def test_a_request_canceled_in_the_turn_of_its_arrival_is_not_run() -> None:
    async with housed() as house:
        model = await house.load()
        first, second, third = (house.come(model) for _ in range(3))

        house.engine.cancel(second)
        await house.sink.holds(3)

        assert house.rows_run == [2]
        assert house.sink.requests[1:] == [first, third]
        assert model.statistics.snapshot().failures[CANCELED] == 1
        assert model.inflight == 0


async def test_a_request_canceled_before_its_rejection_is_not_delivered() -> None:
    async with housed() as house:
        model = await house.load(max_queue_bytes=100)
        first, second, third = (house.come(model, 1, nbytes=60) for _ in range(3))

        house.engine.cancel(third)
        await house.sink.holds(3)

        assert house.sink.requests[1:] == [second, first]
        assert model.statistics.snapshot().failures[CANCELED] == 1
        assert model.inflight == 0


async def test_requests_that_arrive_just_before_their_model_is_unloaded_are_served() -> None:
    async with housed() as house:
        model = await house.load()
        came = [house.come(model) for _ in range(3)]

        await house.engine.unload("m", 1)

        assert all(request.error is None for request in came)
        assert house.sink.requests[1:] == came


async def test_requests_to_a_closing_model_or_a_stopping_server_are_rejected() -> None:
    async with housed() as house:
        model = await house.load()
        other = await house.load("other")
        came = [house.come(model) for _ in range(2)] + [house.come(other) for _ in range(2)]
        unloaded = asyncio.ensure_future(house.engine.unload("m", 1))
        while not model.closing:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(InferError, match="stopping"):
            house.come(model)
        house.engine.stopping = True
        with pytest.raises(InferError, match="stopping"):
            house.come(other)

        await unloaded
        await house.sink.holds(6)
        assert house.sink.requests[2:] == came


async def test_requests_that_arrive_just_before_the_server_stops_are_served() -> None:
    async with housed() as house:
        model = await house.load()
        came = [house.come(model) for _ in range(3)]

        assert await house.engine.stop(PATIENCE_S) == 0

        assert house.sink.requests[1:] == came
        assert all(request.error is None for request in came)


async def test_a_failing_request_does_not_fail_other_requests_of_its_turn() -> None:
    def picky(inputs: list[Any]) -> list[Any]:
        if (inputs[0] == 3).any():
            raise InferError(Code.INVALID, "a guilty row")
        return [inputs[0] + 1]

    async with housed(picky) as house:
        model = await house.load()
        came = [house.come(model) for _ in range(3)]

        await house.sink.holds(4)

        assert [request.error is None for request in came] == [True, False, True]


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "come", "turn", "cancel"]), st.integers(0, 1), st.integers(1, 5)),
    max_size=40,
)


@given(STEPS, st.sampled_from([0, 7, 40]))
def test_every_arriving_request_ends_exactly_once(steps: list[Step], room: int) -> None:
    async def run() -> None:
        async with housed() as house:
            limit = {"max_queue_rows": room} if room else {}
            models = [await house.load(name, max_batch_rows=8, cap_rows=8, **limit) for name in "ab"]
            served = len(house.sink.requests)
            came: dict[InferRequest, float] = {}
            canceled: set[InferRequest] = set()
            refused = 0
            for what, which, number in steps:
                if what == "turn":
                    await asyncio.sleep(0)
                elif what == "come":
                    try:
                        request = house.come(models[which], number, KEYS[number % 2])
                        came[request] = house.value
                    except InferError:
                        refused += 1
                elif len(came) >= number:
                    request = list(came)[-number]
                    if request not in canceled and request not in house.sink.requests:
                        house.engine.cancel(request)
                        canceled.add(request)
            ended = (await house.sink.holds(served + len(came) - len(canceled)))[served:]
            assert not refused or room
            assert [model.inflight for model in models] == [0, 0]
            assert len(ended) == len(set(ended))
            assert set(ended) == set(came) - canceled
            for request in ended:
                full = request.error is not None and request.error.code is Code.OVERLOADED
                assert right(request, came[request]) or (full and room)
            assert all(model.scheduler.request_count == model.scheduler.rows == 0 for model in models)

    asyncio.run(run())
