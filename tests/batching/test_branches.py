"""Branches: ensembles with decoupled steps, whose answers the test sends one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.answer_statistics import AnswerStatistics
from penstock.batching.ensembles import branches
from penstock.batching.ensembles.branches import Branches
from penstock.batching.request import InferRequest, InSequence, Key
from penstock.batching.running.batch import Batch
from penstock.batching.running.external import ExecutorCallbacks
from penstock.batching.running.external_models import OpenedVersion, complete_external
from penstock.batching.spec import BatchPolicy, EnsembleSpec, ModelSpec
from penstock.batching.statistics import BACKEND, CANCELED
from penstock.batching.stream import NOT_SINGLE_MESSAGE, StreamedAnswer, answer_bytes, open_stream
from tests.batching.ensembles import ROWS, House, ensemble_spec, house, step, tensors
from tests.fakes import Gate

pytestmark = pytest.mark.anyio
MOST = branches.MAX_ACTIVE
SLOW = 10

SPREAD = ensemble_spec("spread", "in", "out", step("many", "x=in", "y=mid"), step("plus", "x=mid", "y=out"))
BARE = ensemble_spec("bare", "in", "out", step("many", "x=in", "y=out"))
NESTED = ensemble_spec("nested", "in", "out", step("spread", "in=in", "out=mid"), step("double", "x=mid", "y=out"))
TWICE = ensemble_spec("twice", "in", "out", step("many", "x=in", "y=mid"), step("more", "x=mid", "y=out"))
FAN = ensemble_spec(
    "fan", "in", "sum difference",
    step("many", "x=in", "y=mid"), step("double", "x=mid", "y=doubled"),
    step("both", "a=mid b=doubled", "sum=sum difference=difference"),
)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class Teller:
    """An executor of a decoupled model: the test sends its answers and ends its requests."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.abandoned: list[InferRequest] = []
        self._came = asyncio.Event()
        self._batches: dict[InferRequest, Batch] = {}
        self._takes: ExecutorCallbacks | None = None

    def attach(self, instance: ExecutorCallbacks) -> None:
        self._takes = instance

    def max_batch_ns(self, key: Key) -> int:
        return 0

    def begin(self, batch: Batch) -> None:
        now_ns = time.monotonic_ns()
        batch.compute_start_ns = batch.compute_end_ns = batch.exec_end_ns = now_ns
        self.requests += batch.requests
        self._batches.update(dict.fromkeys(batch.requests, batch))
        self._came.set()
        assert self._takes is not None
        asyncio.get_running_loop().call_soon(self._takes.on_free, batch, [])

    def abandon(self, request: InferRequest) -> None:
        self.abandoned.append(request)

    async def check_ready(self) -> bool:
        return True

    async def close(self) -> None:
        pass

    async def holds(self, count: int) -> list[InferRequest]:
        """Wait until it has received `count` requests."""
        while len(self.requests) < count:
            self._came.clear()
            await self._came.wait()
        return self.requests

    def answer(self, request: InferRequest, *values: float) -> None:
        """Give an answer of one row for each value."""
        for value in values:
            request.answer_sink.send(StreamedAnswer({"y": np.full((1, 4), value, np.float32)}))

    def end(self, request: InferRequest, error: InferError | None = None) -> None:
        """End a request."""
        request.outputs, request.error = [], error
        assert self._takes is not None
        self._takes.on_answered(self._batches[request], [request])


class TellerLoader:
    """Opens a Teller for each model name."""

    def __init__(self) -> None:
        self.instances: dict[str, Teller] = {}

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        instance = self.instances[spec.name] = Teller()
        return OpenedVersion(complete_external(spec), [instance], "told")


def decoupled_spec(name: str, **terms: Any) -> ModelSpec:
    return ModelSpec(
        name, 1, Path(name), inputs=tensors("x"), outputs=tensors("y"), policy=BatchPolicy(max_batch_rows=ROWS),
        backend="told", decoupled=True, declared_config="{}", **terms,
    )  # fmt: skip


def plus_one(inputs: list[Any]) -> list[Any]:
    if (inputs[0] < 0).any():
        raise InferError(Code.INVALID, "a guilty row")
    return [inputs[0] + 1]


def double(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 2]


def both(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + inputs[1], inputs[0] - inputs[1]]


@asynccontextmanager
async def served(*specs: ModelSpec) -> AsyncIterator[tuple[House, Teller]]:
    async with house() as system:
        loader = system.engine.external_loaders["told"] = TellerLoader()
        await system.engine.load(decoupled_spec("many"))
        await system.engine.load(decoupled_spec("more"))
        await system.serve("plus", plus_one)
        await system.serve("double", double)
        await system.serve("both", both, "a b", "sum difference")
        for spec in specs:
            await system.engine.load(spec)
        system.instances = loader.instances  # type: ignore[attr-defined]
        yield system, loader.instances["many"]
        for gate in system.gates.values():
            gate.open()
        while not system.at_rest():  # noqa: ASYNC110 - requests that outlive the test have no event
            await asyncio.sleep(0)


@asynccontextmanager
async def overtaken() -> AsyncIterator[tuple[House, Teller, Gate]]:
    """Serve `spread` whose second step has two Instances; a row of SLOW waits for its Gate."""
    async with house() as system:
        loader = system.engine.external_loaders["told"] = TellerLoader()
        await system.engine.load(decoupled_spec("many"))
        await system.serve("plus", plus_one, count=2, cap_rows=1)
        await system.engine.load(SPREAD)
        slow = Gate(plus_one)

        def slowly_or_at_once(inputs: list[Any]) -> list[Any]:
            return slow(inputs) if inputs[0].flat[0] == SLOW else plus_one(inputs)

        system.backends["plus"].function = slowly_or_at_once
        slow.close()
        yield system, loader.instances["many"], slow


class Client:
    """Receives the answers of one request as they arrive."""

    def __init__(self, system: House, name: str, value: float, output: str = "out", **terms: int) -> None:
        self.request = system.request(name, value)
        for term, setting in terms.items():
            setattr(self.request, term, setting)
        self.came: list[float] = []
        self.finals: list[bool] = []
        self._output = output
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._take(system))

    async def _take(self, system: House) -> list[float]:
        with open_stream(system.engine, self.request) as answers:
            while (answer := await answers.next()) is not None:
                self.came.append(float(answer.outputs[self._output].flat[0]))
                self.finals.append(answer.final)
                self._more.set()
        return self.came

    async def holds(self, count: int) -> list[float]:
        """Wait until `count` answers have arrived."""
        while len(self.came) < count:
            self._more.clear()
            await self._more.wait()
        return self.came


async def test_each_answer_of_a_decoupled_step_is_forwarded_before_the_step_ends() -> None:
    async with served(SPREAD) as (system, many):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10)
        assert await client.holds(1) == [11]
        many.answer(request, 20, 30)
        assert await client.holds(3) == [11, 21, 31]
        assert not client.task.done()
        many.end(request)

        assert await client.task == [11, 21, 31]
        assert system.engine.model("spread").statistics.snapshot().success.count == 1


async def test_the_first_answer_of_each_request_is_counted_by_the_steps_model() -> None:
    async with served(SPREAD) as (system, many):
        counted = system.engine.model("many").statistics
        counted.answers = AnswerStatistics()  # as for a model whose own requests receive answers
        clients = [Client(system, "spread", 1) for _ in range(2)]
        for request in await many.holds(2):
            many.answer(request, 10, 20)
            many.end(request)
        for client in clients:
            await client.task

    assert sum(counted.snapshot().first_response_histogram.counts) == 2


async def test_a_request_to_a_decoupled_ensemble_may_have_no_answer() -> None:
    async with served(SPREAD) as (system, many):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.end(request)

        assert await client.task == []


async def test_the_last_answer_is_final_if_the_step_has_already_ended() -> None:
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20)
        many.end(request)
        await asyncio.sleep(0)
        system.gates["plus"].open()

        assert await client.task == [11, 21]
        assert client.finals == [False, True]


async def test_answers_come_in_the_order_of_the_step_even_if_a_later_one_finishes_first() -> None:
    async with overtaken() as (system, many, first):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, SLOW)
        await first.entered()
        many.answer(request, 20, 30)
        many.end(request)
        while len(system.backends["plus"].runs) < 3:  # noqa: ASYNC110 - a fake has no event
            await asyncio.sleep(0)
        assert client.came == []
        first.open()

        assert await client.task == [SLOW + 1, 21, 31]


async def test_answers_of_a_decoupled_step_may_be_outputs_of_the_ensemble() -> None:
    async with served(BARE) as (system, many):
        client = Client(system, "bare", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20)
        many.end(request)

        assert await client.task == [10, 20]


async def test_one_tensor_of_an_answer_may_feed_several_steps() -> None:
    async with served(FAN) as (system, many):
        client = Client(system, "fan", 1, "difference")
        (request,) = await many.holds(1)
        many.answer(request, 10, 20, 30)
        many.end(request)

        assert await client.task == [-10, -20, -30]


async def test_each_answer_carries_the_sequence_parameters_of_its_request() -> None:
    async with served(SPREAD) as (system, many):
        request = system.request("spread", 1)
        request.sequence = InSequence((1 << 64) - 1, end=True)
        with open_stream(system.engine, request) as answers:
            (step_request,) = await many.holds(1)
            many.answer(step_request, 10, 20)
            came = [await answers.next() for _ in range(2)]
            many.end(step_request)
            assert await answers.next() is None

    parameters = {"sequence_id": -1, "sequence_start": False, "sequence_end": True}
    assert [answer.parameters for answer in came if answer is not None] == [parameters, parameters]


async def test_a_step_of_an_ensemble_may_be_a_decoupled_ensemble() -> None:
    async with served(SPREAD, NESTED) as (system, many):
        client = Client(system, "nested", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20)
        many.end(request)

        assert await client.task == [22, 42]


async def test_answers_of_a_second_decoupled_step_come_in_the_order_of_the_first_steps_answers() -> None:
    async with served(TWICE) as (system, many):
        more: Teller = system.instances["more"]  # type: ignore[attr-defined]
        client = Client(system, "twice", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20)
        many.end(request)
        first, second = await more.holds(2)
        more.answer(first, 11)
        more.answer(second, 21)
        more.answer(first, 12)
        more.end(first)
        assert not client.task.done()
        more.end(second)

        assert await client.task == [11, 21, 12]


async def test_an_error_of_a_decoupled_step_fails_the_request_and_cancels_steps_already_started() -> None:
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20, 30)
        many.end(request, InferError(Code.INVALID, "no more"))

        with pytest.raises(InferError, match=r"^in ensemble 'spread', no more$"):
            await client.task
        assert system.engine.model("spread").statistics.snapshot().failures[BACKEND] == 1
        assert system.engine.model("plus").waiting_requests == 0


async def test_an_error_answer_fails_the_request_and_abandons_the_decoupled_step() -> None:
    async with served(SPREAD) as (system, many):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10)
        await client.holds(1)
        request.answer_sink.send(StreamedAnswer({}, InferError(Code.INVALID, "not this")))

        with pytest.raises(InferError, match=r"^in ensemble 'spread', not this$"):
            await client.task
        assert many.abandoned == [request]
        many.answer(request, 20)
        many.end(request)


async def test_an_error_of_a_later_step_fails_the_request_and_abandons_the_decoupled_step() -> None:
    async with served(SPREAD) as (system, many):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10)
        await client.holds(1)
        many.answer(request, -5)

        with pytest.raises(InferError, match=r"^in ensemble 'spread', a guilty row$"):
            await client.task
        assert many.abandoned == [request]
        many.end(request)


async def test_an_answer_that_does_not_match_the_next_step_fails_the_request() -> None:
    async with served(SPREAD) as (system, many):
        wrong, lacking = Client(system, "spread", 1), Client(system, "spread", 2)
        first, second = await many.holds(2)
        first.answer_sink.send(
            StreamedAnswer({"y": np.zeros((1, 4), np.float64)}, mismatch="unexpected datatype TYPE_FP64")
        )
        second.answer_sink.send(StreamedAnswer({"z": np.zeros((1, 4), np.float32)}))

        with pytest.raises(InferError, match=r"^in ensemble 'spread', model 'many': unexpected datatype TYPE_FP64$"):
            await wrong.task
        with pytest.raises(InferError, match=r"model 'many': the answer lacks the requested output 'y'$"):
            await lacking.task
        many.end(first)
        many.end(second)


@pytest.mark.parametrize(("of", "name"), [(Branches, "add"), (Branches, "backpressure"), (branches, "answer_bytes")])
async def test_an_answer_that_cannot_be_forwarded_fails_only_its_own_request(
    of: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(SPREAD) as (system, many):
        guilty, other = Client(system, "spread", 1), Client(system, "spread", 2)
        requests = await many.holds(2)
        original = getattr(of, name)

        def fail_once(*_: Any) -> None:
            monkeypatch.setattr(of, name, original)
            raise ZeroDivisionError("the next one goes well")

        monkeypatch.setattr(of, name, fail_once)
        many.answer(requests[0], 10)

        with pytest.raises(InferError, match="in ensemble 'spread', the request could not be continued"):
            await guilty.task
        many.end(requests[0])
        many.answer(requests[1], 20)
        many.end(requests[1])
        assert await other.task == [21]
        assert "the next one goes well" in caplog.text


async def test_a_disconnected_client_cancels_every_step_of_its_request() -> None:
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20)
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task

        assert many.abandoned == [request]
        assert system.engine.model("plus").waiting_requests == 0
        assert system.engine.model("spread").statistics.snapshot().failures[CANCELED] == 1
        many.end(request)


async def test_answers_in_flight_at_a_step_are_limited_by_the_ensembles_maximum() -> None:
    limited = ModelSpec(
        "limited", 1, Path("limited"), inputs=SPREAD.inputs, outputs=SPREAD.outputs, policy=SPREAD.policy,
        ensemble=EnsembleSpec(SPREAD.ensemble.steps if SPREAD.ensemble else (), 2),
    )  # fmt: skip
    async with served(limited) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "limited", 1)
        (request,) = await many.holds(1)
        many.answer(request, 10, 20, 30, 40, 50)
        many.end(request)
        assert system.engine.model("plus").inflight == 2
        system.gates["plus"].open()

        assert await client.task == [11, 21, 31, 41, 51]


async def test_thousands_of_answers_wait_for_their_turn_and_none_is_rejected() -> None:
    async with served(SPREAD, BARE) as (system, many):
        client, bare = Client(system, "spread", 1), Client(system, "bare", 1)
        request, bare_request = await many.holds(2)
        many.answer(request, *range(3000))
        assert system.engine.model("plus").inflight == branches.MAX_ACTIVE
        many.end(request)
        many.answer(bare_request, *range(3000))
        many.end(bare_request)

        assert await client.task == list(range(1, 3001))
        assert await bare.task == list(range(3000))


async def test_a_decoupled_step_pauses_until_half_of_its_unread_answers_are_consumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the client has received every answer by now
    monkeypatch.setattr("penstock.batching.stream.MAX_TAKEN_PER_TURN", 1 << 30)
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        went_on = asyncio.Event()
        rooms = [request.answer_sink.send(StreamedAnswer({"y": np.ones((1, 4), np.float32)})) for _ in range(2 * MOST)]
        assert [each is None for each in rooms] == [True] * (2 * MOST - 1) + [False]
        (room,) = (each for each in rooms if each is not None)
        room(went_on.set)
        assert not went_on.is_set()
        system.gates["plus"].open()
        await went_on.wait()

        assert MOST // 2 < len(client.came) < 2 * MOST
        many.end(request)
        assert len(await client.task) == 2 * MOST


async def test_a_decoupled_step_pauses_after_few_answers_if_the_answers_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branches, "PAUSE_BYTES", answer_bytes(StreamedAnswer({"y": np.ones((1, 4), np.float32)})) + 1)
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        rooms = [request.answer_sink.send(StreamedAnswer({"y": np.ones((1, 4), np.float32)})) for _ in range(2)]
        assert [each is None for each in rooms] == [True, False]
        many.end(request)
        system.gates["plus"].open()

        assert await client.task == [2, 2]


async def test_a_decoupled_step_of_a_nested_ensemble_pauses_for_the_outer_ensemble() -> None:
    async with served(SPREAD, NESTED) as (system, many):
        system.gates["double"].close()
        client = Client(system, "nested", 1)
        (request,) = await many.holds(1)
        room = None
        went_on = asyncio.Event()
        count = 0
        while room is None:
            room = request.answer_sink.send(StreamedAnswer({"y": np.ones((1, 4), np.float32)}))
            count += 1
            await asyncio.sleep(0)
        room(went_on.set)
        assert not client.came
        system.gates["double"].open()
        await went_on.wait()
        many.end(request)

        assert await client.task == [4] * count


async def test_answers_that_finish_out_of_order_count_toward_the_limit_until_delivered() -> None:
    async with overtaken() as (system, many, first):
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, SLOW, *range(20, 20 + 2 * MOST))
        while system.engine.model("plus").inflight > 1:  # noqa: ASYNC110 - a fake has no event
            await asyncio.sleep(0)
        assert len(system.backends["plus"].runs) <= MOST
        first.open()
        many.end(request)

        assert await client.task == [SLOW + 1, *range(21, 21 + 2 * MOST)]


async def test_unread_answers_beyond_the_memory_limit_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_UNREAD_BYTES", 100)
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        client = Client(system, "spread", 1)
        (request,) = await many.holds(1)
        many.answer(request, *range(10))

        with pytest.raises(InferError, match="wait for the steps that consume them") as refused:
            await client.task
        assert refused.value.code is Code.OVERLOADED
        many.end(request)


@pytest.mark.parametrize("values", [(), (10,), (10, 20)])
async def test_infer_returns_the_answer_if_there_is_exactly_one_and_fails_otherwise(values: tuple[float, ...]) -> None:
    async with served(SPREAD) as (system, many):
        model = system.engine.model("spread")
        asking = asyncio.create_task(system.engine.infer(model, [np.ones((1, 4), np.float32)]))
        (request,) = await many.holds(1)
        many.answer(request, *values)
        many.end(request)

        if len(values) == 1:
            assert [float(output.flat[0]) for output in await asking] == [11]
        else:
            with pytest.raises(InferError) as refused:
                await asking
            assert refused.value.message == f"in ensemble 'spread', {NOT_SINGLE_MESSAGE}"


async def test_infer_marks_requested_outputs_that_the_only_answer_lacks() -> None:
    pair = ensemble_spec("pair", "in", "out more", step("pairs", "x=in", "y=out z=more"))
    async with served() as (system, _):
        await system.engine.load(replace(decoupled_spec("pairs"), outputs=tensors("y", "z")))
        await system.engine.load(pair)
        asking = asyncio.create_task(system.engine.infer(system.engine.model("pair"), [np.ones((1, 4), np.float32)]))
        instance: Teller = system.instances["pairs"]  # type: ignore[attr-defined]
        (request,) = await instance.holds(1)
        instance.answer(request, 10)
        instance.end(request)
        outputs: Any = await asking

    output, lacking = outputs
    assert (float(output.flat[0]), lacking) == (10, None)
    assert outputs.mismatch == "in ensemble 'pair', the answer lacks the requested output 'more'"


async def test_infer_marks_an_output_that_deviates_from_the_configuration() -> None:
    async with served() as (system, _):
        await system.engine.load(decoupled_spec("told"))
        await system.engine.load(ensemble_spec("last", "in", "out", step("told", "x=in", "y=out")))
        asking = asyncio.create_task(system.engine.infer(system.engine.model("last"), [np.ones((1, 4), np.float32)]))
        instance: Teller = system.instances["told"]  # type: ignore[attr-defined]
        (request,) = await instance.holds(1)
        request.answer_sink.send(StreamedAnswer({"y": np.ones((1, 4))}, mismatch="unexpected datatype TYPE_FP64"))
        instance.end(request)
        outputs: Any = await asking

    assert outputs[0].dtype == np.float64
    assert outputs.mismatch == "model 'told': unexpected datatype TYPE_FP64"


async def test_each_answer_starts_a_new_timeout_of_the_requests_full_length() -> None:
    hour_ns = 3_600_000_000_000
    async with served(SPREAD) as (system, many):
        system.gates["plus"].close()
        began_ns = time.monotonic_ns()
        client = Client(system, "spread", 1, deadline_ns=began_ns + hour_ns, target_ns=began_ns + hour_ns)
        (request,) = await many.holds(1)
        client.request.enqueued_ns -= 1000 * hour_ns
        many.answer(request, 10, 20)
        many.end(request)
        (behind,) = (each for each in system.engine.model("plus").scheduler._lanes.values())
        waits = behind.waiting_requests()

        assert [each.deadline_ns > began_ns + 1000 * hour_ns for each in waits] == [True] * len(waits)
        assert {each.target_ns for each in waits} == {0}
        system.gates["plus"].open()
        assert await client.task == [11, 21]


@pytest.mark.parametrize(
    ("spec", "taker"),
    [
        (
            ensemble_spec(
                "m", "in", "out extra", step("many", "x=in", "y=mid"),
                step("both", "a=mid b=in", "sum=out difference=extra"),
            ),
            "both",
        ),
        (
            ensemble_spec(
                "m", "in", "out extra", step("many", "x=in", "y=one"), step("more", "x=in", "y=other"),
                step("both", "a=one b=other", "sum=out difference=extra"),
            ),
            "both",
        ),
        (ensemble_spec("m", "in", "out extra", step("many", "x=in", "y=out"), step("double", "x=in", "y=extra")), "m"),
    ],
    ids=["the answer's and the request's", "answers of two steps", "in the ensemble's outputs"],
)  # fmt: skip
async def test_a_step_that_combines_answers_of_different_decoupled_steps_is_rejected(
    spec: ModelSpec, taker: str
) -> None:
    async with served() as (system, _):
        with pytest.raises(InferError) as refused:
            await system.engine.load(spec)

    text = f"step of model '{taker}' receives inputs originated from different decoupled models"
    assert refused.value.message == f"in ensemble m, {text}"
    assert refused.value.code is Code.INVALID


async def test_an_ensemble_is_decoupled_if_any_of_its_steps_is_decoupled() -> None:
    plain = ensemble_spec("plain", "in", "out", step("plus", "x=in", "y=out"), decoupled=True)
    async with served(SPREAD, NESTED, plain) as (system, _):
        assert [system.engine.model(name).spec.decoupled for name in ("spread", "nested", "plain")] == [
            True,
            True,
            False,
        ]


async def test_an_ensemble_must_be_reloaded_after_one_of_its_steps_becomes_decoupled() -> None:
    async with served(ensemble_spec("plain", "in", "out", step("plus", "x=in", "y=out"))) as (system, _):
        ensemble = system.engine.model("plain").ensemble
        assert ensemble is not None
        ensemble.check()
        await system.engine.load(decoupled_spec("plus"))

        with pytest.raises(InferError, match=r"'plain' must be reloaded: one of its steps has become decoupled$"):
            ensemble.check()
