"""Isolated models under an Engine: workers that end, and the outcome of the requests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from penstock.backends.errors import InferError
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.running import reload_backoff
from penstock.batching.running.instance import ThreadInstance
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from penstock.server.faults import own_workers
from penstock.server.isolated.backend import IsolatedBackend
from penstock.server.isolated.binding import IsolatedBinding
from tests.server.isolated.faulty_backend import Fault
from tests.server.isolated.stage import PATIENCE_S, faulty_loader, nothing_left, until

pytestmark = pytest.mark.slow
CALLERS = 16


class House:
    """An Engine with one model, whose requests are rows of 4."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self.engine = engine
        self.model = model
        self.ends: Counter[str] = Counter()
        self.begun = 0

    @property
    def backend(self) -> IsolatedBackend:
        instance = self.model.instances[0]
        assert isinstance(instance, ThreadInstance)
        backend = instance.placement.backend
        assert isinstance(backend, IsolatedBackend)
        return backend

    async def ask(self, value: float) -> str:
        """Request one row, and return how the request ended."""
        self.begun += 1
        try:
            (y, *_) = await self.engine.infer(self.model, [np.full((1, 4), value, np.float32)])
        except InferError as error:
            end = error.code.name
        else:
            end = "right" if y.tolist() == [[2 * value] * 4] else "wrong"
        self.ends[end] += 1
        return end

    async def lose_it(self) -> None:
        """Kill the worker, and wait until another one serves."""
        backend, served = self.backend, self.ends["right"]
        os.kill(backend.pid, signal.SIGKILL)
        await come(lambda: self.backend is not backend and self.ends["right"] >= served + 200)

    async def ask_together(self, *values: float) -> list[str]:
        """Request several rows, which share a batch."""
        return list(await asyncio.gather(*map(self.ask, values)))


async def come(true: Callable[[], bool]) -> None:
    """Poll until a condition on other threads or in other processes holds."""
    while not true():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)


def play(scene: Callable[[House], Awaitable[None]], *, instances: int = 1, options: Any = None, **policy: Any) -> None:
    """Run a scene, and check that nothing is left of it."""

    async def main() -> None:
        engine = Engine(asyncio.get_running_loop(), {"faulty": faulty_loader()})
        batch_policy = BatchPolicy(**{"max_batch_rows": 8, "max_queue_delay_us": 2000, **policy})
        spec = ModelSpec(
            "m", 1, Path("/r/m/1/model"), "faulty", policy=batch_policy, instances=(InstanceGroup(instances),),
            options={"width": "4", **(options or {})},
        )  # fmt: skip
        house = House(engine, await engine.load(spec))
        try:
            async with asyncio.timeout(3 * PATIENCE_S):
                await scene(house)
        finally:
            await engine.stop(1.0)

    uvloop.run(asyncio.sleep(0))
    with nothing_left():
        uvloop.run(main())


@pytest.mark.parametrize("instances", [1, 2])
def test_no_request_fails_when_workers_are_killed_under_load(instances: int) -> None:
    async def scene(house: House) -> None:
        done = asyncio.Event()

        async def call(number: int) -> None:
            turn = 0
            while not done.is_set():
                turn += 1
                await house.ask(1000 * number + turn % 900)

        callers = [asyncio.create_task(call(number)) for number in range(1, CALLERS + 1)]
        for _ in range(3):
            await house.lose_it()
        done.set()
        await asyncio.gather(*callers)

        assert house.ends == {"right": house.begun}
        assert house.model.event_counts["instances_replaced"] == 3 * instances
        assert len(own_workers()) == 1

    play(scene, instances=instances)


def test_a_request_that_ends_the_worker_fails_alone() -> None:
    async def scene(house: House) -> None:
        assert await house.ask_together(1, 2, Fault.CRASH, 4) == ["right", "right", "NOT_READY", "right"]
        assert await house.ask_together(Fault.DIE) == ["NOT_READY"]
        assert await house.ask_together(5, 6) == ["right", "right"]
        assert house.model.healthy
        assert house.model.event_counts["instances_replaced"] == 4

    play(scene)


def test_two_requests_that_end_the_worker_of_two_instances_fail_alone() -> None:
    async def scene(house: House) -> None:
        values = [1, Fault.DIE, 3, 4, 5, 6, 7, 8, 9, Fault.CRASH, 11, 12, 13, 14, 15, 16]
        expected = ["NOT_READY" if isinstance(value, Fault) else "right" for value in values]

        assert await house.ask_together(*values) == expected
        assert len(own_workers()) == 1

    play(scene, instances=2)


def test_a_request_above_the_run_limit_fails_alone() -> None:
    async def scene(house: House) -> None:
        assert await house.ask_together(1, Fault.HANG, 3) == ["right", "EXPIRED", "right"]
        assert await house.ask_together(Fault.WAIT) == ["EXPIRED"]
        assert await house.ask_together(5) == ["right"]

    play(scene, run_limit_us=300_000)


def test_a_request_above_the_time_limit_of_the_worker_fails_alone() -> None:
    async def scene(house: House) -> None:
        assert await house.ask_together(1, Fault.HANG, 3) == ["right", "EXPIRED", "right"]

    play(scene, options={"worker.timeout_s": "0.3"})


def test_a_request_that_takes_too_much_memory_fails_alone() -> None:
    async def scene(house: House) -> None:
        assert await house.ask_together(1, Fault.GROW, 3) == ["right", "NOT_READY", "right"]

    play(scene, options={"worker.memory_mb": "200"})


def test_a_request_that_the_runtime_rejects_fails_alone_in_its_batch() -> None:
    async def scene(house: House) -> None:
        pid = house.backend.pid

        assert await house.ask_together(1, Fault.REFUSE, 3, Fault.RAISE) == ["right", "INVALID", "right", "INTERNAL"]
        assert await house.ask_together(1, Fault.FEWER) == ["right", "INTERNAL"]
        assert await house.ask_together(1, Fault.NONE) == ["right", "INTERNAL"]
        assert house.backend.pid == pid

    play(scene)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_worker_killed_while_idle_is_replaced_before_the_next_request(instances: int) -> None:
    async def scene(house: House) -> None:
        for times in (1, 2):
            before = house.backend
            os.kill(before.pid, signal.SIGKILL)
            await come(lambda: house.model.event_counts.get("instances_replaced", 0) == times * instances)  # noqa: B023

            assert house.backend is not before
            assert len(own_workers()) == 1
        assert await house.ask_together(1, 2) == ["right", "right"]
        assert house.model.event_counts["instances_replaced"] == 2 * instances

    play(scene, instances=instances)


def test_requests_wait_and_the_model_stays_ready_while_it_is_reloaded() -> None:
    async def scene(house: House) -> None:
        os.kill(house.backend.pid, signal.SIGSTOP)  # it will not answer before it is found stopped
        calls = [asyncio.create_task(house.ask(value)) for value in range(4)]
        await come(lambda: not house.model.waiting_requests)
        os.kill(house.backend.pid, signal.SIGKILL)
        ready = set()
        while not all(task.done() for task in calls):
            ready.add(house.model.ready)
            await asyncio.sleep(0.001)

        assert ready == {True}
        assert house.ends == {"right": 4}

    play(scene)


def test_a_model_whose_reload_fails_is_not_ready_until_a_reload_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_backoff, "MIN_RETRY_NS", 100_000_000)

    async def scene(house: House) -> None:
        options: Any = house.model.spec.options
        options["load"] = str(int(Fault.DIE))
        os.kill(house.backend.pid, signal.SIGKILL)

        ends, ready = [await house.ask(1)], [house.model.ready]
        del options["load"]
        while not house.model.ready:
            await house.ask(2)
        ends.append(await house.ask(2))
        ready.append(house.model.ready)

        assert (ends, ready) == (["NOT_READY", "right"], [False, True])

    play(scene)


@pytest.mark.parametrize("executor", ["auto", "loop"])
def test_the_event_loop_never_waits_for_a_worker(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    run = IsolatedBinding.run

    def noted(binding: IsolatedBinding, positions: Any) -> list[Any]:
        threads.add(threading.current_thread().name)
        return run(binding, positions)

    async def scene(house: House) -> None:
        monkeypatch.setattr(IsolatedBinding, "run", noted)
        for value in range(200):
            assert await house.ask(value) == "right"

    play(scene, executor=executor, max_queue_delay_us=0)

    assert threads == {"m/1#0"}


def test_loading_and_unloading_a_model_repeatedly_leaves_no_workers() -> None:
    async def scene(house: House) -> None:
        for version in range(2, 5):
            spec = ModelSpec("m", version, Path(f"/r/m/{version}/model"), "faulty", options={"width": "4"})
            await house.engine.load(spec)
            await house.engine.unload("m", version)
        until(lambda: len(own_workers()) == 1)

    play(scene)


def test_an_isolated_model_may_have_a_measured_instance_count() -> None:
    async def scene(house: House) -> None:
        assert await house.ask_together(1, 2) == ["right", "right"]
        assert len(own_workers()) == 1

    play(scene, instances=0)
