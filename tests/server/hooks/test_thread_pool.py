"""The threads of hooks: replicas that share one, hooks that wait, and what a hanging hook does to other requests."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.hooks.call import HookCall
from penstock.server.hooks.concurrency import MIN_LONG_WAITS, WINDOW
from penstock.server.hooks.plan import DEFAULT_REPLICAS
from penstock.server.hooks.runner import Hooks
from penstock.server.hooks.thread_pool import SLOW_NS
from tests.fakes import no_more_threads
from tests.server.hooks.stage import Act, PuppetEngine, Stage, is_set, refusal

REMEMBERS = """
    current = None
    def pre_inference(sample, metadata):
        global current
        current = sample
        if "gate" in sample:
            sample["began"].set()
            sample["gate"].wait()
        return [sample["x"]] * 4
    def post_inference(prediction, metadata):
        return [current["x"], prediction[0][0, 0]]
"""
GATED = """
    instance = object()
    def pre_inference(sample, metadata):
        sample["began"].set()
        sample["gate"].wait()
        return [sample["x"]] * 4
    def post_inference(prediction, metadata):
        return [id(instance), prediction[0][0, 0]]
"""


def replicas_of(hooks: Hooks) -> Any:
    assert hooks._placement is not None
    return hooks._placement.replicas


def threads() -> int:
    return sum(thread.name == "hooks-m/1" for thread in threading.enumerate())


def record_calls(hooks: Hooks, took_ns: int, cpu_ns: int, count: int) -> None:
    """Record calls of this duration and CPU time."""
    call = HookCall("pre_inference", None, 0, 0, "")
    call.cpu_ns = cpu_ns
    for _ in range(count):
        replicas_of(hooks).record_call(call, took_ns)


async def wait_until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - by a thread
        await asyncio.sleep(0.001)


class TestExclusiveReplicas:
    async def begun(self, hooks: Hooks, engine: PuppetEngine, count: int) -> list[asyncio.Task[bytes]]:
        """Have requests in the model, each with its own replica."""
        calls = [asyncio.create_task(hooks.predict({"x": x})) for x in range(count)]
        await engine.gather(count)
        return calls

    async def behind_one(self, stage: Stage, hooks: Hooks, engine: PuppetEngine) -> tuple[list[Any], Any, Any]:
        """Have three requests whose post_inference waits behind a pre_inference; give both, and its sample."""
        calls = await self.begun(hooks, engine, 3)
        sample = stage.sample(9)
        running = asyncio.create_task(hooks.predict(sample))
        await is_set(sample["began"])
        engine.run()
        await asyncio.sleep(0)
        return calls, sample, running

    def test_replicas_share_one_thread(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls = await self.begun(hooks, engine, DEFAULT_REPLICAS)
            assert len(replicas_of(hooks)._live) == DEFAULT_REPLICAS
            assert threads() == 1
            engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(DEFAULT_REPLICAS)]

        act(scene)

    @pytest.mark.parametrize("line", ["import threading", "import sqlite3", "kept = __import__('decimal')"])
    def test_each_replica_of_a_thread_sensitive_file_has_its_own_thread(self, act: Act, line: str) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(f"    {line}\n{REMEMBERS}", engine)
            calls = await self.begun(hooks, engine, 4)
            assert threads() == 4
            engine.run()
            await asyncio.gather(*calls)

        act(scene)

    def test_each_replica_of_a_configured_number_has_its_own_thread(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine, replicas=3)
            calls = await self.begun(hooks, engine, 3)
            assert threads() == 3
            engine.run()
            await asyncio.gather(*calls)

        act(scene)

    def test_a_hook_that_times_out_does_not_affect_other_requests_on_its_thread(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls, _, hanging = await self.behind_one(stage, hooks, engine)
            hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)

            assert (await refusal(hanging))[0] is Code.EXPIRED
            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(3)]
            later = await self.begun(hooks, engine, DEFAULT_REPLICAS)
            engine.run()
            assert await asyncio.gather(*later) == [b"[%d,%d.0]" % (x, x) for x in range(DEFAULT_REPLICAS)]
            assert len(replicas_of(hooks)._pool._threads) == 1

        act(scene)

    def test_a_hook_that_spins_past_its_limit_is_interrupted_after_its_model_is_unloaded(self, act: Act) -> None:
        waits = 'sample["gate"].wait()'
        source = REMEMBERS.replace(waits, f'{waits}\n            while sample["x"]: pass')

        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(source, engine)
            calls, sample, hanging = await self.behind_one(stage, hooks, engine)
            sample["x"] = spins = [True]
            hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)
            assert (await refusal(hanging))[0] is Code.EXPIRED
            await asyncio.gather(*calls)
            await hooks.close()
            try:
                sample["gate"].set()
                async with asyncio.timeout(20):
                    await wait_until(lambda: not threads())
            finally:
                spins.clear()

        act(scene)

    def test_calls_wait_for_a_slow_hook_when_no_thread_can_be_started(
        self, act: Act, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls, slow, waiting = await self.behind_one(stage, hooks, engine)
            with monkeypatch.context() as patch:
                no_more_threads(patch)
                hooks.enforce_limits(time.monotonic_ns() + 2 * SLOW_NS)
            slow["gate"].set()
            await engine.gather(1)
            engine.run()

            assert await asyncio.gather(*calls, waiting) == [b"[%d,%d.0]" % (x, x) for x in (0, 1, 2, 9)]

        act(scene)

    def test_requests_behind_a_hanging_hook_are_rejected_when_no_thread_can_be_started(
        self, act: Act, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls, _, hanging = await self.behind_one(stage, hooks, engine)
            with monkeypatch.context() as patch:
                no_more_threads(patch)
                hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)
                late = asyncio.create_task(hooks.predict({"x": 1}))
                assert (await refusal(late))[0] is Code.OVERLOADED
            assert (await refusal(hanging))[0] is Code.EXPIRED
            assert {(await refusal(call))[0] for call in calls} <= {Code.OVERLOADED, Code.INTERNAL}
            later = asyncio.create_task(hooks.predict({"x": 4}))
            await engine.gather(1)
            engine.run()
            assert await later == b"[4,4.0]"

        act(scene)

    def test_a_request_that_waits_for_a_new_replica_is_rejected_when_no_thread_can_be_started(
        self, act: Act, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(REMEMBERS)
            stuck = stage.sample(9)
            hanging = asyncio.create_task(hooks.predict(stuck))
            await is_set(stuck["began"])
            waiting = asyncio.create_task(hooks.predict({"x": 1}))
            await wait_until(lambda: replicas_of(hooks)._starting is not None)
            with monkeypatch.context() as patch:
                no_more_threads(patch)
                hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)
                assert (await refusal(waiting))[0] is Code.OVERLOADED
            assert (await refusal(hanging))[0] is Code.EXPIRED

        act(scene)

    def test_a_hook_that_was_suspended_with_the_whole_process_is_not_timed_out(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            sample = stage.sample(1)
            running = asyncio.create_task(hooks.predict(sample))
            await is_set(sample["began"])
            pool = replicas_of(hooks)._live[0].pool
            pool._threads[0].running_call.limit_start_ns -= 60_000_000_000
            pool._check_due_ns -= 60_000_000_000
            pool._check()
            sample["gate"].set()

            assert json.loads(await running)[1] == 1.0

        act(scene)

    def test_a_hook_suspended_with_the_process_makes_way_for_the_other_calls_and_finishes(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls = await self.begun(hooks, engine, 3)
            stood = stage.sample(9)
            waiting = asyncio.create_task(hooks.predict(stood))
            await is_set(stood["began"])
            pool = replicas_of(hooks)._pool
            pool._threads[0].running_call.limit_start_ns -= 40_000_000_000
            pool._check_due_ns -= 40_000_000_000
            pool._check()
            engine.run()

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(3)]
            pool._check()
            stood["gate"].set()
            await engine.gather(1)
            engine.run()
            assert await waiting == b"[9,9.0]"

        act(scene)

    def test_calls_behind_a_slow_hook_move_to_another_thread(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            calls, slow, waiting = await self.behind_one(stage, hooks, engine)
            hooks.enforce_limits(time.monotonic_ns() + 2 * SLOW_NS)

            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(3)]
            slow["gate"].set()
            await engine.gather(1)
            engine.run()
            assert await waiting == b"[9,9.0]"
            await wait_until(lambda: len(replicas_of(hooks)._pool._threads) == 1)

        act(scene)

    def test_the_number_of_threads_grows_while_hooks_wait_and_shrinks_afterward(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            engine = PuppetEngine()
            hooks = await stage.load(REMEMBERS, engine)
            samples = [stage.sample(x) for x in range(DEFAULT_REPLICAS)]
            calls = await self.begun(hooks, engine, DEFAULT_REPLICAS)
            record_calls(hooks, 100_000_000, 100_000, MIN_LONG_WAITS)
            engine.run()
            await asyncio.gather(*calls)
            calls = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
            for sample in samples:
                await is_set(sample["began"])
            assert threads() == DEFAULT_REPLICAS
            stage.open_all()
            await engine.gather(DEFAULT_REPLICAS)
            engine.run()
            assert await asyncio.gather(*calls) == [b"[%d,%d.0]" % (x, x) for x in range(DEFAULT_REPLICAS)]
            record_calls(hooks, 20_000, 20_000, 2 * WINDOW)
            calls = await self.begun(hooks, engine, DEFAULT_REPLICAS)
            engine.run()
            await asyncio.gather(*calls)
            await wait_until(lambda: len(replicas_of(hooks)._pool._threads) == 1)

        act(scene)

    def test_no_request_sees_a_global_of_another_request_as_threads_come_and_go(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(REMEMBERS, max_queue_rows=4096)
            for turn in range(8):
                record_calls(hooks, 100_000_000 if turn % 2 else 20_000, 20_000, 2 * WINDOW)
                answers = await asyncio.gather(*(hooks.predict({"x": x}) for x in range(100)))
                assert answers == [b"[%d,%d.0]" % (x, x) for x in range(100)]

        act(scene)


class TestSharedReplicas:
    def test_shared_replicas_are_added_for_the_queued_calls_when_hooks_wait(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            samples = [stage.sample(x) for x in range(6)]
            calls = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
            await is_set(samples[0]["began"])
            assert not any(sample["began"].is_set() for sample in samples[1:])
            record_calls(hooks, 100_000_000, 100_000, MIN_LONG_WAITS)
            for sample in samples:
                await is_set(sample["began"])
            stage.open_all()
            answers = [json.loads(answer) for answer in await asyncio.gather(*calls)]

            assert [answer[1] for answer in answers] == list(range(6))

        act(scene)

    def test_added_replicas_are_removed_when_hooks_stop_waiting(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            record_calls(hooks, 100_000_000, 100_000, MIN_LONG_WAITS)
            samples = [stage.sample(x) for x in range(4)]
            calls = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
            for sample in samples:
                await is_set(sample["began"])
            stage.open_all()
            await asyncio.gather(*calls)
            assert len(replicas_of(hooks)._live) > 1
            record_calls(hooks, 20_000, 20_000, 2 * WINDOW)
            for _ in range(8):
                await hooks.predict(stage.sample(1, is_open=True))

            assert len(replicas_of(hooks)._live) == 1
            await wait_until(lambda: threads() == 1)

        act(scene)

    @pytest.mark.parametrize("replicas", ["shared", 1])
    def test_no_replicas_are_added_when_the_configuration_sets_one(self, act: Act, replicas: int | str) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED, replicas=replicas)
            record_calls(hooks, 100_000_000, 100_000, 10 * WINDOW)
            answers = await asyncio.gather(*(hooks.predict(stage.sample(x, is_open=True)) for x in range(50)))

            assert len({json.loads(answer)[0] for answer in answers}) == 1
            assert threads() == 1

        act(scene)

    def test_calls_behind_a_hanging_replica_are_answered_by_the_other_replicas(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await stage.load(GATED)
            record_calls(hooks, 100_000_000, 100_000, MIN_LONG_WAITS)
            stuck = stage.sample()
            hanging = asyncio.create_task(hooks.predict(stuck))
            await is_set(stuck["began"])
            answers = await asyncio.gather(*(hooks.predict(stage.sample(x, is_open=True)) for x in range(50)))
            assert [json.loads(answer)[1] for answer in answers] == list(range(50))
            hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)

            assert (await refusal(hanging))[0] is Code.EXPIRED

        act(scene)

    @pytest.mark.slow
    def test_replicas_are_added_for_hooks_that_sleep(self, act: Act) -> None:
        source = """
            import time
            instance = object()
            def pre_inference(sample, metadata):
                time.sleep(0.01)
                return [0] * 4
            def post_inference(prediction, metadata): return id(instance)
        """

        async def scene(stage: Stage) -> None:
            hooks = await stage.load(source)
            answers = await asyncio.gather(*(hooks.predict(0) for _ in range(200)))

            assert len(set(answers)) > 4

        act(scene)


@pytest.mark.slow
@pytest.mark.parametrize("prediction", ["current", "{}"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_clients_of_slow_hooks_get_their_own_answers(act: Act, seed: int, prediction: str) -> None:
    # with a global that is kept, or without one, so that post_inference has only the tensor
    source = f"""
        import time
        current = None
        def pre_inference(sample, metadata):
            {"global current" if prediction == "current" else ""}
            current = sample
            time.sleep(sample["s"])
            return [sample["x"]] * 4
        def post_inference(prediction, metadata):
            x = prediction[0][0, 0]
            return [int(x), {prediction}]
    """

    async def scene(stage: Stage) -> None:
        chance = random.Random(seed)
        failed: list[tuple[Code, float]] = []
        hooks = await stage.load(source, timeout_s=0.15)
        record_calls(hooks, 100_000_000 if seed % 2 else 20_000, 20_000, 2 * WINDOW)

        async def one(x: int) -> None:
            await asyncio.sleep(chance.random() * 0.3)
            s = chance.choices([0, 0.002, 0.06, 0.4], [80, 15, 3, 2])[0]
            call = asyncio.ensure_future(hooks.predict({"x": x, "s": s}))
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.01)
                call.cancel()
            try:
                answer = json.loads(await call)
            except asyncio.CancelledError:
                return
            except InferError as error:
                failed.append((error.code, s))
            else:
                assert answer == [x, {"x": x, "s": s} if prediction == "current" else {}]

        await asyncio.gather(*map(one, range(300)))
        assert {code for code, _ in failed} <= {Code.EXPIRED}
        assert all(s >= 0.06 for _, s in failed)
        replicas = replicas_of(hooks)
        await wait_until(lambda: not replicas.is_running_hook())
        if not replicas.shared:
            await wait_until(lambda: len(replicas._free) == len(replicas._live))

    act(scene)
