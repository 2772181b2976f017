"""Engine: on a real event loop, uvloop's and asyncio's, over models that wait for the test."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array, Backend, Binding
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching import engine as engine_module
from penstock.batching.engine import Engine
from penstock.batching.loading import opening, warmup
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, RequestOptions
from penstock.batching.running import instance as instance_module
from penstock.batching.running.instance import ThreadInstance
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from penstock.batching.statistics import BACKEND, CANCELED, REJECTED
from tests.fakes import PATIENCE_S, FakeBackend, Function, Gate, ListSink, fake_loader, fake_request

pytestmark = pytest.mark.anyio

ROWS = 16
HOUR_US = 3_600_000_000
MS = 1_000_000
X = TensorSpec("x", "FP32", (-1, 4))
SAME_AND_SUM = Signature((X,), (TensorSpec("same", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))))
FREE = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),))
GUILTY = -1.0


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(params=["thread", "loop"])
def executor(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


def same_and_sum(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0], inputs[0].sum(axis=1)]


def total(inputs: list[Any]) -> list[Any]:
    return [inputs[0].sum().reshape(1)]


def plus_one(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + 1, inputs[0][:, 0]]


def zipmap(inputs: list[Any]) -> list[Any]:
    return [[{0: float(row[0])} for row in inputs[0]]]


@dataclass
class Serving:
    """One Engine with one Model, its Backend, the gate before its function, and a sink."""

    engine: Engine
    model: Model
    backend: FakeBackend
    gate: Gate
    sink: ListSink

    def request(self, rows: int = 1, value: float = 0.0, key: Any = ((4,),)) -> InferRequest:
        return fake_request(self.model, rows, key, value=value, sink=self.sink)

    def submit(self, rows: int = 1, value: float = 0.0, timeout_ns: int = 0) -> InferRequest:
        request = self.request(rows, value)
        if timeout_ns:
            request.deadline_ns = time.monotonic_ns() + timeout_ns
        self.engine.submit(request)
        return request

    async def busy(self) -> InferRequest:
        """Keep its one Instance busy until the gate is opened."""
        self.gate.close()
        request = self.submit()
        await self.gate.entered()
        return request

    @property
    def failures(self) -> dict[str, int]:
        return {reason: count for reason, count in self.model.statistics.snapshot().failures.items() if count}


def spec_of(name: str = "m", version: int = 1, *, count: int = 1, **policy: Any) -> ModelSpec:
    policy = {"max_batch_rows": ROWS, "cap_rows": ROWS, "executor": "thread", **policy}
    return ModelSpec(
        name, version, Path("model"), policy=BatchPolicy(**policy), instances=(InstanceGroup(count),), backend="fake"
    )


def engine_of(*backends: Backend) -> Engine:
    """An Engine whose loader returns the backends one after another, and then the last one repeatedly."""
    remaining = list(backends)

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return Engine(asyncio.get_running_loop(), {"fake": load})


@asynccontextmanager
async def serving(
    function: Function = same_and_sum, graph: Signature = SAME_AND_SUM, **options: Any
) -> AsyncIterator[Serving]:
    gate = Gate(function)
    backend = FakeBackend(graph, gate)
    engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
    model = await engine.load(spec_of(**options))
    backend.runs.clear()  # runs of the warm-up
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            yield Serving(engine, model, backend, gate, ListSink())
    finally:
        gate.open()
        await engine.stop(PATIENCE_S)


def rows_run(backend: FakeBackend) -> list[int]:
    return [run.rows for run in backend.runs]


def outputs_of(request: InferRequest) -> list[Any]:
    assert request.error is None
    return [output.tolist() for output in request.outputs or []]


def code_of(request: InferRequest) -> Code | None:
    return None if request.error is None else request.error.code


def refused(call: Callable[[], object]) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        call()
    return caught.value.code, caught.value.message


class TestLoading:
    async def test_a_loaded_model_is_completed_and_found(self) -> None:
        async with serving() as house:
            assert house.engine.model("m") is house.engine.model("m", "1") is house.model
            assert house.engine.models() == [house.model]
            assert house.model.signature == replace(SAME_AND_SUM, batched=True)

    async def test_a_request_without_a_version_gets_the_highest_version(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        models = {version: await engine.load(spec_of(version=version)) for version in (9, 10, 2)}

        assert engine.model("m") is models[10]
        assert engine.models() == [models[2], models[9], models[10]]
        await engine.unload("m", 10)
        assert engine.model("m") is models[9]
        await engine.stop(0)

    async def test_models_are_listed_by_name(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        for name in ("b", "a"):
            await engine.load(spec_of(name))

        assert [model.name for model in engine.models()] == ["a", "b"]
        await engine.stop(0)

    async def test_a_model_that_is_not_loaded_is_not_found(self) -> None:
        async with serving() as house:
            expected = Code.NOT_FOUND, "Request for unknown model: 'n' is not found"
            assert refused(lambda: house.engine.model("n")) == expected
            expected = Code.NOT_FOUND, "Request for unknown model: 'm' version 2 is not found"
            assert refused(lambda: house.engine.model("m", "2")) == expected
            with pytest.raises(InferError, match="is not found"):
                await house.engine.unload("m", 2)

    async def test_an_unknown_backend_is_reported_with_the_known_backends(self) -> None:
        async with serving() as house:
            with pytest.raises(InferError, match="unknown backend 'caffe' for model 'm', known: fake"):
                await house.engine.load(replace(spec_of(), backend="caffe"))

    async def test_the_generation_changes_with_every_load_and_unload(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        generations = [engine.generation]
        for version in (1, 2, 1):
            await engine.load(spec_of(version=version))
            generations.append(engine.generation)
        await engine.unload("m", 2)
        generations.append(engine.generation)

        assert len(set(generations)) == len(generations)
        await engine.stop(0)

    async def test_a_model_that_contradicts_its_configuration_is_closed_and_not_served(self) -> None:
        backend = FakeBackend(SAME_AND_SUM, same_and_sum)
        engine = engine_of(backend)
        with pytest.raises(InferError):
            await engine.load(replace(spec_of(), inputs=(TensorSpec("z", "FP32", (4,)),)))

        assert backend.closed
        assert engine.models() == []

    async def test_backends_already_loaded_are_closed_when_another_device_fails(self) -> None:
        first = FakeBackend(SAME_AND_SUM, same_and_sum)

        def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
            if device == "cuda:0":
                raise InferError(Code.INTERNAL, "no such device")
            return first

        engine = Engine(asyncio.get_running_loop(), {"fake": load})
        with pytest.raises(InferError, match="no such device"):
            await engine.load(replace(spec_of(), instances=(InstanceGroup(1, ("cpu", "cuda:0")),)))

        assert first.closed
        assert engine.models() == []

    async def test_a_model_that_cannot_be_bound_is_closed(self) -> None:
        class Unbindable(FakeBackend):
            def bind(self, signature: Signature, capacity_rows: int) -> Binding:
                raise InferError(Code.INTERNAL, "out of memory")

        backend = Unbindable(SAME_AND_SUM, same_and_sum)
        with pytest.raises(InferError, match="out of memory"):
            await engine_of(backend).load(spec_of())

        assert backend.closed

    async def test_a_model_that_fails_on_zeros_is_served(self) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if not inputs[0].all():
                raise ZeroDivisionError
            return same_and_sum(inputs)

        async with serving(function) as house:
            assert len(await house.engine.infer(house.model, [np.ones((1, 4), np.float32)])) == 2

    async def test_every_device_gets_the_configured_number_of_instances(self) -> None:
        backends = [FakeBackend(SAME_AND_SUM, same_and_sum) for _ in range(2)]
        engine = engine_of(*backends)
        model = await engine.load(replace(spec_of(), instances=(InstanceGroup(2, ("cpu", "cuda:0")),)))

        assert model.spec.instances == (InstanceGroup(2, ("cpu",)), InstanceGroup(2, ("cuda:0",)))
        assert len(model.instances) == 4
        await engine.stop(0)
        assert [backend.closed for backend in backends] == [True, True]


class TestReplacing:
    async def test_a_replaced_model_finishes_its_accepted_requests_and_is_closed(self) -> None:
        gate = Gate(same_and_sum)
        old, new = FakeBackend(SAME_AND_SUM, gate), FakeBackend(SAME_AND_SUM, same_and_sum)
        engine, sink = engine_of(old, new), ListSink()
        first = await engine.load(spec_of())
        gate.close()
        accepted = [fake_request(first, sink=sink) for _ in range(3)]
        engine.submit(accepted[0])
        await gate.entered()
        for request in accepted[1:]:
            engine.submit(request)
        replacing = asyncio.ensure_future(engine.load(spec_of()))
        async with asyncio.timeout(PATIENCE_S):
            while engine.model("m") is first:  # noqa: ASYNC110 - publishing has no event
                await asyncio.sleep(0)

        # the new model serves while the old one still runs
        await engine.infer(engine.model("m"), [np.zeros((1, 4), np.float32)])
        assert not old.closed
        assert refused(lambda: engine.submit(fake_request(first, sink=sink)))[0] is Code.NOT_READY
        gate.open()
        second = await replacing

        assert second is engine.model("m")
        assert [code_of(request) for request in await sink.holds(3)] == [None] * 3
        assert (old.closed, new.closed) == (True, False)
        await engine.stop(0)

    async def test_an_unloaded_model_first_finishes_its_accepted_requests(self) -> None:
        async with serving() as house:
            await house.busy()
            house.submit()
            unloading = asyncio.ensure_future(house.engine.unload("m", 1))
            await asyncio.sleep(0)

            assert refused(lambda: house.engine.model("m"))[0] is Code.NOT_FOUND
            text = "Server is stopping, scheduler for model has stopped accepting new inference requests"
            assert refused(house.submit) == (Code.NOT_READY, text)
            assert not house.backend.closed
            house.gate.open()
            await unloading
            assert [code_of(request) for request in house.sink.requests] == [None, None]
            assert house.backend.closed

    async def test_a_version_can_be_unloaded_only_once(self) -> None:
        async with serving() as house:
            await house.engine.unload("m", 1)
            with pytest.raises(InferError, match="version 1 is not found"):
                await house.engine.unload("m", 1)


class TestSwapping:
    async def test_a_model_is_not_found_before_it_is_published(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        model = await engine.open(spec_of())
        generation = engine.generation

        assert refused(lambda: engine.model("m"))[0] is Code.NOT_FOUND
        assert engine.publish("m", [model]) == []
        assert engine.model("m") is model
        assert engine.generation != generation
        await engine.stop(0)

    async def test_all_versions_of_a_name_are_replaced_at_once(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        one, two, three, again = [await engine.open(spec_of(version=version)) for version in (1, 2, 3, 2)]
        other = await engine.load(spec_of("n"))
        engine.publish("m", [one, two])

        assert engine.publish("m", [again, three]) == [one, two]
        assert engine.models() == [again, three, other]
        assert engine.publish("m", [again]) == [three]
        assert engine.publish("m", []) == [again]
        assert engine.models() == [other]
        for model in (one, two, three, again):
            await engine.retire(model)
        await engine.stop(0)

    async def test_an_unloaded_or_failed_version_is_not_ready_and_an_unknown_version_is_not_found(self) -> None:
        engine = engine_of(FakeBackend(SAME_AND_SUM, same_and_sum))
        one, two = [await engine.open(spec_of(version=version)) for version in (1, 2)]
        engine.publish("m", [one], ["2"])
        unready = "Request for unknown model: 'm' version {} is not at ready state"

        assert refused(lambda: engine.model("m", "2")) == (Code.NOT_FOUND, unready.format(2))
        assert refused(lambda: engine.model("m", "3"))[1] == "Request for unknown model: 'm' version 3 is not found"
        engine.publish("m", [two])
        assert engine.model("m", "2") is two
        assert refused(lambda: engine.model("m", "1"))[1] == unready.format(1)
        engine.publish("m", [])
        text = "Request for unknown model: 'm' has no available versions"
        assert refused(lambda: engine.model("m")) == (Code.NOT_FOUND, text)
        assert refused(lambda: engine.model("m", "2"))[1] == unready.format(2)
        for model in (one, two):
            await engine.retire(model)
        await engine.stop(0)

    async def test_a_held_model_continues_serving_until_it_is_released(self) -> None:
        async with serving() as house:
            house.engine.hold(house.model)
            house.engine.publish("m", [])
            retiring = asyncio.ensure_future(house.engine.retire(house.model))
            await asyncio.sleep(0)
            late = house.submit()
            await house.sink.holds(1)

            assert code_of(late) is None
            assert not retiring.done()
            house.engine.release(house.model)
            await retiring
            assert house.backend.closed
            assert refused(house.submit)[0] is Code.NOT_READY

    async def test_a_retired_model_finishes_its_accepted_requests_and_is_closed(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=20_000) as house:
            accepted = [house.submit(), house.submit()]
            house.engine.publish("m", [])
            await house.engine.retire(house.model)

            assert [code_of(request) for request in accepted] == [None, None]
            assert house.sink.requests == accepted
            assert house.backend.closed
            assert house.model.instances == []
            assert house.engine.inflight == 0

    async def test_canceling_the_last_request_of_a_retiring_model_completes_the_retirement(self) -> None:
        async with serving(max_queue_delay_us=HOUR_US) as house:
            request = house.submit()
            house.engine.publish("m", [])
            retiring = asyncio.ensure_future(house.engine.retire(house.model))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not retiring.done()
            house.engine.cancel(request)
            await retiring

            assert house.backend.closed

    async def test_a_loaded_model_has_its_load_time(self) -> None:
        async with serving() as house:
            assert house.model.load_s > 0

    async def test_no_thread_is_left_when_starting_instance_threads_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = ThreadInstance.start

        def only_two(instance: ThreadInstance) -> None:
            if threading.active_count() >= before + 2:
                raise RuntimeError("can't start new thread")
            start(instance)

        backend = FakeBackend(SAME_AND_SUM, same_and_sum)
        monkeypatch.setattr(ThreadInstance, "start", only_two)
        before = threading.active_count()
        with pytest.raises(RuntimeError, match="new thread"):
            opening.open_model(spec_of(count=5), {"fake": fake_loader(backend)}, lambda model, ran: None)

        assert backend.closed
        assert threading.active_count() == before

    async def test_a_model_that_fails_during_warmup_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(model: Model) -> None:
            raise KeyboardInterrupt

        backend = FakeBackend(SAME_AND_SUM, same_and_sum)
        monkeypatch.setattr(warmup, "sweep", interrupted)
        before = threading.active_count()
        with pytest.raises(KeyboardInterrupt):
            opening.open_model(spec_of(), {"fake": fake_loader(backend)}, lambda model, ran: None)

        assert backend.closed
        assert threading.active_count() == before


class TestServing:
    async def test_every_request_gets_its_own_rows_exactly_once(self, executor: str) -> None:
        dice = random.Random(7)
        async with serving(executor=executor) as house:
            submitted = []
            for value in range(300):
                submitted.append(house.submit(dice.randrange(6), value))
                if not dice.randrange(8):
                    await asyncio.sleep(0)
            delivered = await house.sink.holds(300)

            assert sorted(map(id, delivered)) == sorted(map(id, submitted))
            for value, request in enumerate(submitted):
                assert outputs_of(request) == [[[value] * 4] * request.rows, [4 * value] * request.rows]
            assert max(rows_run(house.backend)) <= ROWS
            assert sum(rows_run(house.backend)) == sum(request.rows for request in submitted)
            assert house.model.statistics.snapshot().success.count == 300
            assert (house.model.inflight, house.engine.inflight, house.model.waiting_requests) == (0, 0, 0)

    async def test_requests_of_one_loop_turn_share_a_batch_and_a_delivery(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            submitted = [house.submit(2), house.submit(3), house.submit(1)]
            await house.sink.holds(3)

            assert rows_run(house.backend) == [6]
            assert house.sink.deliveries == [submitted]

    async def test_each_sink_receives_only_its_own_requests_of_a_batch(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            other = ListSink()
            requests = [house.request() for _ in range(4)]
            for request in requests[1::2]:
                request.sink = other
            for request in requests:
                house.engine.submit(request)
            await house.sink.holds(2)
            await other.holds(2)

            assert rows_run(house.backend) == [4]
            assert (house.sink.deliveries, other.deliveries) == ([requests[::2]], [requests[1::2]])

    async def test_a_batch_grows_while_its_instance_is_busy(self) -> None:
        async with serving() as house:
            await house.busy()
            for _ in range(5):
                house.submit(2)
                await asyncio.sleep(0)
            house.gate.open()
            await house.sink.holds(6)

            assert rows_run(house.backend) == [1, 10]

    async def test_requests_of_different_shapes_do_not_share_a_batch(self, executor: str) -> None:
        async with serving(list, FREE, executor=executor) as house:
            requests = [house.request(value=width, key=((width,),)) for width in (2, 3, 2, 3)]
            for request in requests:
                house.engine.submit(request)
            await house.sink.holds(4)

            assert sorted(rows_run(house.backend)) == [2, 2]
            assert [outputs_of(request) for request in requests] == [[[[width] * width]] for width in (2, 3, 2, 3)]

    async def test_only_requested_outputs_are_delivered(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            selections = [(1,), (0, 1), (1, 0), ()]
            requests = [house.request(value=1) for _ in selections]
            for request, positions in zip(requests, selections, strict=True):
                request.output_positions = positions
                house.engine.submit(request)
            await house.sink.holds(4)

            outputs = [[[1] * 4], [4]]
            assert [outputs_of(each) for each in requests] == [
                [outputs[place] for place in positions] for positions in selections
            ]

    async def test_requests_without_rows_are_served(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            alone = house.submit(0)
            await house.sink.holds(1)
            among = [house.submit(0), house.submit(2), house.submit(0)]
            await house.sink.holds(4)

            assert rows_run(house.backend) == [0, 2]
            assert [outputs_of(each)[1] for each in (alone, *among)] == [[], [], [0, 0], []]

    async def test_a_model_without_rows_runs_one_request_at_a_time(self, executor: str) -> None:
        graph = Signature((TensorSpec("x", "FP32", (2, -1)),), (TensorSpec("y", "FP32", (1,)),))
        async with serving(total, graph, executor=executor, max_batch_rows=0) as house:
            arrays = [np.full((2, 3), value, np.float32) for value in range(4)]
            answers = await asyncio.gather(*(house.engine.infer(house.model, [array]) for array in arrays))

            assert [answer[0].tolist() for answer in answers] == [[0], [6], [12], [18]]
            assert len(house.backend.runs) == 4

    async def test_idle_instances_run_requests_that_arrive_together_in_parallel(self) -> None:
        together = threading.Barrier(2)
        meet = threading.Event()

        def function(inputs: list[Any]) -> list[Any]:
            if meet.is_set():
                together.wait(PATIENCE_S)
            return same_and_sum(inputs)

        async with serving(function, count=2, max_batch_rows=1) as house:
            meet.set()
            house.submit()
            house.submit()

            assert [code_of(request) for request in await house.sink.holds(2)] == [None, None]

    async def test_engines_in_one_process_are_independent(self, executor: str) -> None:
        async with serving(executor=executor) as one, serving(plus_one) as two:
            one.submit()
            two.submit()
            await one.sink.holds(1)
            await two.sink.holds(1)
            await one.engine.stop(0)
            two.submit()

            assert [outputs_of(request)[0] for request in await two.sink.holds(2)] == [[[1] * 4]] * 2
            assert [outputs_of(request)[0] for request in one.sink.requests] == [[[0] * 4]]
            assert (one.backend.closed, two.backend.closed) == (True, False)


class TestExecutors:
    async def test_a_model_with_the_loop_executor_runs_only_on_the_loop(self) -> None:
        ran_on: set[int] = set()

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.add(threading.get_ident())
            return list(inputs)

        async with serving(function, FREE, executor="loop") as house:
            ran_on.clear()  # runs of the warm-up
            for width in (1, 2, 3):
                house.engine.submit(house.request(key=((width,),)))
                await house.sink.holds(width)

        assert ran_on == {threading.get_ident()}

    async def test_a_model_with_the_thread_executor_never_runs_on_the_loop(self) -> None:
        ran_on: set[int] = set()

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.add(threading.get_ident())
            return list(inputs)

        async with serving(function, FREE, executor="thread") as house:
            for width in (1, 2, 3):
                house.engine.submit(house.request(key=((width,),)))
                await house.sink.holds(width)

        assert threading.get_ident() not in ran_on

    @pytest.mark.parametrize(("count", "on_loop"), [(1, True), (2, False)])
    async def test_a_model_with_short_runs_runs_on_the_loop_unless_it_has_several_instances(
        self, count: int, *, on_loop: bool
    ) -> None:
        ran_on: set[int] = set()

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.add(threading.get_ident())
            return list(inputs)

        async with serving(function, FREE, executor="auto", count=count) as house:
            ran_on.clear()  # runs of the warm-up
            costs = house.model.costs
            costs.predict_ns = lambda key, rows: 200_000  # type: ignore[method-assign]
            house.engine.submit(house.request(key=((7,),)))
            await house.sink.holds(1)

        assert (threading.get_ident() in ran_on) is on_loop

    async def test_the_loop_turns_between_two_batches(self) -> None:
        async with serving(executor="loop", cap_rows=1, max_batch_rows=2) as house:
            turns: list[int] = []
            for _ in range(3):
                house.submit()
            while len(house.sink.requests) < 3:
                await asyncio.sleep(0)
                turns.append(len(house.sink.requests))

        assert {1, 2, 3} <= set(turns)


class TestFailures:
    async def test_only_the_invalid_request_of_a_batch_fails(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            submitted = [house.submit(value=GUILTY if position == 3 else position) for position in range(8)]
            delivered = await house.sink.holds(8)

            assert sorted(map(id, delivered)) == sorted(map(id, submitted))
            assert [code_of(each) for each in submitted] == [*[None] * 3, Code.INVALID, *[None] * 4]
            assert outputs_of(submitted[7])[1] == [28]
            assert house.failures == {BACKEND: 1}
            assert house.model.statistics.snapshot().success.count == 7

    async def test_a_wrong_number_of_output_rows_is_an_internal_error_of_the_model(self, executor: str) -> None:
        async with serving(lambda inputs: [inputs[0], np.zeros(9, np.float32)], executor=executor) as house:
            house.submit()
            house.submit()
            delivered = await house.sink.holds(2)

            assert [code_of(request) for request in delivered] == [Code.INTERNAL] * 2
            assert "output 'sum' has 9 rows for a batch of 1" in str(delivered[0].error)

    async def test_the_model_continues_serving_after_an_error(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            house.submit(value=GUILTY)
            await house.sink.holds(1)
            house.submit(value=2)

            assert [code_of(request) for request in await house.sink.holds(2)] == [Code.INVALID, None]


class TestAdmission:
    async def test_string_inputs_count_toward_the_queue_limit_by_their_length(self) -> None:
        graph = Signature((TensorSpec("x", "BYTES", (-1, 1)),), (TensorSpec("y", "BYTES", (-1, 1)),))
        text = np.array([[b"x" * 1000]], np.object_)
        async with serving(list, graph, max_queue_bytes=2500) as house:
            house.gate.close()
            asking = [asyncio.ensure_future(house.engine.infer(house.model, [text]))]
            await house.gate.entered()
            asking += [asyncio.ensure_future(house.engine.infer(house.model, [text])) for _ in range(3)]
            await asyncio.sleep(0)
            house.gate.open()
            found = await asyncio.gather(*asking, return_exceptions=True)

        assert [type(each) for each in found] == [list, list, list, InferError]

    async def test_a_full_queue_rejects_requests_and_accepts_them_again_when_it_has_room(self) -> None:
        async with serving(max_queue_rows=4) as house:
            await house.busy()
            for _ in range(2):
                house.submit(2)

            assert refused(house.submit) == (Code.OVERLOADED, "Exceeds maximum queue size")
            assert refused(lambda: house.engine.make_room(house.model))[0] is Code.OVERLOADED
            assert house.failures == {REJECTED: 2}
            assert (house.model.waiting_rows, house.model.inflight) == (4, 3)
            house.gate.open()
            await house.sink.holds(3)
            house.submit()
            await house.sink.holds(4)

    async def test_a_rejected_request_is_not_delivered(self) -> None:
        async with serving(max_queue_requests=1) as house:
            running = await house.busy()
            waiting = house.submit()
            refused(house.submit)
            house.gate.open()

            assert await house.sink.holds(2) == [running, waiting]
        assert house.sink.requests == [running, waiting]


class TestCanceling:
    async def test_a_waiting_request_that_is_canceled_is_never_delivered(self) -> None:
        async with serving() as house:
            running = await house.busy()
            waiting = [house.submit() for _ in range(3)]
            house.engine.cancel(waiting[1])
            house.engine.cancel(waiting[1])
            assert (house.model.waiting_requests, house.model.inflight) == (2, 3)
            house.gate.open()
            await house.sink.holds(3)

            assert house.failures == {CANCELED: 1}
        assert house.sink.requests == [running, waiting[0], waiting[2]]

    async def test_a_running_request_that_is_canceled_is_finished_and_delivered(self) -> None:
        async with serving() as house:
            running = await house.busy()
            house.engine.cancel(running)
            house.gate.open()

            assert await house.sink.holds(1) == [running]
            assert house.failures == {}

    async def test_a_request_canceled_before_the_loop_turns_is_not_run(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            house.engine.cancel(house.submit())
            await asyncio.sleep(0)
            house.submit(2)
            await house.sink.holds(1)

            assert rows_run(house.backend) == [2]

    async def test_canceling_a_delivered_request_changes_nothing(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            request = house.submit()
            await house.sink.holds(1)
            house.engine.cancel(request)

            assert (house.model.inflight, house.failures) == (0, {})

    async def test_a_canceled_task_cancels_its_waiting_request(self) -> None:
        async with serving() as house:
            await house.busy()
            task = asyncio.ensure_future(house.engine.infer(house.model, [np.zeros((1, 4), np.float32)]))
            await asyncio.sleep(0)
            assert house.model.waiting_requests == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            assert (house.model.waiting_requests, house.failures) == (0, {CANCELED: 1})

    async def test_canceling_a_task_while_its_request_runs_leaves_the_model_serving(self) -> None:
        async with serving() as house:
            house.gate.close()
            task = asyncio.ensure_future(house.engine.infer(house.model, [np.zeros((1, 4), np.float32)]))
            await house.gate.entered()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            house.gate.open()
            house.submit()
            await house.sink.holds(1)

            assert house.model.inflight == 0

    async def test_canceling_a_request_releases_a_batch_that_now_has_a_preferred_size(self, executor: str) -> None:
        async with serving(
            executor=executor, max_batch_rows=8, preferred_rows=(4, 8), max_queue_delay_us=HOUR_US
        ) as house:
            first, between, last = house.submit(1), house.submit(2), house.submit(3)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            house.engine.cancel(between)

            assert await house.sink.holds(2) == [first, last]
            assert first.error is last.error is None


class TestDeadlines:
    async def test_a_waiting_request_expires_at_its_deadline_while_the_instance_is_busy(self) -> None:
        async with serving() as house:
            running = await house.busy()
            late, patient = house.submit(timeout_ns=MS), house.submit()
            await house.sink.holds(1)

            assert house.sink.requests == [late]
            assert code_of(late) is Code.EXPIRED
            assert (late.outputs, house.failures) == (None, {REJECTED: 1})
            assert house.model.inflight == 2
            house.gate.open()
            await house.sink.holds(3)
        assert house.sink.requests == [late, running, patient]

    async def test_a_near_deadline_does_not_wait_for_a_far_one(self) -> None:
        async with serving() as house:
            await house.busy()
            far = house.submit(timeout_ns=HOUR_US * 1000)
            near = [house.submit(timeout_ns=MS)]
            await house.sink.holds(1)
            near.append(house.submit(timeout_ns=MS))
            await house.sink.holds(2)

            assert house.sink.requests == near
            assert far.waiting

    async def test_requests_submitted_after_their_deadline_are_rejected_without_running(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            requests = [house.request() for _ in range(3)]
            for request in requests:
                request.deadline_ns = time.monotonic_ns() - 1
                with pytest.raises(InferError, match="Request timeout expired"):
                    house.engine.submit(request)

            assert (house.backend.runs, house.sink.requests) == ([], [])
            assert house.model.inflight == 0
            assert house.failures == {REJECTED: 3}

    async def test_a_request_finished_before_its_deadline_succeeds(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            house.submit(timeout_ns=HOUR_US * 1000)

            assert [code_of(request) for request in await house.sink.holds(1)] == [None]

    async def test_a_canceled_request_does_not_expire(self) -> None:
        async with serving() as house:
            await house.busy()
            house.engine.cancel(house.submit(timeout_ns=MS))
            later = house.submit(timeout_ns=2 * MS)
            await house.sink.holds(1)

            assert house.sink.requests == [later]
            assert house.failures == {CANCELED: 1, REJECTED: 1}


class TestHoldingOpen:
    async def test_a_partial_batch_is_held_for_the_queue_delay_and_then_runs(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=100_000) as house:
            first = house.submit()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            second = house.submit()
            delivered = await house.sink.holds(2)

            assert delivered == [first, second]
            assert house.backend.runs[-1].rows == 2

    async def test_a_batch_that_becomes_due_while_it_is_examined_runs(
        self, executor: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = time.monotonic_ns
        passes_ns = itertools.count(step=1_500_000)

        def later() -> int:
            return real() + next(passes_ns)

        async with serving(executor=executor, max_queue_delay_us=2_000) as house:
            for module in (engine_module, instance_module):
                monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=later))
            request = house.submit()

            assert await house.sink.holds(1) == [request]

    async def test_requests_left_over_by_a_full_batch_are_held_and_then_run(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=20_000) as house:
            for _ in range(ROWS + 2):
                house.submit()
            await house.sink.holds(ROWS + 2)

            assert rows_run(house.backend) == [ROWS, 2]

    async def test_a_full_batch_runs_at_once(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=HOUR_US) as house:
            for _ in range(ROWS):
                house.submit()
                await asyncio.sleep(0)
            await house.sink.holds(ROWS)

            assert rows_run(house.backend) == [ROWS]

    async def test_a_batch_of_a_preferred_size_runs_at_once(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=HOUR_US, preferred_rows=(4,)) as house:
            for _ in range(9):
                house.submit()
            await house.sink.holds(8)

            assert rows_run(house.backend) == [4, 4]
            assert house.model.waiting_requests == 1
            house.submit(3)
            await house.sink.holds(10)

    async def test_a_request_in_a_held_batch_expires_at_its_deadline(self, executor: str) -> None:
        async with serving(executor=executor, max_queue_delay_us=HOUR_US) as house:
            held, late = house.submit(), house.submit(timeout_ns=MS)
            await house.sink.holds(1)

            assert (house.sink.requests, code_of(late)) == ([late], Code.EXPIRED)
            assert held.waiting
            house.engine.cancel(held)

    async def test_a_batch_is_held_only_for_the_queue_delay_if_its_requests_deadline_is_far(
        self, executor: str
    ) -> None:
        async with serving(executor=executor, max_queue_delay_us=1_000) as house:
            house.submit(timeout_ns=HOUR_US * 1000)

            assert [code_of(request) for request in await house.sink.holds(1)] == [None]


class TestStopping:
    async def test_a_stopping_engine_finishes_accepted_requests_and_rejects_new_ones(self) -> None:
        async with serving() as house:
            await house.busy()
            house.submit()
            stopping = asyncio.ensure_future(house.engine.stop(PATIENCE_S))
            await asyncio.sleep(0)
            assert refused(house.submit)[0] is Code.NOT_READY
            house.gate.open()

            assert await stopping == 0
            assert [code_of(request) for request in house.sink.requests] == [None, None]
            assert house.backend.closed
            assert house.engine.models() == []

    async def test_an_idle_engine_stops_at_once_and_may_be_stopped_twice(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            assert [await house.engine.stop(0), await house.engine.stop(0)] == [0, 0]

    async def test_stop_returns_the_number_of_dropped_requests_when_its_time_is_up(self) -> None:
        async with serving() as house:
            running = await house.busy()
            waiting = [house.submit(), house.submit()]

            assert await house.engine.stop(0) == 3
            assert house.sink.requests == waiting
            assert [code_of(request) for request in waiting] == [Code.NOT_READY] * 2
            house.gate.open()
            assert await house.sink.holds(3) == [*waiting, running]
            assert house.engine.inflight == 0

    @pytest.mark.parametrize("ends", ["stop", "unload"])
    @pytest.mark.parametrize("policy", [{"max_queue_delay_us": HOUR_US}, {"hold_requests": 9}])
    async def test_a_held_batch_runs_at_once_when_the_engine_stops_or_its_model_is_unloaded(
        self, executor: str, policy: dict[str, Any], ends: str
    ) -> None:
        async with serving(executor=executor, **policy) as house:
            held = asyncio.ensure_future(house.engine.infer(house.model, [np.zeros((1, 4), np.float32)]))
            await asyncio.sleep(0)

            if ends == "stop":
                assert await house.engine.stop(PATIENCE_S) == 0
            else:
                await asyncio.wait_for(house.engine.unload("m", 1), PATIENCE_S)
            assert len(await held) == 2

    async def test_requests_waiting_in_a_held_model_being_unloaded_are_dropped_on_stop(self) -> None:
        async with serving() as house:
            await house.busy()
            waiting = house.submit()
            house.engine.hold(house.model)
            retiring = asyncio.ensure_future(house.engine.unload("m", 1))
            await asyncio.sleep(0)

            assert await house.engine.stop(0) == 2
            assert house.sink.requests == [waiting]
            house.engine.release(house.model)
            house.gate.open()
            await retiring

    async def test_a_stopping_engine_waits_for_models_being_unloaded(self) -> None:
        async with serving() as house:
            await house.busy()
            unloading = asyncio.ensure_future(house.engine.unload("m", 1))
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(house.engine.stop(PATIENCE_S))
            await asyncio.sleep(0)
            assert not stopping.done()
            house.gate.open()

            assert await stopping == 0
            assert [code_of(request) for request in house.sink.requests] == [None]
            await unloading


class TestInfer:
    async def test_infer_returns_all_outputs_or_the_requested_ones(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            inputs: list[Array | None] = [np.ones((2, 4), np.float32)]
            every = await house.engine.infer(house.model, inputs)
            one = await house.engine.infer(house.model, inputs, output_positions=(1,))

            assert [each.tolist() for each in every] == [[[1] * 4] * 2, [4, 4]]
            assert [each.tolist() for each in one] == [[4, 4]]

    async def test_infer_returns_outputs_that_are_not_tensors(self) -> None:
        graph = Signature((X,), (TensorSpec("p", "seq(map(int64,tensor(float)))", ()),))
        async with serving(zipmap, graph) as house:
            answers = await asyncio.gather(
                *(house.engine.infer(house.model, [np.full((1, 4), value, np.float32)]) for value in (1, 2))
            )

            assert answers == [[[{0: 1.0}]], [[{0: 2.0}]]]

    @pytest.mark.parametrize("shape", [(1, 5), (ROWS + 1, 4), ()])
    async def test_infer_checks_shapes_before_it_enqueues_the_request(self, shape: tuple[int, ...]) -> None:
        async with serving() as house:
            with pytest.raises(InferError) as caught:
                await house.engine.infer(house.model, [np.zeros(shape, np.float32)])

            assert caught.value.code is Code.INVALID
            assert house.engine.inflight == 0

    async def test_infer_raises_the_requests_error(self, executor: str) -> None:
        async with serving(executor=executor) as house:
            with pytest.raises(InferError, match="a guilty row"):
                await house.engine.infer(house.model, [np.full((1, 4), GUILTY, np.float32)])
            with pytest.raises(InferError, match="Request timeout expired"):
                await house.engine.infer(
                    house.model, [np.zeros((1, 4), np.float32)], options=RequestOptions(deadline_ns=1)
                )
