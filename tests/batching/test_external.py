"""ExternalInstance: Batches that run in another process, on executors that die, return, answer late or never."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.devices.placement import Devices
from penstock.batching.devices.rate_limiter import RateLimiter
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, InSequence, Key, RequestOptions
from penstock.batching.running import external as running
from penstock.batching.running.batch import Batch, split_by_result
from penstock.batching.running.external import ExecutorCallbacks, ExternalExecutor
from penstock.batching.running.external_models import OpenedVersion, complete_external
from penstock.batching.scheduling.request_checks import make_request
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, Resource, SequenceSpec
from penstock.batching.stream import StreamedAnswer, open_stream

GUARD_S = 20.0


class Elsewhere:
    """An executor that follows a plan for each Batch: `answer`, `late`, `fail`, `die`, `unbegun` or `again`.

    `again` answers every second request, and repeats the others. A Batch takes a number of loop `turns`, and so does
    the return after a death.
    """

    def __init__(self, plan: Callable[[], str], permanent: bool = False, turns: int = 3) -> None:
        self.takes: ExecutorCallbacks | None = None
        self.begun: list[list[str]] = []
        self.abandoned: list[str] = []
        self.received = asyncio.Event()
        self.closed = False
        self.most = 0
        self._plan = plan
        self._permanent = permanent
        self._turns = turns
        self._running = 0

    def attach(self, instance: ExecutorCallbacks) -> None:
        self.takes = instance

    def begin(self, batch: Batch) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        self.begun.append([request.id for request in batch.requests])
        self.received.set()
        batch.compute_start_ns = time.monotonic_ns()
        self._soon(self._turns, lambda: self._end(batch, self._plan()))

    def max_batch_ns(self, key: Key) -> int:
        return 0

    def abandon(self, request: InferRequest) -> None:
        self.abandoned.append(request.id)

    async def check_ready(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True

    def _soon(self, turns: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(then if not turns else lambda: self._soon(turns - 1, then))

    def _end(self, batch: Batch, what: str) -> None:
        assert self.takes is not None
        takes = self.takes
        self._running -= 1
        batch.compute_end_ns = batch.exec_end_ns = time.monotonic_ns()
        if what == "unbegun":
            self._down()
            takes.on_not_run(batch)
        elif what == "die":
            self._down()
            for request in batch.requests:
                request.error = InferError(Code.NOT_READY, "died")
            takes.on_free(batch, batch.requests)
        elif what == "again":
            batch.rerun_requests, answered = batch.requests[::2], batch.requests[1::2]
            for request in answered:
                _settle(request, fails=False)
            takes.on_free(batch, answered)
        elif what == "late":
            takes.on_free(batch, [])
            for request in batch.requests:
                self._soon(2, lambda request=request: self._late(batch, request))  # type: ignore[misc]
        else:
            for request in batch.requests:
                _settle(request, fails=what == "fail")
            takes.on_free(batch, batch.requests)

    def _late(self, batch: Batch, request: InferRequest) -> None:
        assert self.takes is not None
        answers = getattr(request, "answer_sink", None)
        if answers is not None:
            answers.send(StreamedAnswer({"y": request.inputs[0]}))
        _settle(request, fails=False)
        self.takes.on_answered(batch, [request])

    def _down(self) -> None:
        assert self.takes is not None
        takes = self.takes
        takes.on_down(InferError(Code.NOT_READY, "gone"), permanent=False)
        if self._permanent:
            self._soon(2, lambda: takes.on_down(InferError(Code.NOT_READY, "will not come back"), permanent=True))
        else:
            self._soon(5, takes.on_up)


class Remembers(Elsewhere):
    """An executor that records requests of sequences that it has not begun, or lost with its process."""

    def __init__(self, plan: Callable[[], str]) -> None:
        super().__init__(plan)
        self.strangers: list[str] = []
        self._known: set[int | str] = set()

    def begin(self, batch: Batch) -> None:
        for request in batch.requests:
            assert request.sequence is not None
            if request.sequence.start:
                self._known.add(request.sequence.id)
            elif request.sequence.id not in self._known:
                self.strangers.append(request.id)
        super().begin(batch)

    def _down(self) -> None:
        self._known.clear()
        super()._down()


def _settle(request: InferRequest, *, fails: bool) -> None:
    if fails:
        request.error = InferError(Code.INTERNAL, "failed")
    else:
        (array,) = request.inputs
        request.outputs = [array]


class Loads:
    def __init__(self, executors: Sequence[Elsewhere]) -> None:
        self._executors = list(executors)

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        executors: list[ExternalExecutor] = list(self._executors)
        return OpenedVersion(complete_external(spec), executors, "elsewhere")


def spec_of(count: int = 1, **more: object) -> ModelSpec:
    policy = BatchPolicy(max_batch_rows=4, cap_rows=4)
    tensors = {"inputs": (TensorSpec("x", "FP32", (1,)),), "outputs": (TensorSpec("y", "FP32", (1,)),)}
    terms = {"policy": policy, "instances": (InstanceGroup(count),), "declared_config": "{}", **tensors, **more}
    return ModelSpec("m", 1, Path(), backend="elsewhere", **terms)  # type: ignore[arg-type]


def run(executors: Sequence[Elsewhere], scene: Callable[[Engine, Model], Awaitable[None]], **more: object) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            engine = Engine(asyncio.get_running_loop(), {})
            engine.devices = Devices(RateLimiter())
            engine.external_loaders["elsewhere"] = Loads(executors)
            model = await engine.load(spec_of(len(executors), **more))
            await scene(engine, model)
            assert model.inflight == 0
            assert await engine.stop(1.0) == 0
            assert all(each.closed for each in executors)

    asyncio.run(main())


def x(value: float) -> list[np.ndarray | None]:
    return [np.array([[value]], np.float32)]


class Ledger:
    """A sink that records how often each request is delivered, and with what result."""

    def __init__(self) -> None:
        self.ends: dict[str, list[str]] = {}
        self.done = asyncio.Event()
        self.expected = 0

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            right = request.outputs is not None and float(request.outputs[0][0, 0]) == float(request.id)
            end = request.error.message if request.error is not None else "right" if right else "wrong"
            self.ends.setdefault(request.id, []).append(end)
        if len(self.ends) == self.expected:
            self.done.set()


async def submit_all(engine: Engine, model: Model, count: int, ledger: Ledger) -> None:
    ledger.expected = count
    for number in range(count):
        request = make_request(model, x(number))
        request.id, request.sink = str(number), ledger
        engine.submit(request)
        if number % 7 == 0:
            await asyncio.sleep(0)
    await ledger.done.wait()


async def submit_sequences(engine: Engine, model: Model, ledger: Ledger) -> None:
    """Submit eight sequences of five requests in turn, forward and back; an id's last digit is its position."""
    ledger.expected = 40
    for step in range(5):
        for sequence in range(1, 9) if step % 2 == 0 else range(8, 0, -1):
            request = make_request(model, x(10 * sequence + step))
            request.id, request.sink = str(10 * sequence + step), ledger
            request.sequence = InSequence(sequence, step == 0, step == 4)
            engine.submit(request)
            if sequence % 3 == 0:
                await asyncio.sleep(0)
    await ledger.done.wait()


def test_waiting_requests_run_together_in_a_batch() -> None:
    outside = Elsewhere(lambda: "answer")

    async def scene(engine: Engine, model: Model) -> None:
        found = await asyncio.gather(*(engine.infer(model, x(number)) for number in range(6)))
        assert [float(outputs[0][0, 0]) for outputs in found] == [0, 1, 2, 3, 4, 5]

    run([outside], scene)

    assert [len(ids) for ids in outside.begun] == [4, 2]


def test_each_executor_runs_one_batch_at_a_time() -> None:
    executors = [Elsewhere(lambda: "answer") for _ in range(2)]

    async def scene(engine: Engine, model: Model) -> None:
        await submit_all(engine, model, 40, Ledger())

    run(executors, scene)

    assert [each.most for each in executors] == [1, 1]
    assert all(each.begun for each in executors)


@pytest.mark.parametrize("seed", range(30))
def test_every_request_is_delivered_once_whatever_its_executor_does(seed: int) -> None:
    chance = random.Random(seed)
    executors = [
        Elsewhere(lambda: chance.choice(["answer", "answer", "late", "fail", "die", "unbegun"]))
        for _ in range(chance.randint(1, 3))
    ]
    ledger: list[Ledger] = []

    async def scene(engine: Engine, model: Model) -> None:
        ledger.append(Ledger())
        await submit_all(engine, model, 60, ledger[0])

    run(executors, scene)

    ends = ledger[0].ends
    assert len(ends) == 60
    assert all(len(end) == 1 for end in ends.values())
    assert {end[0] for end in ends.values()} <= {"right", "failed", "died"}


@pytest.mark.parametrize("what", ["take_from", "learn"])
def test_an_internal_scheduling_error_fails_only_the_current_request_and_later_ones_are_served(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "FAULT_RETRY_S", 0.0)

    async def scene(engine: Engine, model: Model) -> None:
        original: Callable[..., Any] = getattr(model.scheduler, what)

        def fail(*_: Any, **__: Any) -> None:
            setattr(model.scheduler, what, original)
            raise ZeroDivisionError("the next one goes well")

        first = Ledger()
        setattr(model.scheduler, what, fail)
        await submit_all(engine, model, 1, first)
        texts = {"take_from": "model 'm': the request could not be scheduled", "learn": "right"}
        assert first.ends == {"0": [texts[what]]}
        await submit_all(engine, model, 6, second := Ledger())
        assert set(map(tuple, second.ends.values())) == {("right",)}

    run([Elsewhere(lambda: "answer")], scene)


@pytest.mark.parametrize(("direct", "rows"), [(True, 1), (True, 2), (False, 4)])
def test_a_sequence_stays_on_the_executor_where_it_began(direct: bool, rows: int) -> None:
    first, second = Elsewhere(lambda: "answer"), Elsewhere(lambda: "answer")

    async def scene(engine: Engine, model: Model) -> None:
        async def ask(number: int, *, start: bool = False) -> None:
            await engine.infer(model, x(number), options=RequestOptions(sequence=InSequence(number, start)))

        await asyncio.gather(ask(1, start=True), ask(2, start=True))
        for number in (2, 1, 2):
            await ask(number)
        await asyncio.gather(ask(2), ask(1))

    run([first, second], scene, sequence=SequenceSpec(direct=direct), policy=BatchPolicy(rows, cap_rows=rows))

    assert [len(each.begun) for each in (first, second)] == [3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_every_request_of_a_sequence_is_answered_whatever_its_executor_does(seed: int) -> None:
    chance = random.Random(seed)
    executors = [Remembers(lambda: chance.choice(["answer", "late", "fail", "die", "unbegun"])) for _ in range(2)]
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        await submit_sequences(engine, model, ledger)

    run(executors, scene, sequence=SequenceSpec(direct=bool(seed % 2), max_delay_us=seed % 3, min_utilization=1.0))

    assert len(ledger.ends) == 40
    ends = {end for (end,) in ledger.ends.values() if "must specify the START flag" not in end}
    assert ends <= {"right", "failed", "died"}
    assert [each.strangers for each in executors] == [[], []]


@pytest.mark.parametrize("seed", range(20))
def test_every_iterative_request_is_answered_whatever_its_executor_does(seed: int) -> None:
    chance = random.Random(seed)
    plans = ["again", "again", "again", "answer", "late", "fail", "die", "unbegun"]
    executors = [Remembers(lambda: chance.choice(plans)) for _ in range(chance.randint(1, 2))]
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        await submit_all(engine, model, 40, ledger)
        assert (model.waiting_requests, model.waiting_rows, model.scheduler.nbytes) == (0, 0, 0)

    sequence = SequenceSpec(direct=bool(seed % 2), max_delay_us=seed % 3, min_utilization=1.0, iterative=True)
    run(executors, scene, sequence=sequence)

    assert len(ledger.ends) == 40
    ends = {end for (end,) in ledger.ends.values() if "that ran the request was lost" not in end}
    assert ends <= {"right", "failed", "died"}
    assert [each.strangers for each in executors] == [[]] * len(executors)


@pytest.mark.parametrize(("direct", "sizes"), [(True, [(1, 2), (3, 1), (4, 1)]), (False, [(1, 2), (2, 1), (4, 1)])])
def test_each_iteration_of_a_request_counts_and_each_batch_counts_once(
    direct: bool, sizes: list[tuple[int, int]]
) -> None:
    plans = iter(["again", "again", "again"])
    outside = Elsewhere(lambda: next(plans, "answer"))
    before = time.monotonic_ns()

    async def scene(engine: Engine, model: Model) -> None:
        await submit_all(engine, model, 4, Ledger())  # 4, 2 and 1 of them run, and the last once more
        counted = model.statistics.snapshot()

        assert [(each.rows, each.count) for each in counted.batch_stats] == sizes
        assert (counted.inference_count, counted.execution_count) == (8, 4)
        assert (counted.success.count, counted.queue.count, counted.fail.count) == (8, 8, 0)
        assert counted.queue.ns <= 8 * (time.monotonic_ns() - before)

    run([outside], scene, sequence=SequenceSpec(direct=direct, iterative=True))


def test_an_iterative_request_in_a_held_batch_runs_when_the_delay_is_over() -> None:
    plans = iter(["again", "again", "answer"])
    outside = Elsewhere(lambda: next(plans))

    async def scene(engine: Engine, model: Model) -> None:
        assert (await engine.infer(model, x(3)))[0].tolist() == [[3]]

    run([outside], scene, sequence=SequenceSpec(max_delay_us=1, min_utilization=1.0, iterative=True))

    assert len(outside.begun) == 3


def test_an_iterative_request_may_be_canceled_between_iterations() -> None:
    plans = iter(["again"] * 4)
    outside = Elsewhere(lambda: next(plans, "answer"))
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        ledger.expected = 1
        requests = [make_request(model, x(number)) for number in range(2)]
        for number, request in enumerate(requests):
            request.id, request.sink = str(number), ledger
            engine.submit(request)
        for _ in range(3):  # they alternate: the second has run, and waits while the first runs again
            await outside.received.wait()
            outside.received.clear()
        engine.cancel(requests[1])
        await ledger.done.wait()
        assert model.statistics.snapshot().failures["CANCELED"] == 1

    spec = SequenceSpec(direct=False, max_candidates=2, iterative=True)
    run([outside], scene, sequence=spec, policy=BatchPolicy(1, cap_rows=1))

    assert outside.begun == [["0"], ["1"], ["0"], ["0"], ["0"]]
    assert (outside.abandoned, ledger.ends) == (["1"], {"0": ["right"]})


def test_no_sequence_begins_on_an_executor_that_never_returns() -> None:
    first = Elsewhere(lambda: "die", permanent=True)
    second = Elsewhere(lambda: "answer")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        await submit_sequences(engine, model, ledger)

        ends = [end for (end,) in ledger.ends.values()]
        assert len(ends) == 40
        assert ends.count("right") >= 20
        for number in range(20, 24):  # more than the second one has rows for, if the first had kept its sequences
            await engine.infer(model, x(number), options=RequestOptions(sequence=InSequence(number, start=True)))

    run([first, second], scene, sequence=SequenceSpec())

    assert len(first.begun) == 1


def test_a_request_that_was_not_begun_runs_on_another_executor() -> None:
    plans = iter(["unbegun"])
    first, second = Elsewhere(lambda: next(plans, "answer")), Elsewhere(lambda: "answer")

    async def scene(engine: Engine, model: Model) -> None:
        (output,) = await engine.infer(model, x(3))
        assert output.tolist() == [[3]]

    run([first, second], scene)

    assert (len(first.begun), len(second.begun)) == (1, 1)


def test_requests_returned_by_a_dead_executor_run_on_another_that_was_busy() -> None:
    plans = iter(["unbegun"])
    first, second = Elsewhere(lambda: next(plans, "answer"), permanent=True), Elsewhere(lambda: "answer")

    async def scene(engine: Engine, model: Model) -> None:
        found = await asyncio.gather(*(engine.infer(model, x(each)) for each in range(8)))
        assert [float(outputs[0][0, 0]) for outputs in found] == list(range(8))

    run([first, second], scene)

    assert (len(first.begun), len(second.begun)) == (1, 2)


def test_waiting_requests_fail_when_no_executor_will_return() -> None:
    plans = iter(["die"])
    outside = Elsewhere(lambda: next(plans, "answer"), permanent=True)

    async def scene(engine: Engine, model: Model) -> None:
        found = await asyncio.gather(*(engine.infer(model, x(each)) for each in range(6)), return_exceptions=True)
        texts = [getattr(each, "message", "") for each in found]
        assert texts == ["died"] * 4 + ["will not come back"] * 2
        assert not model.healthy
        with pytest.raises(InferError, match="will not come back"):
            await engine.infer(model, x(1))

    run([outside], scene)


def test_a_model_is_unhealthy_while_none_of_its_executors_runs() -> None:
    plans = iter(["die"])
    outside = Elsewhere(lambda: next(plans, "answer"))

    async def scene(engine: Engine, model: Model) -> None:
        with pytest.raises(InferError, match="died"):
            await engine.infer(model, x(1))
        assert not model.healthy
        assert (await engine.infer(model, x(2)))[0].tolist() == [[2]]
        assert model.healthy

    run([outside], scene)


def test_a_decoupled_request_counts_as_in_flight_until_its_last_answer() -> None:
    outside = Elsewhere(lambda: "late")

    async def scene(engine: Engine, model: Model) -> None:
        request = make_request(model, x(5))
        with open_stream(engine, request) as answers:
            found = [await answers.next(), await answers.next()]
        assert [float(answer.outputs["y"][0, 0]) for answer in found if answer is not None] == [5]
        assert model.inflight == 0

    run([outside], scene, decoupled=True)


def test_a_client_that_stops_reading_answers_is_reported_to_the_executor() -> None:
    outside = Elsewhere(lambda: "late")

    async def scene(engine: Engine, model: Model) -> None:
        request = make_request(model, x(5))
        request.id = "gone"
        with open_stream(engine, request) as answers:
            next_answer = asyncio.ensure_future(answers.next())
            await outside.received.wait()
            next_answer.cancel()
            await asyncio.gather(next_answer, return_exceptions=True)
        await engine.retire(model)

    run([outside], scene, decoupled=True)

    assert outside.abandoned == ["gone"]


def test_instances_that_share_a_resource_run_one_after_another() -> None:
    running = [0, 0]

    class Counted(Elsewhere):
        def begin(self, batch: Batch) -> None:
            running[0] += 1
            running[1] = max(running)
            super().begin(batch)

        def _end(self, batch: Batch, what: str) -> None:
            running[0] -= 1
            super()._end(batch, what)

    executors = [Counted(lambda: "answer") for _ in range(2)]
    groups = (InstanceGroup(2, resources=(Resource("one", 1),)),)

    async def scene(engine: Engine, model: Model) -> None:
        await submit_all(engine, model, 40, Ledger())

    run(executors, scene, instances=groups)

    assert running == [0, 1]
    assert all(each.begun for each in executors)


def test_of_two_instances_sharing_a_resource_the_one_of_priority_2_runs_half_as_often() -> None:
    executors = [Elsewhere(lambda: "answer") for _ in range(2)]
    groups = tuple(InstanceGroup(1, resources=(Resource("r", 1),), rate_priority=priority) for priority in (1, 2))

    async def scene(engine: Engine, model: Model) -> None:
        await asyncio.gather(*(engine.infer(model, x(number)) for number in range(30)))

    run(executors, scene, instances=groups, policy=BatchPolicy(max_batch_rows=1, cap_rows=1))

    assert [len(each.begun) for each in executors] == [20, 10]


def test_an_executor_gets_no_batch_longer_than_its_limit() -> None:
    class Brief(Elsewhere):
        def max_batch_ns(self, key: Key) -> int:
            return 1

    outside = Brief(lambda: "answer")

    async def scene(engine: Engine, model: Model) -> None:
        await submit_all(engine, model, 20, Ledger())

    run([outside], scene)

    assert [len(ids) for ids in outside.begun] == [1] * 20  # including the first, for which there is no prediction


def test_successful_requests_of_a_batch_are_delivered_together() -> None:
    requests = [InferRequest.__new__(InferRequest) for _ in range(4)]
    for request in requests:
        request.rows, request.error = 1, None
    requests[1].error = InferError(Code.INTERNAL, "failed")
    batch = Batch(requests, 4, (), 5)

    assert [part.requests for part in split_by_result(batch, requests)] == [[requests[0], *requests[2:]], [requests[1]]]
    assert [part.requests for part in split_by_result(batch, requests[2:])] == [requests[2:]]
