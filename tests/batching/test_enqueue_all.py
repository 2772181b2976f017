"""Bulk enqueue: requests that leave one batch enter the next step's queue together, or one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.arrivals import enqueue_all
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.batching.ensembles import House, ensemble_spec, house, step, values_of
from tests.fakes import PATIENCE_S, FakeBackend, fake_request

NOW_NS = 1_000
SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), batched=True)


def model_of(**policy: Any) -> Model:
    batch_policy = replace(BatchPolicy(max_batch_rows=8), **policy)
    return Model(
        ModelSpec("m", 1, Path("m"), signature=SIGNATURE, policy=batch_policy), [FakeBackend(SIGNATURE, list)], _none
    )


def up_by_one(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + 1]


def up_by_one_and_two(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + 1, inputs[0] + 2]


def doubled(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 2]


def _none(*_: object) -> None: ...


def requests_of(model: Model, *rows: int) -> list[InferRequest]:
    requests = [fake_request(model, each) for each in rows]
    for request in requests:
        request.nbytes = 16 * request.rows
    return requests


def waiting(model: Model) -> tuple[int, int, int]:
    return model.scheduler.request_count, model.scheduler.rows, model.scheduler.nbytes


def test_requests_enqueued_together_wait_in_the_same_order_as_requests_added_one_by_one() -> None:
    together, alone = model_of(), model_of()
    come = requests_of(together, 2, 1, 3)
    for request in requests_of(alone, 2, 1, 3):
        request.enqueued_ns = NOW_NS
        alone.scheduler.add(request)

    assert enqueue_all(together, come, NOW_NS)

    assert waiting(together) == waiting(alone) == (3, 6, 96)
    assert [(each.waiting, each.enqueued_ns, each.start_ns) for each in come] == [(True, NOW_NS, NOW_NS)] * 3
    batch = together.scheduler.take(NOW_NS)
    assert batch is not None
    assert batch.requests == come
    assert waiting(together) == (0, 0, 0)


@pytest.mark.parametrize("room", [{"max_queue_rows": 5}, {"max_queue_requests": 2}, {"max_queue_bytes": 95}])
def test_no_request_is_enqueued_if_the_queue_has_no_room_for_all(room: dict[str, int]) -> None:
    model = model_of(**room)
    come = requests_of(model, 2, 1, 3)

    assert not enqueue_all(model, come, NOW_NS)
    assert waiting(model) == (0, 0, 0)
    assert not any(request.waiting for request in come)


def _first(attributes: dict[str, Any]) -> str:
    return next(iter(attributes))


LOOKS = [
    {"latency_target_us": 1_000},
    {"priority_levels": 2, "default_priority": 1},
    {"preserve_ordering": True},
    {"split": True},
]
SAYS = [{"deadline_ns": 9}, {"target_ns": 9}, {"key": ((5,),)}]


@pytest.mark.parametrize("policy", LOOKS, ids=_first)
def test_requests_are_not_enqueued_together_if_the_policy_considers_each_one_separately(policy: dict[str, Any]) -> None:
    model = model_of(**policy)

    assert not enqueue_all(model, requests_of(model, 1, 1), NOW_NS)
    assert waiting(model) == (0, 0, 0)


@pytest.mark.parametrize(
    "attributes",
    [{"deadline_ns": 9}, {"target_ns": 9}, {"key": ((5,),)}],
    ids=lambda attributes: next(iter(attributes)),
)
def test_requests_with_different_deadlines_targets_or_keys_are_not_enqueued_together(
    attributes: dict[str, Any],
) -> None:
    model = model_of()
    come = requests_of(model, 1, 1, 1)
    for name, value in attributes.items():
        setattr(come[1], name, value)

    assert not enqueue_all(model, come, NOW_NS)
    assert waiting(model) == (0, 0, 0)


def test_a_single_request_is_enqueued_and_an_empty_list_is_not() -> None:
    model = model_of()

    assert enqueue_all(model, requests_of(model, 1), NOW_NS)
    assert waiting(model)[1] == 1
    assert not enqueue_all(model, [], NOW_NS)


@given(st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=6), max_size=8), st.integers(8, 40))
def test_requests_enqueued_together_never_exceed_the_queues_limit(groups: list[list[int]], room: int) -> None:
    model = model_of(max_queue_rows=room)
    entered = 0
    for rows in groups:
        fits = entered + sum(rows) <= model.scheduler.limits.max_rows
        assert enqueue_all(model, requests_of(model, *rows), NOW_NS) == fits
        entered += sum(rows) if fits else 0

    assert model.scheduler.rows == entered


@pytest.mark.anyio
class TestThroughAnEnsemble:
    """Bulk enqueue as used by the Engine and Ensembles."""

    async def _served(self, system: House, **policy: Any) -> None:
        await system.serve("first", up_by_one)
        await system.serve("second", doubled, **policy)
        await system.engine.load(
            ensemble_spec("pair", "in", "out", step("first", "x=in", "y=mid"), step("second", "x=mid", "y=out"))
        )

    async def _send_six(self, system: House, name: str) -> None:
        """Submit one request alone, and five that leave the first step in one batch."""
        system.gates["first"].close()
        system.submit(name, 0)
        await system.gates["first"].entered()
        for value in range(1, 6):
            system.submit(name, value)
        await asyncio.sleep(0)  # requests of a turn go to the first step at its end
        system.gates["first"].open()

    async def test_requests_that_leave_the_first_step_in_a_batch_form_a_batch_at_the_second(self) -> None:
        async with house() as system:
            await self._served(system)
            await self._send_six(system, "pair")
            answered = await system.sink.holds(6)

            assert sorted(values_of(answered)) == [2, 4, 6, 8, 10, 12]
            # the second batch of the first step may end before the first of the second has begun
            assert (system.runs("first"), system.runs("second")) in (([1, 5], [1, 5]), ([1, 5], [6]))
            assert system.at_rest()

    async def test_requests_that_fit_are_served_if_the_queue_is_too_small_for_all(self) -> None:
        async with house() as system:
            await self._served(system, max_queue_requests=3)
            await self._send_six(system, "pair")
            answered = await system.sink.holds(6)

            refused = [request.error.message for request in answered if request.error is not None]
            assert len(refused) + len(values_of(answered)) == 6
            assert set(refused) <= {"in ensemble 'pair', Exceeds maximum queue size"}
            assert len(values_of(answered)) >= 3
            assert system.at_rest()

    async def test_a_request_that_one_step_rejected_is_not_run_by_another(self) -> None:
        async with house() as system:
            await system.serve("first", up_by_one_and_two, outputs="y z")
            await system.serve("narrow", list, max_queue_requests=1)
            await system.serve("wide", list)
            await system.engine.load(
                ensemble_spec(
                    "fork", "in", "a b", step("first", "x=in", "y=m z=n"), step("narrow", "x=m", "y=a"),
                    step("wide", "x=n", "y=b"),
                )
            )  # fmt: skip
            system.gates["narrow"].close()
            await self._send_six(system, "fork")
            await system.sink.holds(1)
            system.gates["narrow"].open()
            answered = await system.sink.holds(6)

            served = [request for request in answered if request.error is None]
            assert sum(system.runs("wide")) == sum(system.runs("narrow")) == len(served)
            for request in served:
                low, high = request.outputs or []
                assert np.array_equal(low + 1, high)
            assert system.at_rest()

    async def test_requests_of_one_turn_enter_the_first_step_together_with_their_arrival_times(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with house() as system:
            await self._served(system)
            scheduler, come = system.engine.model("first").scheduler, list[InferRequest]()
            add = scheduler.add_all

            def keep(requests: Sequence[InferRequest], rows: int, nbytes: int) -> bool:
                come.extend(requests)
                return add(requests, rows, nbytes)

            monkeypatch.setattr(scheduler, "add_all", keep)
            sent = [system.submit("pair", value) for value in range(3)]
            answered = await system.sink.holds(3)

            assert [each.outputs and values_of([each]) for each in sent] == [[2], [4], [6]]
            assert len(answered) == 3
            assert [each.context.parent for each in come] == sent
            assert [(each.start_ns, each.enqueued_ns) for each in come] == [(each.enqueued_ns,) * 2 for each in sent]

    async def test_statistics_of_requests_that_meet_in_a_batch_are_attributed_to_their_own_ensembles(self) -> None:
        async with house() as system:
            await self._served(system)
            await system.engine.load(ensemble_spec("lone", "in", "out", step("second", "x=in", "y=out")))
            system.gates["second"].close()
            system.submit("second", 0)
            await system.gates["second"].entered()
            system.submit("pair", 1)
            async with asyncio.timeout(PATIENCE_S):
                while not system.engine.model("second").scheduler.request_count:  # noqa: ASYNC110 - the queue has no event
                    await asyncio.sleep(0)
            for value in (2, 3):
                system.submit("lone", value)
            await asyncio.sleep(0)
            system.gates["second"].open()
            await system.sink.holds(4)

            assert system.runs("second") == [1, 3]
            pair, lone, first, second = (
                system.engine.model(name).statistics.snapshot() for name in ("pair", "lone", "first", "second")
            )
            (_, shared) = second.batch_stats
            assert lone.compute_infer.ns == 2 * shared.compute_infer_ns
            assert pair.compute_infer.ns == first.compute_infer.ns + shared.compute_infer_ns
