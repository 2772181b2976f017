"""HookedRequest: when a request is cancelled or hangs, all others are answered and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.spec import SequenceSpec
from penstock.server.hooks.runner import Hooks
from tests.server.hooks.stage import GUARD_S, Act, PuppetEngine, Stage, is_set

GATED = """
def pre_inference(sample, metadata):
    sample["began"].set()
    sample["gate"].wait(30)
    if sample["x"] < 0:
        raise ValueError("below")
    return [sample["x"]] * 4
"""
LATER_NS = 60_000_000_000


async def closes(hooks: Hooks) -> bool:
    """Tell whether the hooks finish all requests that they accepted."""
    async with asyncio.timeout(GUARD_S):
        await hooks.close()
    return True


@pytest.mark.parametrize("kind", ["answered", "failed", "several"])
def test_cancelling_a_request_as_its_batch_is_delivered_does_not_affect_the_other_requests(act: Act, kind: str) -> None:
    async def scene(stage: Stage) -> None:
        engine = PuppetEngine()
        source = "def post_inference(prediction, metadata):\n    yield prediction\n" if kind == "several" else None
        hooks = await stage.load(source, engine, decoupled=kind == "several")
        engine.failure = InferError(Code.INTERNAL, "the device") if kind == "failed" else None
        inputs = {"x": np.zeros((1, 4), "<f4")}

        async def ask() -> int:
            return len([answer async for answer in hooks.stream(inputs)])

        cancelled, *others = tasks = [asyncio.create_task(ask()) for _ in range(3)]
        await engine.gather(3)
        cancelled.cancel()
        engine.run()
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*others, return_exceptions=True)
        await asyncio.wait(tasks)

        assert [str(answer) for answer in answers] == ["the device" if kind == "failed" else "1"] * 2
        assert cancelled.cancelled()
        assert await closes(hooks)

    act(scene)


def test_cancelling_a_request_as_hook_calls_finish_does_not_affect_the_other_requests(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(GATED)
        samples = [stage.sample(-1.0) for _ in range(3)]
        cancelled, *others = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
        await is_set(samples[0]["began"])
        pool = hooks._placement.replicas._live[0].pool  # type: ignore[union-attr]
        stage.open_all()
        while len(pool._finished) < 3:  # without running the event loop
            os.sched_yield()
        cancelled.cancel()
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*others, return_exceptions=True)

        assert [str(answer) for answer in answers] == ["pre_inference: ValueError: below"] * 2
        assert await closes(hooks)

    act(scene)


def test_waiting_requests_keep_their_order_when_a_hook_hangs(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        order: list[int] = []
        hooks = await stage.load(GATED, replicas=1)
        samples = [stage.sample(x, is_open=x > 0) for x in range(5)]
        tasks = [asyncio.create_task(hooks.predict(sample)) for sample in samples]
        for x, task in enumerate(tasks):
            task.add_done_callback(partial(_note, order, x))
        await is_set(samples[0]["began"])
        hooks.enforce_limits(time.monotonic_ns() + LATER_NS)
        async with asyncio.timeout(GUARD_S):
            await asyncio.gather(*tasks, return_exceptions=True)

        assert order == [0, 1, 2, 3, 4]

    act(scene)


def test_requests_behind_a_hanging_replica_move_to_another_replica(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(GATED)
        replicas: Any = hooks._placement.replicas  # type: ignore[union-attr]
        replicas._concurrency.target = replicas._light_limit = 2
        replicas._add_shared_replica()
        await replicas._starting.ready
        await asyncio.sleep(0)
        replicas._light_limit = 0  # as after a replica that was heavy to load
        held = [stage.sample(x) for x in (1.0, 2.0)]
        tasks = [asyncio.create_task(hooks.predict(sample)) for sample in held]
        for sample in held:
            await is_set(sample["began"])
        behind = [asyncio.create_task(hooks.predict(stage.sample(x, is_open=True))) for x in (3.0, 4.0)]
        await asyncio.sleep(0)
        first, second = replicas._live
        held[1]["gate"].set()
        first.pool._threads[0].running_call.limit_start_ns -= LATER_NS
        hooks.enforce_limits(time.monotonic_ns())
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*tasks, *behind, return_exceptions=True)

        assert [type(answer) for answer in answers].count(bytes) == 3
        assert second in replicas._live

    act(scene)


def _note(order: list[int], x: int, _: object) -> None:
    order.append(x)


class Sample(list[Any]):
    """A list that can be referred to weakly."""


def test_a_sample_that_fails_conversion_is_freed_without_garbage_collection(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(None)
        sample = Sample([["no", "number"]])
        alive = weakref.ref(sample)
        gc.disable()
        try:
            with pytest.raises(InferError):
                await hooks.predict(sample)
            del sample

            assert alive() is None
        finally:
            gc.enable()

    act(scene)


def test_a_sequence_turn_is_released_once_when_the_model_answers_at_once(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        hooks = await stage.load(None, PuppetEngine(at_once=True))
        object.__setattr__(stage.model.spec, "sequence", SequenceSpec())
        terms = RequestOptions(sequence=InSequence(7))
        inputs = {"x": np.zeros((1, 4), "<f4")}
        async with asyncio.timeout(GUARD_S):
            answers = await asyncio.gather(*(hooks.infer(inputs, "", terms) for _ in range(3)))

        gc.collect()
        assert [list(answer) for answer in answers] == [["y"]] * 3
        assert wrong == []
        assert len(hooks.sequence_turns) == 0

    act(scene)


def test_a_request_cancelled_before_its_first_step_emits_no_warning(act: Act, recwarn: pytest.WarningsRecorder) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(None)
        promise = asyncio.get_running_loop().create_future()
        hooks.start(promise, [[0.0] * 5000], "", nbytes=25_000).cancel()
        await asyncio.sleep(0)

        gc.collect()
        assert not promise.done()
        assert await closes(hooks)

    act(scene)
    assert [str(each.message) for each in recwarn if "never awaited" in str(each.message)] == []
