"""Instances under the RateLimiter, with their threads: when they run, what they release, and which never run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, DeviceLost, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices.device import Device, Share, Waiter
from penstock.batching.devices.placement import Devices, backend_groups
from penstock.batching.devices.rate_limiter import Claim, RateLimiter
from penstock.batching.engine import Engine
from penstock.batching.loading.opening import open_model
from penstock.batching.model import Model
from penstock.batching.running import instance as instance_module
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec, Resource
from tests.batching.running_models import House, housed
from tests.fakes import PATIENCE_S, Doors, FakeBackend, Function, fake_loader, fake_request

ROWS = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)
ONE = (Resource("R1", 1),)


def opened(
    function: Function, devices: Devices, *groups: InstanceGroup,
    reopen: Callable[[int], FakeBackend] | None = None, max_batch_rows: int = 1,
) -> AbstractContextManager[House]:  # fmt: skip
    backends = [FakeBackend(ROWS, function) for _ in backend_groups(groups)]
    policy = BatchPolicy(max_batch_rows=max_batch_rows)
    spec = ModelSpec("m", 1, Path("model"), policy=policy, instances=groups, signature=ROWS)
    return housed(spec, backends, devices, reopen)


class Watched(RateLimiter):
    """A RateLimiter that lets the test wait until a turn was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_count = threading.Semaphore(0)

    def request_turn(self, claim: Claim, waiter: Waiter) -> None:
        super().request_turn(claim, waiter)
        self.asked_count.release()


def limited(stated: Mapping[tuple[str, int | None], int] | None = None) -> Devices:
    return Devices(RateLimiter(stated))


def group(
    count: int = 1, resources: tuple[Resource, ...] = ONE, priority: int = 0, device: str = "cpu"
) -> InstanceGroup:
    return InstanceGroup(count, (device,), resources=resources, rate_priority=priority)


class TestResources:
    def test_an_instance_waits_for_resources_held_by_another_model(self) -> None:
        devices, first, second = limited(), Doors(), Doors()
        with opened(first, devices, group()) as one, opened(second, devices, group()) as other:
            one.add()
            first.wait_in()
            other.add()
            waits = second.empty
            first.let_out()
            one.next()
            second.wait_in()
            second.let_out()
            other.next()

        assert waits

    def test_instances_run_in_parallel_while_resources_suffice(self) -> None:
        devices, doors = limited({("R1", None): 3}), Doors()
        with opened(doors, devices, group(4)) as house:
            house.add(4)
            for _ in range(3):
                doors.wait_in()
            fourth_waits = doors.empty
            doors.let_out(4)
            for _ in range(4):
                house.next()

        assert fourth_waits

    def test_a_batch_grows_while_its_instance_waits_for_resources(self) -> None:
        devices, first = limited(), Doors()
        with opened(first, devices, group()) as one, opened(list, devices, group(), max_batch_rows=8) as other:
            one.add()
            first.wait_in()
            for _ in range(3):
                other.add()
            first.let_out()

            assert other.next().rows == 3

    def test_an_instance_waiting_for_resources_lets_another_that_needs_fewer_run(self) -> None:
        devices, first, second = limited(), Doors(), Doors()
        groups = (group(), group(resources=(Resource("R2", 1),)))
        with opened(first, devices, group()) as one, opened(second, devices, *groups) as other:
            one.add()
            first.wait_in()
            other.add()
            second.wait_in()
            second.let_out()
            other.next()
            first.let_out()

    def test_resources_are_ignored_without_the_rate_limiter(self) -> None:
        devices, doors = Devices(), Doors()
        with opened(doors, devices, group(2)) as house:
            house.add(2)
            doors.wait_in()
            doors.wait_in()
            doors.let_out(2)

    def test_a_model_that_needs_no_resources_runs_on_the_event_loop(self) -> None:
        devices = limited()
        with opened(list, devices, InstanceGroup()) as free, opened(list, devices, group()) as bound:
            for house in (free, bound):
                with house.model.lock:
                    house.model.scheduler.learn(((4,),), 1, 1, 1)
                    house.model.scheduler.add(fake_request(house.model))
            ran = [len(house.model.dispatch(1)[0]) for house in (free, bound)]
            bound.next()

        assert ran == [1, 0]

    @pytest.mark.parametrize(("priorities", "ratio"), [((1, 1), 1), ((1, 2), 2), ((0, 3), 3)])
    def test_busy_models_run_in_proportion_to_their_priorities(self, priorities: tuple[int, int], ratio: int) -> None:
        limiter, ran = Watched(), [0, 0]
        devices, holder = Devices(limiter), Doors()
        counts: list[int] = []

        def run(number: int) -> Function:
            def function(inputs: list[Any]) -> list[Any]:
                ran[number] += 1
                if ran[0] == 30 * ratio:
                    counts[:] = counts or ran
                return list(inputs)

            return function

        with ExitStack() as stack:
            first = stack.enter_context(opened(holder, devices, group(priority=1)))
            first.add()
            holder.wait_in()
            hot = [
                stack.enter_context(opened(run(number), devices, group(priority=priority)))
                for number, priority in enumerate(priorities)
            ]
            for house in hot:
                house.add(100)
            for _ in range(3):
                assert limiter.asked_count.acquire(timeout=PATIENCE_S)
            holder.let_out()
            for house in hot:
                for _ in range(100):
                    house.next()

        assert abs(counts[0] - ratio * counts[1]) <= ratio


class TestReleasingResources:
    def test_a_failed_run_releases_its_resources(self) -> None:
        def fails(inputs: list[Any]) -> list[Any]:
            raise InferError(Code.INVALID, "no")

        devices = limited()
        with opened(fails, devices, group()) as one, opened(list, devices, group()) as other:
            (request,) = one.add()
            one.next()
            other.add()
            other.next()

        assert request.error is not None

    def test_closing_a_waiting_instance_withdraws_its_request_for_resources(self) -> None:
        devices, first, third = limited(), Doors(), Doors()
        with opened(first, devices, group()) as one, opened(third, devices, group()) as last:
            with opened(list, devices, group()) as waiting:
                one.add()
                first.wait_in()
                waiting.add()
                last.add()
            first.let_out()
            third.wait_in()
            third.let_out()
            last.next()

    def test_unloading_a_model_removes_resources_that_only_it_needed(self) -> None:
        devices, doors = limited(), Doors()
        with opened(doors, devices, group(2)) as small:
            with opened(list, devices, group(resources=(Resource("R1", 2),))):
                small.add(2)
                doors.wait_in()
                doors.wait_in()
                doors.let_out(2)
                for _ in range(2):
                    small.next()
            small.add(2)
            doors.wait_in()
            alone = doors.empty
            doors.let_out(2)
            for _ in range(2):
                small.next()

        assert alone

    def test_resources_are_released_while_a_model_is_reloaded_after_a_lost_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(instance_module.logger, "warning", lambda *_: None)
        devices, loading, go_on = limited(), threading.Event(), threading.Event()
        ran_with: list[str] = []

        def loses(inputs: list[Any]) -> list[Any]:
            raise DeviceLost(Code.INTERNAL, "lost")

        def works(inputs: list[Any]) -> list[Any]:
            ran_with.append("again")
            return list(inputs)

        def reopen(position: int) -> FakeBackend:
            loading.set()
            assert go_on.wait(PATIENCE_S)
            return FakeBackend(ROWS, works)

        with (
            opened(loses, devices, group(), reopen=reopen) as losing,
            opened(list, devices, group()) as other,
        ):
            (request,) = losing.add()
            assert loading.wait(PATIENCE_S)
            other.add()
            other.next()
            go_on.set()
            losing.next()
            other.add()
            other.next()

        assert (request.error, ran_with) == (None, ["again"])

    def test_requests_left_by_a_lost_device_wait_for_resources_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instance_module.logger, "warning", lambda *_: None)
        limiter, doors, again = Watched(), Doors(), threading.Event()
        devices = Devices(limiter)

        def loses(inputs: list[Any]) -> list[Any]:
            raise DeviceLost(Code.INTERNAL, "lost")

        def works(inputs: list[Any]) -> list[Any]:
            again.set()
            return list(inputs)

        with opened(doors, devices, group()) as other:

            def reopen(position: int) -> FakeBackend:
                other.add()
                doors.wait_in()
                return FakeBackend(ROWS, works)

            with opened(loses, devices, group(), reopen=reopen) as losing:
                (request,) = losing.add()
                for _ in range(3):
                    assert limiter.asked_count.acquire(timeout=PATIENCE_S)
                waits = not again.is_set()
                doors.let_out()
                losing.next()

        assert waits
        assert request.error is None

    def test_models_loaded_and_unloaded_at_random_lose_no_request(self) -> None:
        devices = limited({("A", None): 2, ("B", None): 1})
        kinds = ((Resource("A", 1),), (Resource("A", 2), Resource("B", 1)), (Resource("B", 1),), ())
        failures: list[BaseException] = []

        def life(number: int) -> None:
            try:
                for turn in range(6):
                    resources = kinds[(number + turn) % len(kinds)]
                    with opened(list, devices, group(2, resources, number)) as house:
                        requests = house.add(20)
                        for _ in requests:
                            house.next()
                        house.add(turn)  # and is closed while these wait or run
            except BaseException as error:  # noqa: BLE001 - reported to the test
                failures.append(error)

        threads = [threading.Thread(target=life, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)

        assert not failures
        assert not any(thread.is_alive() for thread in threads)


class TestLoading:
    def test_a_model_that_needs_more_resources_than_exist_is_refused_and_closed(self) -> None:
        devices = limited({("R1", None): 2})
        spec = ModelSpec("m", 1, Path("m"), instances=(group(), group(resources=(Resource("R1", 4),))))
        backend = FakeBackend(Signature(ROWS.inputs, ROWS.outputs), list)
        with pytest.raises(InferError, match=r'"R1" is limited to 2 .* the minimum required count is 4'):
            open_model(spec, {"onnxruntime": fake_loader(backend)}, lambda *_: None, devices)

        assert backend.closed
        assert not devices["cpu"].contended

    def test_instance_groups_of_one_model_on_one_device_do_not_contend(self) -> None:
        devices = Devices()
        groups = (InstanceGroup(2), InstanceGroup(3), InstanceGroup(9, passive=True))
        with opened(list, devices, *groups), opened(list, devices, InstanceGroup(1, ("cuda:0",))):
            alone = devices["cpu"].contended
            with opened(list, devices, *groups):
                crowded = devices["cpu"].contended
            after = devices["cpu"].contended

        assert (alone, crowded, after) == (False, True, False)

    def test_several_groups_run_instances_on_each_of_their_devices(self) -> None:
        together = threading.Barrier(4)

        def function(inputs: list[Any]) -> list[Any]:
            together.wait(PATIENCE_S)
            return list(inputs)

        groups = (InstanceGroup(2, ("cuda:0",)), InstanceGroup(1, ("cuda:1",)), InstanceGroup(1))
        with opened(function, Devices(), *groups) as house:
            requests = house.add(4)
            batches = [house.next() for _ in requests]
            runs = [len(backend.runs) for backend in house.backends]

        assert (runs, [batch.rows for batch in batches]) == ([1] * 4, [1] * 4)


class TestPriority:
    def test_the_device_priority_is_the_models_weight_on_each_of_its_devices(self) -> None:
        class Noting(Device):
            def join(self, instances: int, width: int, weight: float = 1.0) -> Share:
                weights.append(weight)
                return super().join(instances, width, weight)

        weights: list[float] = []
        devices = Devices()
        devices.update({"cpu": Noting(2), "cuda:0": Noting(2)})
        groups = (InstanceGroup(), InstanceGroup(), InstanceGroup(1, ("cuda:0",)))
        spec = ModelSpec("m", 1, Path("m"), instances=groups, signature=ROWS, device_priority=4.0)
        model = Model(spec, [FakeBackend(ROWS, list) for _ in groups], lambda *_: None, devices)
        model.open()
        model.close()

        assert weights == [4.0, 4.0]


class TestPassive:
    def test_a_passive_group_is_loaded_and_bound_but_never_runs(self) -> None:
        groups = (InstanceGroup(2, ("cuda:0",), passive=True), InstanceGroup(1))
        with opened(list, Devices(), *groups) as house:
            house.add(5)
            for _ in range(5):
                house.next()
            passive, active = house.backends
            bound = len(passive.bindings)
            instances = len(house.model.instances)

        assert (bound, len(passive.runs), len(active.runs), instances) == (2, 0, 5, 1)

    def test_the_event_loop_runs_on_the_device_of_the_active_instances(self) -> None:
        groups = (InstanceGroup(1, ("cuda:0",), passive=True), InstanceGroup(1))
        with opened(list, Devices(), *groups) as house:
            with house.model.lock:
                house.model.scheduler.learn(((4,),), 1, 1, 1)
                house.model.scheduler.add(fake_request(house.model))
            ran, _ = house.model.dispatch(1)

        assert len(ran) == 1
        assert [len(backend.runs) for backend in house.backends] == [0, 1]

    def test_a_passive_group_takes_no_resources_and_no_device_room(self) -> None:
        devices = limited({("R1", None): 1})
        passive = InstanceGroup(8, resources=(Resource("R1", 4),), passive=True)
        with opened(list, devices, passive), opened(list, devices, InstanceGroup(2)):
            assert not devices["cpu"].contended

    @pytest.mark.anyio
    async def test_a_model_with_only_passive_instances_is_ready_and_rejects_requests(self) -> None:
        backend = FakeBackend(Signature(ROWS.inputs, ROWS.outputs), list)
        engine = Engine(asyncio.get_running_loop(), {"onnxruntime": fake_loader(backend)})
        spec = ModelSpec("m", 1, Path("m"), instances=(InstanceGroup(1, passive=True),))
        model = await engine.load(spec)
        with pytest.raises(InferError, match=r"^Unable to find the payload queue for the model m$") as refused:
            engine.submit(fake_request(model))
        healthy = model.healthy
        await engine.stop(1)

        assert healthy
        assert refused.value.code is Code.INTERNAL
        assert backend.runs == []


class TestHostPolicies:
    def test_threads_are_pinned_to_the_cpus_of_their_host_policy(self) -> None:
        before = os.sched_getaffinity(0)
        cpus = frozenset(sorted(before)[:1])
        devices = Devices(host_policies={"few": cpus})
        loaded_on: list[set[int]] = []
        ran_on: list[set[int]] = []

        def function(inputs: list[Any]) -> list[Any]:
            ran_on.append(os.sched_getaffinity(0))
            return list(inputs)

        def load(path: Path, device: str, options: Mapping[str, str]) -> FakeBackend:
            loaded_on.append(os.sched_getaffinity(0))
            return FakeBackend(Signature(ROWS.inputs, ROWS.outputs), function)

        spec, ended = ModelSpec("m", 1, Path("m"), instances=(InstanceGroup(1, host_policy="few"),)), threading.Event()
        model = open_model(spec, {"onnxruntime": load}, lambda *_: ended.set(), devices)
        ran_on.clear()
        with model.lock:
            model.scheduler.add(fake_request(model))
        model.dispatch(1)
        assert ended.wait(PATIENCE_S)
        model.close()

        assert (loaded_on, ran_on) == ([set(cpus)], [set(cpus)])
        assert os.sched_getaffinity(0) == before

    def test_instances_run_even_if_their_cpus_became_unavailable_after_the_load(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        keep = os.sched_setaffinity

        def fail(pid: int, cpus: Iterable[int]) -> None:
            if threading.current_thread().name.startswith("m/1#"):
                raise OSError("Invalid argument")
            keep(pid, cpus)

        cpus = frozenset(sorted(os.sched_getaffinity(0))[:1])
        backend = FakeBackend(Signature(ROWS.inputs, ROWS.outputs), list)
        spec, ended = ModelSpec("m", 1, Path("m"), instances=(InstanceGroup(1, host_policy="few"),)), threading.Event()
        monkeypatch.setattr(os, "sched_setaffinity", fail)
        devices = Devices(host_policies={"few": cpus})
        model = open_model(spec, {"onnxruntime": fake_loader(backend)}, lambda *_: ended.set(), devices)
        with model.lock:
            model.scheduler.add(fake_request(model))
        model.dispatch(1)

        assert ended.wait(PATIENCE_S)
        model.close()
        assert "cannot run on any of its CPUs" in caplog.text

    @pytest.mark.parametrize(("device", "policy"), [("cpu", "cpu"), ("cuda:1", "gpu_1")])
    def test_a_group_without_a_host_policy_has_that_of_its_device(self, device: str, policy: str) -> None:
        devices = Devices(host_policies={policy: frozenset({0})})

        assert devices.cpus(InstanceGroup(1, (device,)), device) == {0}
        assert devices.cpus(InstanceGroup(1, (device,), host_policy="other"), device) == frozenset()

    def test_a_host_policy_with_unavailable_cpus_fails_the_load(self) -> None:
        devices = Devices(host_policies={"cpu": frozenset({4000})})
        backend = FakeBackend(Signature(ROWS.inputs, ROWS.outputs), list)
        with pytest.raises(InferError, match="host policy: this process cannot run on any of its CPUs"):
            open_model(ModelSpec("m", 1, Path("m")), {"onnxruntime": fake_loader(backend)}, lambda *_: None, devices)
