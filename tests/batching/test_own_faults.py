"""Faults in the server's own code: no request waits forever, no other is harmed, and the model serves on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching import dispatcher
from penstock.batching.engine import Engine
from penstock.batching.ensembles.ensemble import Ensemble
from penstock.batching.ensembles.ensembles import Ensembles
from penstock.batching.ensembles.passage import Passage
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running import external, instance
from penstock.batching.running.batch import Batch
from penstock.batching.running.reload_backoff import ReloadBackoff
from penstock.batching.scheduling import arrivals
from penstock.batching.sequences import affinity
from penstock.batching.statistics import ModelStatistics
from tests.batching import ensembles
from tests.batching.ensembles import ensemble_spec, step
from tests.batching.loop_models import House, housed, plus_one, right
from tests.batching.overlapping_device import LONG_NS, ROWS, Stream, StreamBinding, opened
from tests.fakes import ListSink, fake_request

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "FAULT_RETRY_S", 0.0)
    monkeypatch.setattr(external, "FAULT_RETRY_S", 0.0)


class Panic(BaseException):
    """A BaseException that does not end the process."""


def fails_once(
    of: Any, name: str, monkeypatch: pytest.MonkeyPatch, with_what: type[BaseException] = ZeroDivisionError
) -> None:
    """Have a function fail on its next call only."""
    original: Callable[..., Any] = getattr(of, name)

    def fail(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(of, name, original)
        raise with_what("the next one goes well")

    monkeypatch.setattr(of, name, fail)


EXECUTORS = pytest.mark.parametrize("executor", ["loop", "thread"])


async def served(house: House, model: Model) -> bool:
    before = len(house.sink.requests)
    request = house.come(model)
    await house.sink.holds(before + 1)
    return right(request, house.value)


@EXECUTORS
async def test_an_error_while_a_batch_is_chosen_fails_its_requests_and_later_ones_are_served(
    executor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        broken, other = await house.load("broken", executor=executor), await house.load("other")
        fails_once(broken.scheduler, "take_from", monkeypatch)
        came, beside = [house.come(broken), house.come(broken)], house.come(other)

        await house.sink.holds(5)

        errors = [(request.error.code, request.error.message) for request in came if request.error is not None]
        assert errors == [(Code.INTERNAL, "model 'broken': the request could not be scheduled")] * len(errors)
        assert errors
        assert beside.error is None
        assert (broken.inflight, broken.scheduler.request_count) == (0, 0)
        assert await served(house, broken)
        assert "the next one goes well" in caplog.text


@EXECUTORS
async def test_a_finished_run_is_answered_even_if_its_run_time_cannot_be_learned(
    executor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load(executor=executor)
        fails_once(model.scheduler, "learn", monkeypatch)

        assert await served(house, model)
        assert await served(house, model)
        assert "could not be learned" in caplog.text


async def test_a_request_that_cannot_be_queued_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load()
        house.come(model)
        came = [house.come(model) for _ in range(3)]
        fails_once(arrivals, "enqueue_all", monkeypatch)
        fails_once(model.scheduler, "add", monkeypatch)

        await house.sink.holds(5)

        assert [request.error.code if request.error else None for request in came] == [Code.INTERNAL, None, None]
        assert (model.inflight, model.scheduler.request_count) == (0, 0)
        assert await served(house, model)
        assert "could not be queued" in caplog.text


async def test_a_callback_that_fails_before_dispatch_does_not_affect_requests(caplog: pytest.LogCaptureFixture) -> None:
    async with housed() as house:
        model = await house.load()

        def fail() -> None:
            raise ZeroDivisionError("no beginning")

        house.engine._dispatcher.call_before_dispatch(fail)

        assert await served(house, model)
        assert "no beginning" in caplog.text


def test_an_error_while_choosing_the_next_batch_does_not_affect_the_running_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(ROWS, list, held=True)
    with opened(stream, predicted_ns=LONG_NS) as house:
        (running,) = house.put(1)
        stream.wait_begun()
        (request,) = house.put(2)
        fails_once(house.model.scheduler, "free_batch_rows", monkeypatch)
        assert house.next().requests == [request]
        stream.let_end()

        house.ended([running])

        assert running.error is None
        assert request.error is not None
        (after,) = house.put(3)
        stream.let_end()
        house.ended([after])
        assert after.error is None


def test_a_batch_that_could_not_begin_beside_another_is_run_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(ROWS, list)
    with opened(stream) as house:
        following: list[InferRequest] = []

        def come() -> None:
            following.extend(house.put(2))
            fails_once(house.model.quarantine, "find_known", monkeypatch)

        stream.begins = come
        running = house.put(1)

        house.ended(running)
        house.ended(following)

        assert [request.error for request in (*running, *following)] == [None, None]


@pytest.mark.parametrize(
    ("of", "name"), [(ReloadBackoff, "record_success"), (Model, "add_device_time"), (instance, "device_ns")]
)
def test_errors_in_bookkeeping_after_a_run_cost_no_answer(of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(ROWS, list)
    with opened(stream) as house:
        fails_once(of, name, monkeypatch)
        running, following = house.put_two([1], [2])

        house.ended(running)
        house.ended(following)

        assert [request.error for request in (*running, *following)] == [None, None]


@pytest.mark.parametrize(
    ("of", "name", "failure"),
    [(StreamBinding, "begin", Panic), (Stream, "compute", Panic), (StreamBinding, "is_done", ZeroDivisionError)],
)
def test_any_exception_of_a_run_on_a_device_costs_no_answer(
    of: type, name: str, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(ROWS, list)
    with opened(stream) as house:
        fails_once(of, name, monkeypatch, failure)
        running, following = house.put_two([1], [2])

        house.ended(running)
        house.ended(following)

        assert [request.error for request in (*running, *following)] == [None, None]
        house.ended(house.put(3))


def test_a_run_whose_time_limit_could_not_be_restarted_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(ROWS, list)
    with opened(stream) as house:
        begun: list[int] = []

        class Watch:
            def begin(self, *_: Any) -> None:
                begun.append(1)
                if len(begun) == 3:
                    raise ZeroDivisionError("not for the third one")

            def end(self, *_: Any) -> None:
                pass

        house.model.watchdog = Watch()  # type: ignore[assignment]
        running, following = house.put_two([1], [2])

        house.ended(running)
        house.ended(following)

        assert len(begun) == 3
        assert [request.error for request in (*running, *following)] == [None, None]


async def test_a_batch_whose_turn_could_not_be_completed_fails_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load(executor="thread")
        fails_once(ReloadBackoff, "record_success", monkeypatch)

        assert await served(house, model), "it had run by then"
        fails_once(affinity, "execute_with_state", monkeypatch)
        before = len(house.sink.requests)
        request = house.come(model)
        await house.sink.holds(before + 1)

        assert request.error is not None
        assert (request.error.code, request.outputs) == (Code.INTERNAL, None)
        assert (model.inflight, model.scheduler.request_count) == (0, 0)
        assert await served(house, model)
        assert caplog.text.count("could not be completed") == 2


@EXECUTORS
async def test_a_batch_that_quarantine_could_not_search_fails_and_the_next_one_is_served(
    executor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load(executor=executor)
        model.quarantine.known[0] = 0
        fails_once(model.quarantine, "find_known", monkeypatch)
        before = len(house.sink.requests)
        request = house.come(model)
        await house.sink.holds(before + 1)

        assert request.error is not None
        assert request.error.code is Code.INTERNAL
        assert (model.inflight, model.scheduler.request_count) == (0, 0)
        assert await served(house, model)
        assert "could not be completed" in caplog.text


@EXECUTORS
async def test_requests_are_answered_even_if_their_statistics_cannot_be_recorded(
    executor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load(executor=executor)
        fails_once(model.statistics, "record_batch", monkeypatch)

        assert await served(house, model)
        assert model.inflight == 0
        assert "statistics of a run were lost" in caplog.text


@EXECUTORS
async def test_requests_are_answered_even_if_they_cannot_be_ordered(
    executor: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model = await house.load(executor=executor)
        fails_once(dispatcher, "deliver_requests", monkeypatch)

        assert await served(house, model)
        assert await served(house, model)
        assert model.inflight == 0
        assert "could not be delivered in order" in caplog.text


async def test_a_delivery_that_fails_does_not_block_later_deliveries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed() as house:
        model, engine = await house.load(), house.engine
        request = fake_request(model, value=1, sink=house.sink)
        request.outputs = []
        model.inflight += 1
        fails_once(engine._dispatcher, "deliver", monkeypatch)
        engine._dispatcher.deliver_soon(model, [])
        engine._dispatcher.deliver_soon(model, [Batch([request], 1, request.key, 0)])

        assert (await house.sink.holds(2))[1] is request
        assert "could not be delivered" in caplog.text


@EXECUTORS
async def test_a_base_exception_raised_by_a_run_is_handled_as_a_failed_run(
    executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    guilty = 100

    def function(inputs: list[Any]) -> list[Any]:
        if (inputs[0] == guilty).any():
            raise Panic("an operator of somebody's own")
        return plus_one(inputs)

    async with housed(function) as house:
        model, other = await house.load(executor=executor), await house.load("other", executor=executor)
        before, house.value = len(house.sink.requests), guilty - 2
        came = [house.come(model) for _ in range(3)]
        house.come(other)
        await house.sink.holds(before + 4)

        messages = [None if request.error is None else request.error.message for request in came]
        assert messages == [None, "inference failed in 'm': RuntimeError", None]
        assert "Panic: an operator of somebody's own" in caplog.text
        assert await served(house, model)
        assert await served(house, other)


async def test_after_a_base_exception_in_a_turn_the_remaining_models_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with housed() as house:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        one, other = await house.load("one"), await house.load("other")
        before = len(house.sink.requests)
        fails_once(one, "dispatch", monkeypatch, Panic)
        house.come(one), house.come(other)
        await house.sink.holds(before + 1)

        assert await served(house, other)
        house.come(one)
        await house.sink.holds(before + 4)


async def test_a_failing_sink_does_not_affect_other_sinks(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(ListSink):
        def deliver(self, requests: Sequence[InferRequest]) -> None:
            raise ZeroDivisionError("a sink")

    async with housed() as house:
        model = await house.load()
        house.come(model, sink=Fails())

        assert await served(house, model)
        assert house.rows_run == [2]
        assert model.inflight == 0
        assert "could not be delivered" in caplog.text


@asynccontextmanager
async def two_steps() -> AsyncIterator[tuple[ensembles.House, Model]]:
    """Serve `all`, an ensemble of two steps of the same model, whose gate is `one`."""
    first, second = step("one", "x=in", "y=mid"), step("one", "x=mid", "y=out")
    async with ensembles.house() as house:
        await house.serve("one", plus_one)
        yield house, await house.engine.load(ensemble_spec("all", "in", "mid out", first, second))


@pytest.mark.parametrize(
    ("of", "name", "others"), [(Passage, "store_outputs", 1), (Passage, "take_inputs", 1), (Engine, "submit", 0)]
)
async def test_a_step_whose_result_cannot_be_processed_fails_only_its_own_request(
    of: type, name: str, others: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_steps() as (house, model):
        house.gates["one"].close()
        requests = [house.submit("all", value) for value in range(1 + others)]
        await house.gates["one"].entered()
        fails_once(of, name, monkeypatch)
        house.gates["one"].open()

        await house.sink.holds(1 + others)

        (broken,) = [request.error for request in requests if request.error is not None]
        assert (broken.code, broken.message) == (
            Code.INTERNAL,
            "in ensemble 'all', the request could not be continued",
        )
        assert [len(request.outputs or []) for request in requests if request.error is None] == [2] * others
        assert (model.inflight, house.at_rest()) == (0, True)
        assert "the next one goes well" in caplog.text


@pytest.mark.parametrize(
    ("of", "name"), [(Passage, "stamps"), (ModelStatistics, "record_single"), (Ensemble, "release_links")]
)
async def test_an_ensemble_request_is_answered_even_if_it_cannot_be_counted(
    of: type, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_steps() as (house, model):
        house.gates["one"].close()
        requests = [house.submit("all", value) for value in (1, 2)]
        await house.gates["one"].entered()
        fails_once(of, name, monkeypatch)
        house.gates["one"].open()

        await house.sink.holds(2)

        assert [request.error for request in requests] == [None, None]
        assert (model.inflight, house.at_rest()) == (0, True)
        assert "the next one goes well" in caplog.text


async def test_a_failed_ensemble_request_is_answered_even_if_its_failure_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_steps() as (house, model):
        house.gates["one"].close()
        requests = [house.submit("all", value) for value in (1, 2)]
        await house.gates["one"].entered()
        fails_once(Passage, "store_outputs", monkeypatch)
        fails_once(model.statistics, "record_failure", monkeypatch)
        house.gates["one"].open()

        await house.sink.holds(2)

        assert sorted(request.error is None for request in requests) == [False, True]
        assert (model.inflight, house.at_rest()) == (0, True)


async def test_steps_that_cannot_be_enqueued_together_are_enqueued_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_steps() as (house, _):
        fails_once(Engine, "submit_together", monkeypatch)
        requests = [house.submit("all", value) for value in (1, 2)]

        await house.sink.holds(2)

        assert [request.error for request in requests] == [None, None]
        assert "could not be queued together" in caplog.text


async def test_an_ensemble_request_that_cannot_begin_is_rejected_and_leaves_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_steps() as (house, model):
        fails_once(Ensembles, "_advance", monkeypatch)

        with pytest.raises(InferError, match="in ensemble 'all', the request could not be continued"):
            house.submit("all", 1)

        assert (model.inflight, house.at_rest()) == (0, True)
        house.submit("all", 2)
        await house.sink.holds(1)
