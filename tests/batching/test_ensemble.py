"""Ensemble: requests that pass from model to model, over a real Engine with models that wait for the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching import dispatcher
from penstock.batching.caching.cache import Cache
from penstock.batching.ensembles.steps import check_dataflow
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.spec import HookSpec, ModelSpec, SequenceSpec, Step
from penstock.batching.statistics import BACKEND, CANCELED, OTHER, REJECTED
from tests.batching.ensembles import ROWS, House, ensemble_spec, house, step, tensors, values_of
from tests.fakes import ListSink

pytestmark = pytest.mark.anyio

GUILTY = -100.0
HOUR_NS = 3_600_000_000_000


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def double(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 2]


def plus_one(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0] + 1]


def second_or_first(inputs: list[Any]) -> list[Any]:
    return [inputs[0] if inputs[1] is None else inputs[1]]


def plus_thousand(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + 1000]


def halved(inputs: list[Any]) -> list[Any]:
    return [inputs[0][:, :2]]


def both(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + inputs[1], inputs[0] - inputs[1]]


CHAIN = ensemble_spec("chain", "in", "out", step("double", "x=in", "y=mid"), step("plus", "x=mid", "y=out"))
DIAMOND = ensemble_spec(
    "diamond", "in", "sum difference",
    step("both", "a=left b=right", "sum=sum difference=difference"),
    step("double", "x=in", "y=left"),
    step("plus", "x=in", "y=right"),
)  # fmt: skip


@asynccontextmanager
async def served(*specs: ModelSpec, **policy: Any) -> AsyncIterator[House]:
    async with house() as system:
        await system.serve("double", double, **policy)
        await system.serve("plus", plus_one, **policy)
        await system.serve("both", both, "a b", "sum difference", **policy)
        for spec in specs or (CHAIN, DIAMOND):
            await system.engine.load(spec)
        yield system


def failures(model: Model) -> dict[str, int]:
    return {reason: count for reason, count in model.statistics.snapshot().failures.items() if count}


def refusal(house: House) -> InferError:
    with pytest.raises(InferError) as refused:
        house.submit("chain", 1)
    return refused.value


async def error_of(house: House, name: str = "chain", *values: float) -> InferError:
    delivered = len(house.sink.requests)
    request = house.submit(name, *values or (1,))
    await house.sink.holds(delivered + 1)
    assert request.error is not None
    return request.error


class TestLoopTurns:
    async def test_short_steps_of_a_request_run_in_one_turn_of_the_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatcher, "TURN_BUDGET_NS", HOUR_NS)
        async with served(executor="loop") as system:
            system.submit("chain", 3)
            await asyncio.sleep(0)

            assert values_of(system.sink.requests) == [7]

    async def test_a_turn_that_has_exceeded_its_budget_leaves_the_next_step_to_the_next_turn(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "TURN_BUDGET_NS", -1)
        async with served(executor="loop") as system:
            system.submit("chain", 3)
            await asyncio.sleep(0)

            assert (system.runs("double"), system.runs("plus")) == ([1], [])
            assert values_of(await system.sink.holds(1)) == [7]

    async def test_a_model_with_more_batches_runs_one_per_turn_even_if_its_answers_trigger_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dispatcher, "TURN_BUDGET_NS", HOUR_NS)
        twice = ensemble_spec("twice", "in", "out", step("double", "x=in", "y=mid"), step("double", "x=mid", "y=out"))
        async with served(twice, executor="loop", cap_rows=1) as system:
            system.submit("twice", 1)
            system.submit("twice", 2)
            await asyncio.sleep(0)

            assert system.runs("double") == [1]
            assert sorted(values_of(await system.sink.holds(2))) == [4, 8]


class TestDataFlow:
    async def test_each_step_receives_the_output_of_the_previous_step(self) -> None:
        async with served() as system:
            system.submit("chain", 3, rows=2)

            (request,) = await system.sink.holds(1)
            assert request.outputs is not None
            assert (request.outputs[0] == np.full((2, 4), 7)).all()
            assert (system.runs("double"), system.runs("plus"), system.at_rest()) == ([2], [2], True)

    async def test_parallel_branches_run_at_once_and_the_joining_step_waits_for_both(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.gates["plus"].close()
            system.submit("diamond", 5)
            await system.gates["double"].entered()
            await system.gates["plus"].entered()
            system.gates["plus"].open()
            system.gates["double"].open()

            (request,) = await system.sink.holds(1)
            assert [output[0, 0] for output in request.outputs or []] == [16, 4]
            assert system.runs("both") == [1]

    async def test_outputs_are_returned_in_the_requested_order(self) -> None:
        async with served() as system:
            system.submit("diamond", 5, positions=(1, 0))

            (request,) = await system.sink.holds(1)
            assert [output[0, 0] for output in request.outputs or []] == [4, 16]

    async def test_only_steps_needed_for_the_requested_outputs_run(self) -> None:
        fork = ensemble_spec("fork", "in", "one two", step("double", "x=in", "y=one"), step("plus", "x=one", "y=two"))
        async with served(fork) as system:
            system.submit("fork", 5, positions=(0,))
            await system.sink.holds(1)
            assert (system.runs("double"), system.runs("plus")) == ([1], [])
            system.submit("fork", 5, positions=(1,))

            assert values_of(await system.sink.holds(2)) == [10, 11]
            assert system.backends["double"].runs[-1].positions == (0,)

    async def test_an_output_that_is_also_an_input_is_returned_unchanged(self) -> None:
        async with served(ensemble_spec("echo", "in", "in out", step("plus", "x=in", "y=out"))) as system:
            system.submit("echo", 5, positions=(0,))
            await system.sink.holds(1)
            system.submit("echo", 6)

            assert values_of(await system.sink.holds(2)) == [5, 6]
            assert (system.runs("plus"), system.at_rest()) == ([1], True)

    async def test_steps_of_different_requests_share_batches_with_direct_requests(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            for value in range(3):
                system.submit("chain", value)
            system.submit("double", 9)
            await asyncio.sleep(0)
            system.gates["double"].open()

            await system.sink.holds(5)
            assert (system.runs("double"), sum(system.runs("plus"))) == ([1, 4], 3)

    async def test_tensors_are_passed_between_steps_without_a_copy(self) -> None:
        async with served(ensemble_spec("one", "in", "in2", step("double", "x=in", "y=in2"))) as system:
            outputs: list[Any] = []

            def keep(inputs: list[Any]) -> list[Any]:
                outputs.append(inputs[0] * 2)
                return outputs[-1:]

            await system.serve("double", keep)
            system.submit("one", 4)

            (request,) = await system.sink.holds(1)
            assert np.shares_memory((request.outputs or [])[0], outputs[-1])

    async def test_hundreds_of_cached_steps_are_answered_without_recursion(self) -> None:
        count = 300
        steps = [step("same", f"x=t{number}", f"y=t{number + 1}") for number in range(count)]
        async with house() as system:
            system.engine.cache = Cache(1 << 20)
            await system.engine.load(replace(system.spec("same", list), cached=True))
            system.backends["same"].runs.clear()
            await system.engine.load(ensemble_spec("long", "t0", f"t{count}", *steps))
            for number in (1, 2):
                system.submit("long", 5)
                assert values_of(await system.sink.holds(number)) == [5] * number

            # the second step is looked up before the first one's answer is cached
            assert system.runs("same") == [1, 1]

    async def test_a_tensor_is_released_when_no_later_step_reads_it(self) -> None:
        async with served() as system:
            system.gates["plus"].close()
            system.submit("chain", 3)
            await system.gates["plus"].entered()
            ensemble = system.engine.model("chain").ensemble
            assert ensemble is not None
            (passage,) = ensemble.passages.values()

            assert all(tensor is None for tensor in passage.tensors)

    async def test_an_ensemble_may_be_a_step(self) -> None:
        outer = ensemble_spec(
            "outer", "in", "out", step("chain", "in=in", "out=mid"), step("chain", "in=mid", "out=out")
        )
        async with served(CHAIN, outer) as system:
            system.submit("outer", 1)

            assert values_of(await system.sink.holds(1)) == [7]
            counted = {model.name: model.statistics.snapshot().success.count for model in system.engine.models()}
            assert (counted["outer"], counted["chain"], counted["double"]) == (1, 2, 2)

    async def test_an_output_has_the_labels_of_the_model_that_computes_it_unless_overridden(self) -> None:
        inner = ensemble_spec("inner", "in", "out", step("double", "x=in", "y=mid"), step("named", "x=mid", "y=out"))
        outer = ensemble_spec("outer", "in", "out", step("inner", "in=in", "out=out"))
        own = ensemble_spec("own", "in", "out", step("inner", "in=in", "out=out"), labels={"out": ("mine",)})
        async with served() as system:
            named = replace(system.spec("named", plus_one), labels={"y": ("cat", "dog")})
            for spec in (named, inner, outer, own):
                await system.engine.load(spec)

            labels = {name: system.engine.model(name).spec.labels for name in ("inner", "outer", "own", "chain")}
            inherited = {"out": ("cat", "dog")}
            assert labels == {"inner": inherited, "outer": inherited, "own": {"out": ("mine",)}, "chain": {}}

    async def test_one_tensor_may_feed_several_inputs_and_one_model_may_be_several_steps(self) -> None:
        twice = ensemble_spec(
            "twice", "in", "sum",
            step("both", "a=in b=in", "sum=mid"), step("both", "a=mid b=in", "sum=sum"),
        )  # fmt: skip
        async with served(twice) as system:
            system.submit("twice", 3)

            assert values_of(await system.sink.holds(1)) == [9]

    async def test_a_step_with_a_pinned_version_runs_that_version(self) -> None:
        pinned = ensemble_spec("pinned", "in", "out", step("plus", "x=in", "y=out", "1"))
        latest = ensemble_spec("latest", "in", "out", step("plus", "x=in", "y=out"))
        async with served(pinned, latest) as system:
            await system.serve("plus", plus_thousand, version=2)
            system.submit("pinned", 1)
            await system.sink.holds(1)
            system.submit("latest", 1)

            assert [request.model.name for request in await system.sink.holds(2)] == ["pinned", "latest"]
            assert values_of(system.sink.requests) == [2, 1001]

    async def test_id_priority_sequence_and_deadline_are_passed_to_the_steps(self) -> None:
        async with served() as system:
            requests: list[InferRequest] = []
            scheduler = system.engine.model("plus").scheduler
            add = scheduler.add

            def note(request: InferRequest) -> None:
                requests.append(request)
                add(request)

            scheduler.add = note  # type: ignore[method-assign]
            request = system.request("chain", 1)
            request.id, request.priority, request.sequence = "seven", 2, InSequence(5, start=True)
            request.deadline_ns = time.monotonic_ns() + HOUR_NS
            system.engine.submit(request)
            await system.sink.holds(1)

            (inner,) = requests
            assert (inner.id, inner.priority, inner.sequence) == ("seven", 2, InSequence(5, start=True))
            assert 0 <= request.deadline_ns - inner.deadline_ns <= 1_000


class TestRows:
    WHOLE = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
    ROW = Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),))

    async def test_an_unbatched_ensemble_may_have_batched_steps_if_the_full_shapes_agree(self) -> None:
        plain = ensemble_spec("plain", "in", "out", *CHAIN.ensemble.steps if CHAIN.ensemble else (), rows=0)
        plain = replace(plain, inputs=tensors("in", shape=(-1, 4)), outputs=tensors("out", shape=(-1, 4)))
        async with served(plain) as system:
            request = system.request("plain", 3, rows=2)
            request.rows = 1
            system.engine.submit(request)

            assert [output.shape for output in (await system.sink.holds(1))[0].outputs or []] == [(2, 4)]
            assert system.runs("plus") == [2]

    async def test_an_unbatched_step_gets_the_only_row_of_a_request_and_returns_one(self) -> None:
        lone = ensemble_spec("lone", "in", "out", step("row", "x=in", "y=mid"), step("plus", "x=mid", "y=out"))
        async with served() as system:
            await system.serve("row", double, graph=self.ROW, max_batch_rows=0)
            await system.engine.load(lone)
            system.submit("lone", 3)
            (request,) = await system.sink.holds(1)

            assert [output.shape for output in request.outputs or []] == [(1, 4)]
            assert values_of([request]) == [7]

    async def test_an_unbatched_step_rejects_requests_of_several_rows(self) -> None:
        lone = ensemble_spec("lone", "in", "out", step("row", "x=in", "y=out"))
        async with served() as system:
            await system.serve("row", double, graph=self.ROW, max_batch_rows=0)
            await system.engine.load(lone)
            with pytest.raises(
                InferError, match="in ensemble 'lone', a tensor that is passed to a model without a batch axis"
            ) as refused:
                system.submit("lone", 3, rows=2)

            assert (refused.value.code, system.at_rest()) == (Code.INVALID, True)

    async def test_a_shape_that_the_next_step_rejects_is_an_error_of_the_request(self) -> None:
        free = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),))
        async with served() as system:
            await system.serve("half", halved, graph=free)
            await system.engine.load(
                ensemble_spec("short", "in", "out", step("half", "x=in", "y=mid"), step("plus", "x=mid", "y=out"))
            )
            system.submit("short", 1)

            (request,) = await system.sink.holds(1)
            assert request.error is not None
            assert request.error.message.startswith(
                "in ensemble 'short', unexpected shape for input 'x' for model 'plus'"
            )


class TestErrors:
    async def test_an_error_names_the_ensemble_and_is_delivered_once(self) -> None:
        async with served() as system:
            system.submit("chain", GUILTY / 2)

            (request,) = await system.sink.holds(1)
            assert request.error is not None
            assert (request.error.code, request.error.message) == (Code.INVALID, "in ensemble 'chain', a guilty row")
            assert (failures(system.engine.model("chain")), system.at_rest()) == ({BACKEND: 1}, True)

    async def test_the_first_error_cancels_the_waiting_steps_of_its_request(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            system.submit("diamond", GUILTY)

            (request,) = await system.sink.holds(1)
            assert request.error is not None
            assert failures(system.engine.model("double")) == {CANCELED: 1}
            system.gates["double"].open()
            await system.sink.holds(2)
            assert (system.runs("double"), system.runs("both"), system.at_rest()) == ([1], [], True)

    async def test_the_result_of_a_step_still_running_after_an_error_is_discarded(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.gates["plus"].close()
            system.submit("diamond", GUILTY)
            await system.gates["double"].entered()
            system.gates["plus"].open()
            await system.sink.holds(1)
            system.gates["double"].open()
            system.submit("double", 1)
            await system.sink.holds(2)

            assert (len(system.sink.requests), system.runs("both"), system.at_rest()) == (2, [], True)

    async def test_a_rejection_by_the_first_step_is_raised_by_submit(self) -> None:
        async with served(max_queue_requests=1) as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            system.submit("double", 0)

            error = await error_of(system)
            assert (error.code, error.message) == (Code.OVERLOADED, "in ensemble 'chain', Exceeds maximum queue size")
            assert failures(system.engine.model("chain")) == {REJECTED: 1}
            assert (system.engine.model("chain").inflight, len(system.sink.requests)) == (0, 1)

    async def test_a_rejection_by_a_later_step_is_delivered_as_the_requests_error(self) -> None:
        async with served(max_queue_requests=1) as system:
            system.gates["plus"].close()
            system.submit("plus", 0)
            await system.gates["plus"].entered()
            system.submit("plus", 0)
            request = system.submit("chain", 0)
            await system.sink.holds(1)

            assert system.sink.requests == [request]
            assert request.error is not None
            assert request.error.code is Code.OVERLOADED

    async def test_the_retry_delay_of_a_steps_rejection_is_kept(self) -> None:
        async with served() as system:
            late = InferError(Code.OVERLOADED, "too late", 5_000)

            def refuse(request: InferRequest) -> None:
                raise late

            system.engine.model("double").scheduler.add = refuse  # type: ignore[method-assign]
            assert (await error_of(system)).retry_after_ns == 5_000

    async def test_a_rejected_branch_cancels_the_other_branches_of_its_request(self) -> None:
        async with served(max_queue_requests=1) as system:
            for name in ("double", "plus"):
                system.gates[name].close()
                system.submit(name, 0)
                await system.gates[name].entered()
            system.submit("double", 0)

            await error_of(system, "diamond")
            assert [system.engine.model(name).waiting_requests for name in ("double", "plus")] == [1, 0]

    async def test_a_step_that_fails_while_room_is_made_for_another_ends_the_request_once(self) -> None:
        spec = ensemble_spec("twins", "a b", "c d", step("plus", "x=a", "y=c"), step("plus", "x=b", "y=d"))
        async with served(spec, executor="loop", max_queue_requests=2) as system:

            class Filling(ListSink):
                def deliver(self, requests: Sequence[InferRequest]) -> None:
                    super().deliver(requests)
                    system.submit("plus", 2)
                    system.submit("plus", 3)

            direct = system.request("plus", 1)
            direct.sink = Filling()
            system.engine.submit(direct)
            twins = system.submit("twins", GUILTY, 4)
            await system.sink.holds(3)

            assert twins.error is not None
            assert twins.error.message == "in ensemble 'twins', a guilty row"
            assert sorted(values_of([each for each in system.sink.requests if each is not twins])) == [3, 4]
            assert system.at_rest()

    async def test_a_cached_step_is_answered_even_if_its_queue_is_full(self) -> None:
        async with house() as system:
            system.engine.cache = Cache(1 << 20)
            await system.engine.load(replace(system.spec("plus", plus_one, max_queue_requests=1), cached=True))
            await system.engine.load(ensemble_spec("only", "in", "out", step("plus", "x=in", "y=out")))
            system.submit("only", 1)
            await system.sink.holds(1)
            system.gates["plus"].close()
            system.submit("plus", 2)
            await system.gates["plus"].entered()
            system.submit("plus", 3)
            assert (await error_of(system, "only", 4)).code is Code.OVERLOADED
            system.submit("only", 1)

            assert values_of((await system.sink.holds(3))[::2]) == [2, 2]

    async def test_a_step_is_not_started_if_another_fails_while_room_is_made_for_it(self) -> None:
        spec = ensemble_spec("twins", "a b", "c d", step("plus", "x=a", "y=c"), step("plus", "x=b", "y=d"))
        async with served(spec, executor="loop", max_queue_requests=1) as system:
            error = await error_of(system, "twins", GUILTY, 4)

            assert error.message == "in ensemble 'twins', a guilty row"
            assert system.at_rest()

    async def test_a_deadline_that_passes_in_a_steps_queue_fails_the_request(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            system.submit("chain", 0, timeout_ns=5_000_000)

            (request,) = await system.sink.holds(1)
            assert request.error is not None
            assert (request.error.code, request.error.message) == (
                Code.EXPIRED, "in ensemble 'chain', Request timeout expired",
            )  # fmt: skip
            assert failures(system.engine.model("chain")) == {OTHER: 1}

    async def test_an_error_in_a_nested_ensemble_names_both_ensembles(self) -> None:
        outer = ensemble_spec("outer", "in", "out", step("chain", "in=in", "out=out"))
        async with served(CHAIN, outer) as system:
            system.submit("outer", GUILTY / 2)

            (request,) = await system.sink.holds(1)
            assert request.error is not None
            assert request.error.message == "in ensemble 'outer', in ensemble 'chain', a guilty row"
            assert system.at_rest()


class TestCancellation:
    async def test_a_canceled_request_leaves_the_queue_and_starts_no_further_step(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            request = system.submit("chain", 0)
            system.engine.cancel(request)
            system.engine.cancel(request)

            assert [system.engine.model(name).waiting_requests for name in ("double", "plus")] == [0, 0]
            assert failures(system.engine.model("chain")) == {CANCELED: 1}
            system.gates["double"].open()
            await system.sink.holds(1)
            assert (system.runs("plus"), request in system.sink.requests, system.at_rest()) == ([], False, True)

    async def test_a_request_canceled_while_a_step_runs_starts_no_further_step(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            request = system.submit("chain", 0)
            await system.gates["double"].entered()
            system.engine.cancel(request)
            system.gates["double"].open()
            system.submit("double", 0)
            await system.sink.holds(1)

            assert (system.runs("plus"), request in system.sink.requests, system.at_rest()) == ([], False, True)

    async def test_a_nested_ensembles_request_is_canceled_with_the_outer_request(self) -> None:
        outer = ensemble_spec("outer", "in", "out", step("chain", "in=in", "out=out"))
        async with served(CHAIN, outer) as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            request = system.submit("outer", 0)
            await asyncio.sleep(0)
            system.engine.cancel(request)

            assert system.engine.inflight == 1
            assert failures(system.engine.model("chain")) == {CANCELED: 1}

    async def test_canceling_an_awaiting_task_cancels_its_request(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            task = asyncio.ensure_future(
                system.engine.infer(system.engine.model("chain"), [np.zeros((1, 4), np.float32)])
            )
            await system.gates["double"].entered()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            assert system.engine.model("chain").inflight == 0


class TestLoadingAndUnloading:
    async def test_replacing_a_steps_model_fails_no_request(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("chain", 1)
            await system.gates["double"].entered()
            new = await system.engine.open(system.spec("plus", plus_thousand))
            (old,) = system.engine.publish("plus", [new])
            retiring = asyncio.ensure_future(system.engine.retire(old))
            system.gates["double"].open()
            await system.sink.holds(1)
            await retiring
            system.submit("chain", 1)

            assert values_of(await system.sink.holds(2)) == [3, 1002]

    async def test_a_model_being_unloaded_stays_for_requests_that_still_need_it_as_a_step(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("chain", 1)
            await system.gates["double"].entered()
            unloading = asyncio.ensure_future(system.engine.unload("plus", 1))
            await asyncio.sleep(0)

            assert "depends on 'plus' which has no loaded version" in refusal(system).message
            assert not unloading.done()
            system.gates["double"].open()
            assert values_of(await system.sink.holds(1)) == [3]
            await unloading

    async def test_nested_ensembles_and_their_steps_stay_for_requests_that_still_need_them(self) -> None:
        steps = [step("double", "x=in", "y=first"), step("chain", "in=first", "out=mid")]
        steps.append(step("chain", "in=mid", "out=out"))
        async with served(CHAIN, ensemble_spec("outer", "in", "out", *steps)) as system:
            system.gates["double"].close()
            system.submit("outer", 1)
            await system.gates["double"].entered()
            going = [asyncio.ensure_future(system.engine.unload(name, 1)) for name in ("plus", "chain", "outer")]
            await asyncio.sleep(0)
            assert not any(unloading.done() for unloading in going)
            system.gates["double"].open()

            assert values_of(await system.sink.holds(1)) == [11]
            await asyncio.gather(*going)
            assert system.engine.model("double").hold_count == 0

    async def test_an_idle_ensemble_does_not_delay_the_unloading_of_a_step(self) -> None:
        async with served() as system:
            system.submit("chain", 1)
            await system.sink.holds(1)
            assert system.engine.model("plus").hold_count == 1
            async with asyncio.timeout(5):
                await system.engine.unload("plus", 1)

            assert not system.engine.model("chain").healthy

    async def test_an_ensemble_becomes_healthy_again_when_its_step_is_reloaded(self) -> None:
        async with served() as system:
            await system.engine.unload("plus", 1)
            await system.serve("plus", plus_one)

            assert system.engine.model("chain").healthy

    async def test_a_reloaded_step_that_no_longer_fits_is_reported_on_each_request(self) -> None:
        wide = Signature((TensorSpec("x", "FP32", (-1, 5)),), (TensorSpec("y", "FP32", (-1, 5)),))
        async with served() as system:
            await system.serve("plus", plus_one, graph=wide)

            assert "ensemble tensor mid: inconsistent shape: [-1,4]" in refusal(system).message
            assert failures(system.engine.model("chain")) == {REJECTED: 1}

    async def test_cached_answers_of_an_ensemble_are_not_used_after_a_step_is_replaced(self) -> None:
        async with served() as system:
            system.engine.cache = Cache(1 << 20)
            await system.engine.load(replace(CHAIN, name="cached", cached=True))
            for _ in range(2):
                system.submit("cached", 1)
                await system.sink.holds(1)
            await system.sink.holds(2)
            assert system.runs("plus") == [1]
            await system.serve("plus", plus_thousand)
            system.submit("cached", 1)

            assert values_of(await system.sink.holds(3)) == [3, 3, 1002]

    async def test_answers_are_not_cached_if_a_nested_step_is_a_sequence_model(self) -> None:
        async with house() as system:
            system.engine.cache = Cache(1 << 20)
            await system.engine.load(replace(system.spec("same", list), sequence=SequenceSpec(direct=False)))
            await system.engine.load(ensemble_spec("inner", "in", "out", step("same", "x=in", "y=out")))
            outer = ensemble_spec("outer", "in", "out", step("inner", "in=in", "out=out"), cached=True)
            await system.engine.load(outer)
            system.backends["same"].runs.clear()
            for number in (1, 2):
                request = system.request("outer", 5)
                request.sequence = InSequence(number, start=True, end=True)
                system.engine.submit(request)
                assert values_of(await system.sink.holds(number)) == [5] * number

            assert system.runs("same") == [1, 1]

    async def test_an_ensemble_being_unloaded_finishes_its_requests(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("chain", 1)
            await system.gates["double"].entered()
            unloading = asyncio.ensure_future(system.engine.unload("chain", 1))
            await asyncio.sleep(0)
            assert not unloading.done()
            system.gates["double"].open()

            assert values_of(await system.sink.holds(1)) == [3]
            await unloading
            assert [system.engine.model(name).hold_count for name in ("double", "plus")] == [0, 0]

    async def test_a_stopping_engine_finishes_ensemble_requests_and_rejects_new_ones(self) -> None:
        outer = ensemble_spec(
            "outer", "in", "out", step("chain", "in=in", "out=mid"), step("chain", "in=mid", "out=out")
        )
        async with served(CHAIN, outer) as system:
            system.gates["double"].close()
            system.submit("outer", 1)
            await system.gates["double"].entered()
            stopping = asyncio.ensure_future(system.engine.stop(10))
            await asyncio.sleep(0)

            refused = refusal(system)
            assert (refused.code, refused.message[:40]) == (Code.NOT_READY, "in ensemble 'chain', Server is stopping,")
            system.gates["double"].open()
            assert values_of(await system.sink.holds(1)) == [7]
            assert await stopping == 0

    async def test_a_request_unfinished_when_the_grace_period_ends_fails_once(self) -> None:
        async with served() as system:
            system.gates["double"].close()
            system.submit("double", 0)
            await system.gates["double"].entered()
            request = system.submit("chain", 1)
            await system.engine.stop(0)

            assert system.sink.requests == [request]
            assert request.error is not None
            assert request.error.message.startswith("in ensemble 'chain', Server is stopping")


class TestStatistics:
    async def test_durations_are_sums_over_steps_and_each_request_counts_as_one_execution(self) -> None:
        async with served() as system:
            for _ in range(3):
                system.submit("chain", 1, rows=2)
            await system.sink.holds(3)

            chain, *steps = (system.engine.model(name).statistics.snapshot() for name in ("chain", "double", "plus"))
            assert (chain.success.count, chain.inference_count, chain.execution_count) == (3, 6, 3)
            assert [(batch.rows, batch.count) for batch in chain.batch_stats] == [(2, 3)]
            for part in ("queue", "compute_input", "compute_infer", "compute_output"):
                assert getattr(chain, part).ns == sum(getattr(each, part).ns for each in steps)
            assert [each.inference_count for each in steps] == [6, 6]

    async def test_a_nested_ensembles_durations_count_in_the_outer_ensembles_sums(self) -> None:
        outer = ensemble_spec("outer", "in", "out", step("chain", "in=in", "out=mid"), step("plus", "x=mid", "y=out"))
        async with served(CHAIN, outer) as system:
            system.submit("outer", 1)
            await system.sink.holds(1)

            outer_, double_, plus = (
                system.engine.model(name).statistics.snapshot() for name in ("outer", "double", "plus")
            )
            assert outer_.compute_infer.ns == double_.compute_infer.ns + plus.compute_infer.ns

    async def test_an_ensemble_request_is_traced_after_its_steps(self) -> None:
        async with served() as system:
            traced: list[str] = []
            system.engine.trace = lambda model, batch, end_ns: traced.append(model.name)
            system.submit("chain", 1)
            await system.sink.holds(1)

            assert traced == ["double", "plus", "chain"]

    async def test_an_ensemble_reports_its_platform_and_signature_and_no_instances(self) -> None:
        async with served() as system:
            chain = system.engine.model("chain")

            assert (chain.platform, chain.instances, chain.max_rows) == ("ensemble", [], ROWS)
            assert [(spec.name, spec.shape) for spec in chain.signature.inputs] == [("in", (-1, 4))]


WIDE = Signature((TensorSpec("x", "FP32", (-1, 5)),), (TensorSpec("y", "FP32", (-1, 5)),))
WHOLE_NUMBERS = Signature((TensorSpec("x", "INT32", (-1, 4)),), (TensorSpec("y", "INT32", (-1, 4)),))

WIDE_TEXT = (
    "in ensemble e, ensemble tensor in: inconsistent shape: [-1,4] is inferred from model e while [-1,5] is inferred "
    "from model wide"
)
WHOLE_TEXT = (
    "in ensemble e, ensemble tensor in: inconsistent data type: TYPE_FP32 is inferred from model e while TYPE_INT32 is "
    "inferred from model whole"
)
SMALL_TEXT = (
    "ensemble e allows maximum batch size 16, but it contains model small which only allows maximum batch size to be 2"
)


UNWRITTEN = (
    "output 'out' for ensemble 'e' is not written: at least one of its depending tensors, '{}', is not connected"
)


class TestRefusedConfigurations:
    @pytest.mark.parametrize(
        ("steps", "text"),
        [
            ([step("nobody", "x=in", "y=out")], "ensemble 'e' depends on 'nobody' which has no loaded version"),
            (
                [step("plus", "x=in", "y=out", "2")],
                "ensemble 'e' depends on 'plus' whose required version 2 is not loaded",
            ),
            (
                [step("plus", "z=in", "y=out")],
                "in ensemble e, ensemble tensor in is mapping to non-existing input z in model plus",
            ),
            (
                [step("plus", "x=in", "z=out")],
                "in ensemble e, ensemble tensor out is mapped from non-existing output z in model plus",
            ),
            (
                [step("both", "a=in", "sum=out")],
                "in ensemble e, input b in model both is not mapped to any ensemble tensors",
            ),
            (
                [step("wide", "x=in", "y=out")],
                WIDE_TEXT,
            ),
            (
                [step("whole", "x=in", "y=out")],
                WHOLE_TEXT,
            ),
            (
                [step("small", "x=in", "y=out")],
                SMALL_TEXT,
            ),
        ],
    )  # fmt: skip
    async def test_steps_with_missing_or_mismatched_models_are_refused(self, steps: list[Step], text: str) -> None:
        async with served() as system:
            await system.serve("wide", plus_one, graph=WIDE)
            await system.serve("whole", double, graph=WHOLE_NUMBERS)
            await system.serve("small", double, max_batch_rows=2, cap_rows=2)
            with pytest.raises(InferError) as refused:
                await system.engine.load(ensemble_spec("e", "in", "out", *steps))

            assert refused.value.message == text

    async def test_an_ensemble_cannot_become_part_of_itself(self) -> None:
        outer = ensemble_spec("outer", "in", "out", step("chain", "in=in", "out=out"))
        async with served(CHAIN, outer) as system:
            circle = ensemble_spec("chain", "in", "out", step("outer", "in=in", "out=out"))
            with pytest.raises(InferError) as refused:
                await system.engine.load(circle)

            assert refused.value.message == "circular dependency between ensembles: chain -> ... -> outer -> chain"

    async def test_a_step_whose_model_has_hooks_is_refused_by_name(self) -> None:
        async with served() as system:
            await system.serve("hooked", double, hooks=HookSpec(Path("hooks.py")))
            with pytest.raises(InferError, match="in ensemble e, model hooked has hooks"):
                await system.engine.load(ensemble_spec("e", "in", "out", step("hooked", "x=in", "y=out")))

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"cached": True}, "Response Cache does not currently support ensemble e: step many is decoupled"),
            ({"hooks": HookSpec(Path("hooks.py"))}, "ensemble e cannot have hooks: its step many is decoupled"),
        ],
    )
    async def test_a_decoupled_step_excludes_a_cache_and_hooks(self, options: dict[str, Any], text: str) -> None:
        async with served() as system:
            await system.serve("many", double, decoupled=True)
            with pytest.raises(InferError) as refused:
                await system.engine.load(ensemble_spec("e", "in", "out", step("many", "x=in", "y=out"), **options))

            assert refused.value.message == text

    async def test_a_step_with_sequences_excludes_a_cache(self) -> None:
        async with served() as system:
            await system.engine.load(replace(system.spec("talk", double), sequence=SequenceSpec()))
            with pytest.raises(InferError) as refused:
                await system.engine.load(ensemble_spec("e", "in", "out", step("talk", "x=in", "y=out"), cached=True))

            assert (
                refused.value.message == "Response Cache does not currently support ensemble e: step talk has sequences"
            )

    async def test_an_optional_ensemble_input_may_feed_only_optional_inputs(self) -> None:
        takes = (*tensors("in"), TensorSpec("more", "FP32", (4,), optional=True))
        async with served() as system:
            with pytest.raises(InferError, match="input b in model both is not optional, but ensemble input more is"):
                await system.engine.load(
                    ensemble_spec("e", "", "out", step("both", "a=in b=more", "sum=out"), takes=takes)
                )

    async def test_an_optional_input_that_is_absent_stays_absent_in_the_step(self) -> None:
        takes = (*tensors("in"), TensorSpec("more", "FP32", (4,), optional=True))
        declared = (*tensors("a"), TensorSpec("b", "FP32", (4,), optional=True))
        graph = Signature(declared, tensors("y"))
        spec = ensemble_spec("e", "", "out", step("perhaps", "a=in b=more", "y=out"), takes=takes, rows=0)
        async with served() as system:
            await system.serve("perhaps", second_or_first, graph=graph, declared=declared, max_batch_rows=0)
            model = await system.engine.load(spec)

            present = await system.engine.infer(model, [np.ones(4, np.float32), np.zeros(4, np.float32)])
            absent = await system.engine.infer(model, [np.ones(4, np.float32), None])
            assert (present[0][0], absent[0][0]) == (0, 1)

    @pytest.mark.parametrize(
        ("inputs", "outputs", "steps", "text"),
        [
            (["in"], ["out"], [], "must specify 'step' for ensemble 'e'"),
            (
                ["in"], ["out"], [Step("", "", {"x": "in"}, {"y": "out"})],
                "must specify 'model_name' in step 0 of ensemble 'e'",
            ),
            (["in"], ["out"], [Step("m", "", {}, {"y": "out"})], "must specify 'input_map' in step 0 of ensemble 'e'"),
            (["in"], ["out"], [Step("m", "", {"x": "in"}, {})], "must specify 'output_map' in step 0 of ensemble 'e'"),
            (
                ["in"], ["out"], [step("m", "x=in", "y=out"), step("m", "x=in", "y=out")],
                "ensemble tensor 'out' can appear in an output map only once for ensemble 'e' step 1",
            ),
            (
                ["in", "more"], ["out"], [step("m", "x=in", "y=out")],
                "ensemble input 'more' for ensemble 'e' is not used",
            ),
            (
                ["in"], ["in"], [step("m", "x=in", "y=in")],
                "ensemble input 'in' for ensemble 'e' is also written by step 0",
            ),
            (["in"], ["out"], [step("m", "x=in", "y=mid")], "ensemble output 'out' for ensemble 'e' is not used"),
            (
                ["in"], ["out"], [step("m", "x=in", "y=mid"), step("n", "x=mdi", "y=out")],
                UNWRITTEN.format("mdi"),
            ),
            (
                ["in"], ["out"], [step("m", "a=in b=far", "y=out"), step("m", "a=out b=in", "y=far")],
                UNWRITTEN.format("far"),
            ),
            (
                ["in"], ["out"], [step("m", "x=in", "y=out"), step("m", "x=in", "y=extra")],
                "ensemble tensor 'extra' is unused in ensemble 'e'",
            ),
            (
                ["in"],
                ["out"],
                [step("m", "x=in", "y=out"), step("m", "a=in b=two", "y=one"), step("m", "x=one", "y=two")],
                "ensemble tensor 'one' is unused in ensemble 'e'",
            ),
        ],
    )  # fmt: skip
    def test_unused_and_unwritten_ensemble_tensors_are_refused(
        self, inputs: list[str], outputs: list[str], steps: list[Step], text: str
    ) -> None:
        with pytest.raises(InferError) as refused:
            check_dataflow("e", inputs, outputs, steps)

        assert refused.value.message == text
