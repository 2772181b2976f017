"""Several answers: a post_inference that yields, as delivered by `Hooks.stream`."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.answer_statistics import AnswerStatistics
from penstock.server.hooks import generator_call
from penstock.server.hooks.generator_call import MAX_AHEAD, Answer
from penstock.server.hooks.runner import Hooks
from tests.server.hooks.stage import Act, PuppetEngine, Stage, is_set, left_behind, refusal

ONES = {"x": np.ones((1, 4), np.float32)}
# The events that a test watches or holds back are in the parameters, since hooks run in this process.
COUNTS = """
    import threading
    def post_inference(prediction, signature, metadata, parameters):
        seen = parameters["seen"]
        try:
            for number in range(parameters["n"]):
                seen.steps.append(number)
                seen.stepped.set()
                if number in seen.gates:
                    seen.gates[number].wait(10)
                if number == parameters.get("fails"):
                    raise KeyError("half-way")
                yield {"number": [number], "same": prediction[0]}
        finally:
            seen.threads.append(threading.current_thread().name)
            seen.closed.set()
"""
WRITES = "    current = None\n" + COUNTS.replace("seen = parameters", "global current; seen = current = parameters")


class Seen:
    """What a generator did; `gates` hold back the steps of their numbers."""

    def __init__(self, *gates: int) -> None:
        self.steps: list[int] = []
        self.threads: list[str] = []
        self.stepped = threading.Event()
        self.closed = threading.Event()
        self.gates = {number: threading.Event() for number in gates}

    async def has_stepped(self, count: int) -> None:
        while len(self.steps) < count:
            await is_set(self.stepped)
            self.stepped.clear()


def replica_of(hooks: Hooks) -> Any:
    return hooks._placement._replicas._live[0]  # type: ignore[union-attr]


async def loop_turn() -> None:
    await asyncio.sleep(0)


async def paused(hooks: Hooks) -> None:
    while replica_of(hooks).pending_calls:
        await loop_turn()


async def load(stage: Stage, source: str = COUNTS, engine: PuppetEngine | None = None, **options: Any) -> Hooks:
    return await stage.load(source, engine, decoupled=True, **options)


def stream(hooks: Hooks, n: int, seen: Seen | None = None, **more: Any) -> Any:
    return aclosing(hooks.stream(ONES, "id", parameters={"n": n, "seen": seen or Seen(), **more}))


async def answer_numbers(hooks: Hooks, n: int, seen: Seen | None = None, **more: Any) -> list[int]:
    async with stream(hooks, n, seen, **more) as answers:
        return [int(answer.outputs["number"][0]) async for answer in answers]


def counts(hooks: Hooks) -> list[dict[str, int]]:
    """Give the counts for each position, without durations and zeros."""
    statistics = hooks.model.statistics.answers
    assert isinstance(statistics, AnswerStatistics)
    snapshot = statistics.snapshot()
    assert list(snapshot) == [str(position) for position in range(len(snapshot))]
    return [
        {member: each["count"] for member, each in members.items() if each["count"]} for members in snapshot.values()
    ]


FINE = {"compute_infer": 1, "compute_output": 1, "success": 1}
NONE = {"compute_infer": 1, "empty_response": 1}
BAD = {"compute_infer": 1, "compute_output": 1, "fail": 1}


class TestAnswers:
    @pytest.mark.parametrize("n", [0, 1, 3, 5 * MAX_AHEAD + 1])
    def test_each_yielded_value_is_one_answer(self, act: Act, n: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await load(stage)

            assert await answer_numbers(hooks, n) == list(range(n))
            assert counts(hooks) == [*[FINE] * n, NONE]
            assert hooks.model.statistics.snapshot().first_response_histogram.count == min(n, 1)

        act(scene)

    def test_only_the_answer_of_a_hook_that_does_not_yield_is_marked_final(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            single = await load(stage, "def post_inference(prediction, metadata): return 7")
            bare = await stage.load(None)
            several = await load(stage)

            for hooks, expected in ((single, [True]), (bare, [True]), (several, [False] * 3)):
                async with stream(hooks, 3) as answers:
                    assert [answer.final async for answer in answers] == expected

        act(scene)

    def test_answers_that_are_ready_together_are_marked_more_except_the_last(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await load(stage)
            async with stream(hooks, MAX_AHEAD) as answers:
                more_flags = [(await anext(answers)).more]
                await paused(hooks)
                more_flags += [answer.more async for answer in answers]

            assert more_flags[1:] == [*[True] * (MAX_AHEAD - 2), False]

        act(scene)

    def test_pre_inference_can_be_async_when_post_inference_yields(self, act: Act) -> None:
        source = COUNTS + "    async def pre_inference(sample, metadata): return sample['x'] * 2\n"

        async def scene(stage: Stage) -> None:
            async with stream(await load(stage, source), 2) as answers:
                found = [answer.outputs["same"].tolist() async for answer in answers]

            assert found == [[[2.0] * 4]] * 2

        act(scene)

    def test_infer_rejects_a_generator_that_does_not_yield_exactly_one_answer(self, act: Act) -> None:
        text = (
            "expects model to produce exactly 1 response, use generate stream for model that generates various "
            "number of responses"
        )

        async def scene(stage: Stage) -> None:
            hooks = await load(stage)
            many = Seen()
            parameters = {"seen": many, "n": 100}
            one = await hooks.infer(ONES, parameters={"seen": Seen(), "n": 1})

            assert one["number"].tolist() == [0]
            assert await refusal(hooks.infer(ONES, parameters=parameters)) == (Code.INTERNAL, f"generate {text}")
            await is_set(many.closed)
            assert len(many.steps) < 100
            none = hooks.infer(ONES, parameters={"seen": Seen(), "n": 0})
            assert await refusal(none) == (Code.INTERNAL, f"generate {text}")

        act(scene)

    def test_predict_encodes_a_single_yielded_value_as_json(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await load(stage, "def post_inference(prediction, metadata): yield {'a': 1}")

            assert await hooks.predict([1, 2, 3, 4]) == b'{"a":1}'

        act(scene)


class TestErrors:
    def test_answers_yielded_before_an_exception_are_delivered(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await load(stage)
            async with stream(hooks, 9, fails=2) as answers:
                found = [int((await anext(answers)).outputs["number"][0]) for _ in range(2)]
                code, text = await refusal(anext(answers))

            assert (found, code) == ([0, 1], Code.INTERNAL)
            assert text == "post_inference failed; see the server log, request id id"
            assert counts(hooks) == [FINE, FINE, BAD]
            assert await answer_numbers(hooks, 2) == [0, 1]

        act(scene)

    def test_a_yielded_error_is_one_answer_and_the_generator_continues(self, act: Act) -> None:
        source = """
            from penstock.backends.errors import Code, InferError
            def post_inference(prediction, metadata):
                yield 1
                yield InferError(Code.INVALID, "not this one")
                yield 3
        """

        async def scene(stage: Stage) -> None:
            hooks = await load(stage, source)
            async with stream(hooks, 0) as answers:
                found: list[Answer] = [answer async for answer in answers]

            assert [answer.error and answer.error.message for answer in found] == [None, "not this one", None]
            assert counts(hooks) == [FINE, BAD, FINE, NONE]

        act(scene)

    def test_a_yielded_value_that_is_not_a_tensor_closes_the_generator(self, act: Act) -> None:
        source = """
            def post_inference(prediction, signature, metadata, parameters):
                try:
                    yield {"a": {"b": 1}}
                finally:
                    parameters["seen"].closed.set()
        """

        async def scene(stage: Stage) -> None:
            seen, hooks = Seen(), await load(stage, source)
            with pytest.raises(InferError, match="post_inference returned 'a' as a dict"):
                await answer_numbers(hooks, 0, seen)

            await is_set(seen.closed)

        act(scene)

    def test_post_inference_yields_no_answers_when_the_model_fails(self, act: Act) -> None:
        def broken(inputs: list[Any]) -> list[Any]:
            raise InferError(Code.INTERNAL, "broken")

        async def scene(stage: Stage) -> None:
            hooks = await load(stage, engine=PuppetEngine(broken, at_once=True))
            with pytest.raises(InferError, match="broken"):
                await answer_numbers(hooks, 1)

            assert counts(hooks) == []

        act(scene)


class TestPace:
    def test_the_generator_runs_at_most_max_ahead_answers_before_the_client(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            seen, hooks = Seen(), await load(stage)
            async with stream(hooks, 100, seen) as answers:
                await anext(answers)
                await seen.has_stepped(MAX_AHEAD)
                await paused(hooks)

                # one more may have been begun while the first was being taken
                assert MAX_AHEAD <= len(seen.steps) <= MAX_AHEAD + 1
                assert [int((await anext(answers)).outputs["number"][0]) for _ in range(50)] == list(range(1, 51))
                await paused(hooks)
                assert len(seen.steps) <= 51 + MAX_AHEAD
            await is_set(seen.closed)

        act(scene)

    def test_the_generator_runs_one_answer_ahead_when_answers_are_large(
        self, act: Act, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(generator_call, "MAX_AHEAD_BYTES", 16)

        async def scene(stage: Stage) -> None:
            seen, hooks = Seen(), await load(stage)
            async with stream(hooks, 100, seen) as answers:
                await anext(answers)
                await paused(hooks)

                assert len(seen.steps) <= 2
                assert [int((await anext(answers)).outputs["number"][0]) for _ in range(9)] == list(range(1, 10))

        act(scene)

    def test_generators_take_turns_on_a_shared_replica(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks = await load(stage, replicas="shared")
            first, second = Seen(0), Seen()
            async with stream(hooks, MAX_AHEAD, first) as answers:
                head = asyncio.create_task(anext(answers))
                await first.has_stepped(1)
                other = asyncio.create_task(answer_numbers(hooks, 3 * MAX_AHEAD, second))
                while not replica_of(hooks).has_waiting:
                    await loop_turn()
                first.gates[0].set()

                assert (await head).outputs["number"].tolist() == [0]
                assert await other == list(range(3 * MAX_AHEAD))
                assert [int(each.outputs["number"][0]) async for each in answers] == list(range(1, MAX_AHEAD))

        act(scene)


class TestCancellation:
    @pytest.mark.parametrize("answer_count", [1, 3])
    def test_an_abandoned_generator_is_closed_on_its_own_thread(self, act: Act, answer_count: int) -> None:
        async def scene(stage: Stage) -> None:
            hooks, seen = await load(stage), Seen()
            async with stream(hooks, 1000, seen) as answers:
                for _ in range(answer_count):
                    await anext(answers)
            await is_set(seen.closed)

            assert seen.threads == ["hooks-m/1"]
            assert counts(hooks)[answer_count - 1 :] == [FINE | {"cancel": 1}] or counts(hooks)[answer_count:] == [
                {"cancel": 1}
            ]
            assert await answer_numbers(hooks, 2) == [0, 1]

        act(scene)

    def test_a_running_step_ends_before_a_cancelled_generator_is_closed(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, seen = await load(stage), Seen(0)
            task = asyncio.create_task(answer_numbers(hooks, 5, seen))
            await seen.has_stepped(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not seen.closed.is_set()
            seen.gates[0].set()
            await is_set(seen.closed)

            assert seen.steps == [0]

        act(scene)

    def test_a_generator_cancelled_before_its_first_step_never_starts(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, first, second = await load(stage, replicas="shared"), Seen(0), Seen()
            begun = asyncio.create_task(answer_numbers(hooks, 1, first))
            await first.has_stepped(1)
            waiting = asyncio.create_task(answer_numbers(hooks, 1, second))
            await asyncio.sleep(0)
            waiting.cancel()
            # before the gate opens, because the replica's thread takes the requests that still wait
            with pytest.raises(asyncio.CancelledError):
                await waiting
            first.gates[0].set()

            assert await begun == [0]
            assert second.steps == []

        act(scene)

    def test_an_exception_while_closing_a_generator_is_logged(self, act: Act, caplog: pytest.LogCaptureFixture) -> None:
        source = """
            def post_inference(prediction, signature, metadata, parameters):
                try:
                    while True:
                        yield 1
                finally:
                    raise ValueError("so there")
        """

        async def scene(stage: Stage) -> None:
            hooks = await load(stage, source)
            async with stream(hooks, 0) as answers:
                await anext(answers)
                await paused(hooks)
            await paused(hooks)

        act(scene)
        assert "closing post_inference raised ValueError: so there" in caplog.text

    def test_closing_the_hooks_waits_for_running_generators(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, seen = await load(stage), Seen()
            async with stream(hooks, 3, seen) as answers:
                await anext(answers)
                closing = asyncio.create_task(hooks.close())
                await asyncio.sleep(0)
                assert (await refusal(answer_numbers(hooks, 1)))[0] is Code.NOT_READY
                assert len([answer async for answer in answers]) == 2
                assert not closing.done()
            await closing

        act(scene)

    def test_running_generators_are_closed_when_closing_the_hooks_is_cancelled(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, seen = await load(stage), Seen()
            async with stream(hooks, 10**9, seen) as answers:
                await anext(answers)
                closing = asyncio.create_task(hooks.close())
                await loop_turn()
                closing.cancel()
                await asyncio.wait((closing,))
                with pytest.raises(InferError, match="ended their thread"):
                    await drain(answers)
                await is_set(seen.closed)

        act(scene)
        assert not left_behind()


async def drain(answers: Any) -> None:
    async for _ in answers:
        pass


async def visit(hooks: Hooks, seen: Seen, chance: random.Random) -> bool:
    """Take a random number of answers at a random pace; tell whether the generator has begun."""
    n, answer_limit = chance.randrange(40), chance.randrange(50)
    fails = chance.randrange(40) if chance.random() < 0.2 else -1
    found: list[int] = []
    try:
        async with stream(hooks, n, seen, fails=fails) as answers:
            while len(found) < answer_limit and (answer := await anext(answers, None)) is not None:
                found.append(int(answer.outputs["number"][0]))
                for _ in range(chance.randrange(3)):
                    await loop_turn()
    except InferError:
        assert len(found) == fails
    else:
        assert len(found) == min(n, answer_limit)
    assert found == list(range(len(found)))
    return bool(answer_limit)


class TestReplicas:
    @pytest.mark.parametrize("source", [COUNTS, WRITES])
    @pytest.mark.parametrize("seed", range(5))
    def test_random_clients_get_their_own_answers_and_every_generator_is_closed(
        self, act: Act, source: str, seed: int
    ) -> None:
        chance = random.Random(seed)

        async def scene(stage: Stage) -> None:
            hooks = await load(stage, source)
            seen = [Seen() for _ in range(40)]
            tasks = [asyncio.create_task(visit(hooks, each, chance)) for each in seen]
            for task in tasks:
                if chance.random() < 0.1:
                    await loop_turn()
                    task.cancel()
            begun = await asyncio.gather(*tasks, return_exceptions=True)
            await hooks.close()
            for each, has_begun in zip(seen, begun, strict=True):
                if has_begun is True:
                    await is_set(each.closed)
                    assert len(each.threads) == 1
                assert isinstance(has_begun, bool | asyncio.CancelledError)

        act(scene)

    def test_a_replica_that_writes_globals_keeps_its_request_until_the_last_answer(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, first, second = await load(stage, WRITES, replicas=1), Seen(), Seen()
            async with stream(hooks, 3, first) as answers:
                await anext(answers)
                other = asyncio.create_task(answer_numbers(hooks, 2, second))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert second.steps == []
                assert len([answer async for answer in answers]) == 2

            assert await other == [0, 1]

        act(scene)

    def test_a_replica_is_freed_when_its_abandoned_generator_is_closed(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, first, second = await load(stage, WRITES, replicas=1), Seen(1), Seen()
            async with stream(hooks, 3, first) as answers:
                await anext(answers)
                await first.has_stepped(2)
            other = asyncio.create_task(answer_numbers(hooks, 2, second))
            await asyncio.sleep(0)
            assert second.steps == []
            first.gates[1].set()

            assert await other == [0, 1]
            assert first.closed.is_set()

        act(scene)

    def test_the_time_limit_applies_to_each_step_of_a_generator(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, seen = await load(stage), Seen(1)
            async with stream(hooks, 3, seen) as answers:
                first = await anext(answers)
                await seen.has_stepped(2)
                hooks.enforce_limits(time.monotonic_ns() + 29_000_000_000)
                hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)
                code, text = await refusal(anext(answers))

                assert first.outputs["number"].tolist() == [0]
                assert (code, text) == (
                    Code.EXPIRED, "post_inference of model 'm' took longer than its limit of 30 s",
                )  # fmt: skip
            seen.gates[1].set()
            await is_set(seen.closed)
            assert await answer_numbers(hooks, 2) == [0, 1]

        act(scene)

    def test_generators_on_a_shared_replica_fail_and_are_closed_when_a_step_hangs(self, act: Act) -> None:
        async def scene(stage: Stage) -> None:
            hooks, waits, hung = await load(stage, replicas="shared"), Seen(), Seen(0)
            async with stream(hooks, 3 * MAX_AHEAD, waits) as answers:
                await anext(answers)
                await paused(hooks)
                other = asyncio.create_task(answer_numbers(hooks, 1, hung))
                await hung.has_stepped(1)
                hooks.enforce_limits(time.monotonic_ns() + 31_000_000_000)

                assert (await refusal(other))[0] is Code.EXPIRED
                # answers that were yielded before are delivered first
                found = [int((await anext(answers)).outputs["number"][0]) for _ in waits.steps[1:]]
                assert found == list(range(1, len(waits.steps)))
                with pytest.raises(InferError, match="the hooks of model 'm' ended their thread"):
                    await anext(answers)
            hung.gates[0].set()
            await is_set(waits.closed)

        act(scene)
