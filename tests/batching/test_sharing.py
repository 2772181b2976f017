"""Models that share a device: Instances that wait for turns, and a device that is lost under them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, DeviceLost, DeviceRemoved, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices.device import Device
from penstock.batching.devices.placement import Placement
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running import reload_backoff
from penstock.batching.running.batch import Batch
from penstock.batching.running.instance import ThreadInstance
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from tests.batching.running_models import House, having, housed
from tests.fakes import PATIENCE_S, Doors, FakeBackend, Function, fake_loader, fake_request

ROWS = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)
GRAPH = Signature(ROWS.inputs, ROWS.outputs)


class Waiting(FakeBackend):
    """A Backend whose runs wait for another process."""

    threads_only = True


def opened(
    function: Function,
    device: Device,
    count: int = 1,
    reopen: Callable[[int], FakeBackend] | None = None,
    executor: str = "thread",
    max_batch_rows: int = 64,
    kind: type[FakeBackend] = FakeBackend,
) -> AbstractContextManager[House]:
    policy = BatchPolicy(max_batch_rows=max_batch_rows, executor=executor)
    spec = ModelSpec("m", 1, Path("model"), policy=policy, instances=(InstanceGroup(count),), signature=ROWS)
    return housed(spec, [kind(ROWS, function)], having("cpu", device), reopen)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Room for one run at a time."""
    monkeypatch.setattr("penstock.batching.devices.placement.run_width", lambda name, instances, threads: 1)
    return Device(1)


class TestTurns:
    def test_a_run_that_does_not_fit_on_the_device_waits_until_another_ends(self, device: Device) -> None:
        first, second = Doors(), Doors()
        with opened(first, device) as one, opened(second, device) as other:
            one.add()
            first.wait_in()
            other.add()
            waits = not second.entered.acquire(blocking=False)
            first.let_out()
            one.next()
            second.wait_in()
            second.let_out()
            other.next()

        assert waits

    def test_a_batch_grows_while_its_instance_waits_for_a_turn(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device) as one, opened(list, device) as other:
            one.add()
            doors.wait_in()
            requests = other.add() + other.add() + other.add()
            doors.let_out()

            assert other.next().requests == requests

    def test_an_instance_without_work_passes_its_turn_on(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device) as one, opened(list, device, count=2) as other, opened(list, device) as third:
            one.add()
            doors.wait_in()
            batch = other.add()
            other.add()  # wakes the second Instance, which will find nothing: the first takes all
            last = third.add()
            doors.let_out()
            other.ended(batch)
            third.ended(last)

    def test_a_turn_requested_for_a_canceled_request_passes_to_another_model(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device) as one, opened(list, device) as other, opened(list, device) as third:
            one.add()
            doors.wait_in()
            (canceled,) = other.add()
            with other.model.lock:
                other.model.scheduler.remove(canceled)
            last = third.add()
            doors.let_out()
            third.ended(last)
            later = other.add()
            other.ended(later)

    def test_a_model_can_be_closed_while_it_waits_for_a_turn(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device) as one:
            one.add()
            doors.wait_in()
            with opened(list, device) as other:
                other.add()
            doors.let_out()
            one.next()

            assert not device.contended
            one.add()
            doors.let_out()
            one.next()

    def test_a_model_closed_during_its_run_passes_its_turn_on(self, device: Device) -> None:
        doors = Doors()
        with opened(list, device) as other, opened(list, device):
            with opened(doors, device) as one:
                one.add()
                doors.wait_in()
                requests = other.add()
                doors.let_out()
            other.ended(requests)

    def test_a_failed_run_passes_its_turn_on(self, device: Device) -> None:
        def fails(inputs: list[Any]) -> list[Any]:
            raise InferError(Code.INTERNAL, "no")

        with opened(fails, device) as one, opened(list, device) as other:
            for house in (one, other, one, other):
                house.ended(house.add())

    def test_a_run_that_began_before_the_device_was_contended_ends_without_a_turn(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device) as one:
            one.add()
            doors.wait_in()
            with opened(list, device) as other:
                other.ended(other.add())
                doors.let_out()
                one.next()

    def test_a_model_with_brief_runs_does_not_wait_for_a_turn_on_a_cpu(self, device: Device) -> None:
        cpu = Device(1, preemptive=True)
        doors = Doors()
        with opened(doors, cpu) as one, opened(list, cpu) as other:
            place_of(other.model).share.exempt = True
            one.add()
            doors.wait_in()
            other.ended(other.add())
            doors.let_out()
            one.next()

    def test_a_batchs_run_time_is_limited_only_while_other_models_wait(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits_ns: list[float] = []
        doors = Doors()
        with opened(doors, device) as one, opened(list, device) as other:
            take = one.model.scheduler.take

            def note(now_ns: int, max_run_ns: float = 0, **more: Any) -> Batch | None:
                limits_ns.append(max_run_ns)
                return take(now_ns, max_run_ns, **more)

            monkeypatch.setattr(one.model.scheduler, "take", note)
            one.add()
            doors.wait_in()
            requests = other.add()
            one.add()
            doors.let_out(2)
            other.ended(requests)

        assert limits_ns[0] == 0

    def test_every_request_is_answered_under_many_threads(self, device: Device) -> None:
        dice = random.Random(4)
        with ExitStack() as houses:
            every = [houses.enter_context(opened(list, device, count=1 + n % 3, max_batch_rows=4)) for n in range(5)]
            sent: list[list[InferRequest]] = [[] for _ in every]
            for _ in range(400):
                place = dice.randrange(len(every))
                sent[place] += every[place].add(1 + dice.randrange(3))
                if dice.random() < 0.05:
                    with opened(list, device, count=2) as passing:
                        passing.ended(passing.add(2))
            for house, requests in zip(every, sent, strict=True):
                house.ended(requests)

        assert all(request.error is None and request.outputs is not None for each in sent for request in each)
        assert not device.contended


@dataclass
class Losing:
    """A model's function whose device is lost for a number of runs; `here`: whether it can be loaded again."""

    losses: int = 0
    runs: int = 0
    kind: type[DeviceLost] = DeviceLost
    lost: threading.Event = field(default_factory=threading.Event)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.runs += 1
        if self.losses > 0:
            self.losses -= 1
            self.lost.set()
            raise self.kind(Code.NOT_READY, "CUDA failure 700")
        return list(inputs)


@dataclass
class Reopening:
    """Reloads a backend: counts the attempts, of which a number fail."""

    function: Function
    failures: int = 0
    backends: list[FakeBackend] = field(default_factory=list)
    load_count: int = 0

    def __call__(self, position: int) -> FakeBackend:
        self.load_count += 1
        if self.failures > 0:
            self.failures -= 1
            raise InferError(Code.INTERNAL, "no device")
        self.backends.append(FakeBackend(ROWS, self.function))
        return self.backends[-1]


class TestLostDevice:
    def test_a_model_is_reloaded_after_a_lost_device_and_its_batch_is_retried(self, device: Device) -> None:
        reopen = Reopening(list)
        with opened(Losing(1), device, reopen=reopen) as house:
            requests = house.add(3)
            house.ended(requests)

            assert [request.error for request in requests] == [None] * 3
            assert house.model.event_counts["instances_replaced"] == 1
            assert house.model.healthy
            assert not house.backends[0].closed  # the loop still holds it

    def test_instances_of_one_session_reload_it_only_once(self, device: Device) -> None:
        together = threading.Barrier(2)

        def lost(inputs: list[Any]) -> list[Any]:
            together.wait(PATIENCE_S)
            raise DeviceLost(Code.NOT_READY, "gone")

        reopen = Reopening(list)
        with opened(lost, Device(2), count=2, reopen=reopen, max_batch_rows=1) as house:
            requests = house.add(2)
            house.ended(requests)

            assert [request.error for request in requests] == [None, None]
            assert reopen.load_count == 1
            assert house.model.event_counts["instances_replaced"] == 2

    def test_a_request_whose_run_loses_the_device_twice_fails_alone(self, device: Device) -> None:
        losing = Losing(2)
        reopen = Reopening(losing)
        with opened(losing, device, reopen=reopen) as house:
            requests = house.add(3)
            house.ended(requests)

            assert [request.error and request.error.message for request in requests] == ["CUDA failure 700", None, None]
            assert requests[0].error is not None
            assert requests[0].error.retry_after_ns < 0  # a client that repeats it would end the model again
            assert reopen.load_count == 2
            assert house.model.healthy

    def test_a_request_running_when_the_device_was_removed_is_retried_once_more(self, device: Device) -> None:
        losing = Losing(2, kind=DeviceRemoved)
        reopen = Reopening(losing)
        with opened(losing, device, reopen=reopen) as house:
            requests = house.add(3)
            house.ended(requests)

            assert [request.error for request in requests] == [None] * 3
            assert reopen.load_count == 2

    def test_a_request_running_when_the_device_was_removed_is_retried_at_most_once(self, device: Device) -> None:
        losing = Losing(3, kind=DeviceRemoved)
        with opened(losing, device, reopen=Reopening(losing)) as house:
            requests = house.add(3)
            house.ended(requests)

            assert [request.error is None for request in requests] == [False, True, True]

    def test_a_request_that_always_loses_the_device_fails_alone_and_the_others_are_served(self, device: Device) -> None:
        def function(inputs: list[Any]) -> list[Any]:
            if (inputs[0] == 13).any():
                raise DeviceLost(Code.NOT_READY, "gone")
            return list(inputs)

        reopen = Reopening(function)
        with opened(function, device, reopen=reopen) as house:
            requests = [fake_request(house.model, value=value) for value in (1, 2, 13, 4, 5)]
            house.put(requests)
            house.ended(requests)

            assert [request.error is None for request in requests] == [True, True, False, True, True]
            assert reopen.load_count == 2

    def test_reloading_stops_after_a_maximum_number_of_consecutive_losses(self, device: Device) -> None:
        losing = Losing(1 << 30)
        reopen = Reopening(losing)
        with opened(losing, device, reopen=reopen) as house:
            requests = house.add(20)
            house.ended(requests)

            assert all(request.error is not None for request in requests)
            assert reopen.load_count == reload_backoff.MAX_LOSSES - 1
            assert not house.model.healthy

    def test_a_model_that_cannot_be_reloaded_is_unhealthy_and_fails_requests_with_the_reason(
        self, device: Device
    ) -> None:
        reopen = Reopening(list, failures=1 << 30)
        with opened(Losing(1), device, reopen=reopen) as house:
            first = house.add()
            house.ended(first)
            healthy = house.model.healthy
            second = house.add()
            house.ended(second)

        assert not healthy
        assert [request.error.message for request in (*first, *second) if request.error] == [
            "CUDA failure 700",
            "model 'm' lost its device: no device",
        ]

    def test_reloading_is_retried_until_it_succeeds(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reload_backoff, "MIN_RETRY_NS", 0)
        monkeypatch.setattr(reload_backoff, "MAX_RETRY_NS", 0)
        reopen = Reopening(list, failures=3)
        with opened(Losing(1), device, reopen=reopen) as house:
            house.ended(house.add())
            while not house.model.healthy:
                house.ended(house.add())
            last = house.add()
            house.ended(last)

        assert last[0].error is None
        assert reopen.load_count == 4

    def test_a_backend_lost_again_before_it_is_bound_is_reloaded_once_more(self, device: Device) -> None:
        class Brief(FakeBackend):
            def bind(self, signature: Signature, capacity_rows: int) -> Binding:
                raise DeviceLost(Code.NOT_READY, "gone already")

        backends = [Brief(ROWS, list), FakeBackend(ROWS, list)]
        with opened(Losing(1), device, reopen=lambda _: backends.pop(0)) as house:
            requests = house.add(2)
            house.ended(requests)

            assert [request.error for request in requests] == [None, None]

    def test_a_backend_lost_while_idle_is_reloaded_before_the_next_request(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Telling(Waiting):
            def on_loss(self, callback: Callable[[], None]) -> None:
                self.callback = callback

        reopen = Reopening(list)
        with opened(list, Device(2), count=2, reopen=reopen, kind=Telling) as house:
            (backend,) = house.backends
            assert isinstance(backend, Telling)
            counted = threading.Semaphore(0)
            monkeypatch.setattr(house.model, "count_event", lambda _: counted.release())
            backend.callback()
            assert all(counted.acquire(timeout=PATIENCE_S) for _ in range(2))
            backend.callback()  # about a backend that they no longer use
            requests = house.add(2)
            house.ended(requests)

            assert [request.error for request in requests] == [None, None]
            assert reopen.load_count == 1
            assert backend.closed

    def test_the_other_instances_serve_while_one_cannot_be_reloaded(self) -> None:
        reopen = Reopening(list, failures=1 << 30)
        with opened(Losing(1), Device(2), count=2, reopen=reopen) as house:
            first = house.add()
            house.ended(first)
            later = [house.add()[0] for _ in range(20)]
            house.ended(later)

            assert first[0].error is not None
            assert [request.error for request in later] == [None] * 20
            assert house.model.healthy

    def test_a_model_that_cannot_be_reloaded_holds_no_turn(self, device: Device) -> None:
        doors = Doors()
        with opened(doors, device, reopen=Reopening(list, failures=1 << 30)) as one, opened(list, device) as other:
            one.add()
            doors.wait_in()
            one.add()  # for which it would keep its turn
            with one.model.lock:
                one.model.lost_loop_binding = one.model.loop_binding
                one.model.instances[0].request_loop_restore()
            doors.let_out()
            served = other.add()
            other.ended(served)

            assert served[0].error is None

    def test_a_model_that_cannot_be_reloaded_can_be_closed(self, device: Device) -> None:
        with opened(Losing(1), device, reopen=Reopening(list, failures=1 << 30)) as house:
            house.ended(house.add())
        assert not house.model.instances

    def test_the_loop_fails_its_batch_with_the_loss_and_runs_again_after_an_instance_reloads(
        self, device: Device
    ) -> None:
        with opened(Losing(1), device, reopen=Reopening(list), executor="loop") as house:
            with house.model.lock:
                request = fake_request(house.model)
                house.model.scheduler.add(request)
            ran, _ = house.model.dispatch(1)
            answered = [each.error and each.error.message for batch in ran for each in batch.requests]
            later = house.add()  # on an Instance, or on the loop if its binding has been restored by now
            if later[0].outputs is None:
                house.ended(later)

            assert answered == ["CUDA failure 700"]
            assert later[0].error is None

    def test_a_backend_that_waits_for_another_process_never_runs_on_the_loop(self, device: Device) -> None:
        threads: set[str] = set()

        def function(inputs: list[Any]) -> list[Any]:
            threads.add(threading.current_thread().name)
            return list(inputs)

        with opened(function, device, executor="loop", kind=Waiting) as house:
            for _ in range(5):
                house.ended(house.add())

        assert threads == {"m/1#0"}

    def test_a_lost_backend_that_never_runs_on_the_loop_is_closed_at_once(self, device: Device) -> None:
        with opened(Losing(1), device, reopen=Reopening(list), kind=Waiting) as house:
            house.ended(house.add())

            assert house.backends[0].closed

    def test_the_old_session_is_closed_when_its_last_binding_is_returned(self, device: Device) -> None:
        losing = Losing(1)
        reopen = Reopening(list)
        with opened(losing, device, reopen=reopen) as house:
            house.ended(house.add())
            held = house.backends[0].closed
            with house.model.lock:
                house.model.lost_loop_binding = house.model.loop_binding
            house.model.restore_loop_binding()

            assert (held, house.backends[0].closed) == (False, True)
            assert reopen.load_count == 1
        assert reopen.backends[0].closed


def place_of(model: Model) -> Placement:
    """Return the Placement of a model's first Instance."""
    instance = model.instances[0]
    assert isinstance(instance, ThreadInstance)
    return instance.placement


@pytest.mark.anyio
class TestEngines:
    async def test_models_of_one_engine_share_a_device_and_two_engines_share_none(self) -> None:
        loop = asyncio.get_running_loop()
        engines = [Engine(loop, {"fake": fake_loader(FakeBackend(GRAPH, list))}) for _ in range(2)]
        for engine in engines:
            for version in (1, 2):
                await engine.load(ModelSpec("m", version, Path("model"), backend="fake"))
        places = [[place_of(model).device for model in engine.models()] for engine in engines]
        for engine in engines:
            await engine.stop(1)

        assert places[0][0] is places[0][1]
        assert places[0][0] is not places[1][0]
