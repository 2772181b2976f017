"""GilMonitor: detects hooks that delay the event loop, so that they move to workers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.node import Node
from penstock.batching.spec import HookSpec
from penstock.server.hooks.gil_monitor import MAX_COMPUTE_NS, MAX_DELAY_NS, SAMPLE_COUNT, GilMonitor
from penstock.server.hooks.placement import HookPlacement
from penstock.server.hooks.runner import Hooks
from penstock.server.hooks.worker_replicas import WorkerReplicas
from tests.server.hooks.stage import Act, PuppetEngine, Stage

COMPUTED_NS = 1 << 40
COMPUTES = """
    import os, time
    def post_inference(prediction, metadata):
        end = time.thread_time() + 0.006
        while time.thread_time() < end:
            pass
        return [os.getpid()]
"""


class Found:
    """Records the hooks that are reported."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []

    def __call__(self, hook: str, computed_ns: int, late_ns: int) -> None:
        self.found.append((hook, computed_ns, late_ns))


@pytest.fixture
def loop() -> Any:
    new_loop = asyncio.new_event_loop()
    yield new_loop
    new_loop.close()


class TestGilMonitor:
    def test_cpu_time_is_measured_after_many_calls_and_until_they_are_quick(
        self, loop: asyncio.AbstractEventLoop
    ) -> None:
        holding = GilMonitor(loop, lambda: True, Found())
        for _ in range(SAMPLE_COUNT - 1):
            holding.record_call("pre", 0)
        before = holding.measures_cpu
        holding.record_call("pre", 0)
        assert (before, holding.measures_cpu) == (False, True)
        for _ in range(SAMPLE_COUNT):
            holding.record_call("pre", MAX_COMPUTE_NS)
        assert not holding.measures_cpu

    def test_the_loop_is_not_checked_when_hooks_are_quick(self, loop: asyncio.AbstractEventLoop) -> None:
        holding = GilMonitor(loop, lambda: True, Found())
        for _ in range(10 * SAMPLE_COUNT):
            holding.record_call("pre", MAX_COMPUTE_NS)

        assert not holding.is_checking

    def test_a_hook_that_computes_long_is_not_reported_while_the_loop_is_on_time(
        self, loop: asyncio.AbstractEventLoop
    ) -> None:
        found = Found()
        holding = GilMonitor(loop, lambda: True, found)
        for _ in range(SAMPLE_COUNT):
            holding.record_call("pre", 10 * MAX_COMPUTE_NS)
        assert holding.is_checking
        for _ in range(10 * SAMPLE_COUNT):
            holding.record_delay(MAX_DELAY_NS, 0, COMPUTED_NS)
        holding.close()

        assert found.found == []

    def test_delays_that_the_loop_itself_caused_are_not_blamed_on_hooks(self, loop: asyncio.AbstractEventLoop) -> None:
        found = Found()
        holding = GilMonitor(loop, lambda: True, found)
        for _ in range(SAMPLE_COUNT):
            holding.record_call("pre", 10 * MAX_COMPUTE_NS)
        for _ in range(10 * SAMPLE_COUNT):
            holding.record_delay(10 * MAX_DELAY_NS, 9 * MAX_DELAY_NS, COMPUTED_NS)
        holding.close()

        assert found.found == []

    def test_delays_of_a_machine_that_pauses_are_not_blamed_on_hooks(self, loop: asyncio.AbstractEventLoop) -> None:
        found = Found()
        holding = GilMonitor(loop, lambda: True, found)
        for _ in range(SAMPLE_COUNT):
            holding.record_call("pre", 10 * MAX_COMPUTE_NS)
        for look in range(10 * SAMPLE_COUNT):
            holding.record_delay(2_000 * MAX_DELAY_NS if look % 10 == 0 else 0, 0, MAX_DELAY_NS // 2)
        holding.close()

        assert found.found == []

    def test_the_hook_that_computes_longest_is_reported_once(self, loop: asyncio.AbstractEventLoop) -> None:
        found = Found()
        holding = GilMonitor(loop, lambda: True, found)
        for _ in range(SAMPLE_COUNT):
            holding.record_call("pre", 2 * MAX_COMPUTE_NS)
            holding.record_call("post", 3 * MAX_COMPUTE_NS)
        for _ in range(10 * SAMPLE_COUNT):
            holding.record_delay(4 * MAX_DELAY_NS, MAX_DELAY_NS, COMPUTED_NS)

        assert found.found == [("post", 3 * MAX_COMPUTE_NS, 3 * MAX_DELAY_NS)]
        assert not holding.is_checking

    def test_a_hook_that_has_become_quick_is_not_reported(self, loop: asyncio.AbstractEventLoop) -> None:
        found = Found()
        holding = GilMonitor(loop, lambda: True, found)
        for took_ns in (2 * MAX_COMPUTE_NS, 1):
            for _ in range(SAMPLE_COUNT):
                holding.record_call("pre", took_ns)
        for _ in range(10 * SAMPLE_COUNT):
            holding.record_delay(4 * MAX_DELAY_NS, 0, COMPUTED_NS)
        holding.close()

        assert found.found == []


def placement_of(hooks: Hooks) -> HookPlacement:
    assert hooks._placement is not None
    return hooks._placement


@pytest.mark.slow
class TestMoveToWorkers:
    async def keep_busy(self, hooks: Hooks) -> set[int]:
        """Send requests while the loop is late until the hooks have moved; give the processes that answered."""
        pids: set[int] = set()
        while not isinstance(placement_of(hooks).replicas, WorkerReplicas):
            pids.add(json.loads(await hooks.predict([0] * 4))[0])
            holding = placement_of(hooks)._gil_monitor
            if holding is not None:
                for _ in range(4):  # real delays depend on how many processors are idle
                    holding.record_delay(8 * MAX_DELAY_NS, 0, COMPUTED_NS)
        return pids

    def test_hooks_that_delay_the_event_loop_move_to_workers(self, act: Act, caplog: pytest.LogCaptureFixture) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COMPUTES)
            assert await self.keep_busy(hooks) == {os.getpid()}
            assert json.loads(await hooks.predict([0] * 4)) != [os.getpid()]
            (warned,) = [each for each in caplog.records if each.levelno == logging.WARNING]
            assert "post_inference of model 'm' computes for" in warned.getMessage()
            assert "hooks.workers = " in warned.getMessage()

        act(scene)

    def test_a_running_request_finishes_in_process_while_its_hooks_move(self, act: Act) -> None:
        source = (
            COMPUTES
            + """
    current = None
    def pre_inference(sample, metadata):
        global current
        current = sample
        return [sample] * 4
    """
        )

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source.replace("os.getpid()", "os.getpid(), current"), engine, replicas=1)
            call = asyncio.ensure_future(hooks.predict(5))
            await engine.gather(1)
            placement_of(hooks)._on_gil_held("post_inference", 5_000_000, 5_000_000)
            while not isinstance(placement_of(hooks).replicas, WorkerReplicas):  # noqa: ASYNC110 - by a process
                await asyncio.sleep(0.005)
            assert len(placement_of(hooks).replicas._live) == 1
            later = asyncio.ensure_future(hooks.predict(6))
            await engine.gather(2)
            engine.run()

            assert json.loads(await call) == [os.getpid(), 5]
            assert json.loads(await later) == [stage_pid(hooks), 6]

        act(scene)

    @pytest.mark.parametrize(("replicas", "most"), [("shared", 1), (1, 1), (2, 2), (None, 4)])
    def test_hooks_move_to_at_most_as_many_workers_as_replicas_are_allowed(
        self, act: Act, replicas: int | str | None, most: int
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COMPUTES, replicas=replicas)
            assert placement_of(hooks)._worker_count() == min(most, len(os.sched_getaffinity(0)))

        act(scene)

    def test_hooks_that_write_to_disk_move_to_one_worker(self, act: Act, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            path = tmp_path / "hooks.py"
            path.write_text("def pre_inference(sample, metadata):\n    open('/tmp/last', 'w').write(sample)\n")
            spec = HookSpec(path, dialect="cortex", dialect_settings={"kind": "onnx"})
            node = Node("x", "tensor(float)", [None, 4])
            hooks = await stage.load_spec(spec, node_inputs=[node])
            assert placement_of(hooks)._worker_count() == 1

        act(scene)

    def test_hooks_do_not_move_when_workers_is_zero(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COMPUTES, workers=0)
            assert placement_of(hooks).replicas.gil_monitor is None

        act(scene)

    def test_hooks_stay_in_process_and_the_reason_is_logged_when_no_worker_can_start(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COMPUTES)
            (stage._folder / "hooks.py").write_text("import nothing_of_that_name")
            placement_of(hooks)._on_gil_held("post_inference", 5_000_000, 5_000_000)
            assert placement_of(hooks)._move_task is not None
            await placement_of(hooks)._move_task  # type: ignore[misc]

            assert json.loads(await hooks.predict([0] * 4)) == [os.getpid()]
            assert "are not moved: hooks file" in caplog.records[-1].getMessage()

        act(scene)

    def test_hooks_stay_in_process_and_an_unexpected_error_of_the_move_is_logged(
        self, act: Act, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(COMPUTES)
            placement_of(hooks)._interpreters = {}.__getitem__  # type: ignore[assignment]
            placement_of(hooks)._on_gil_held("post_inference", 5_000_000, 5_000_000)
            assert placement_of(hooks)._move_task is not None
            await placement_of(hooks)._move_task  # type: ignore[misc]

            assert json.loads(await hooks.predict([0] * 4)) == [os.getpid()]
            assert "are not moved: TypeError" in caplog.records[-1].getMessage()

        act(scene)


def stage_pid(hooks: Hooks) -> int:
    (replica,) = placement_of(hooks).replicas._live
    return int(replica.pid)
