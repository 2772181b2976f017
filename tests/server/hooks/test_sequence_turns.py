"""SequenceTurns: the requests of a sequence reach the model in order."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.spec import SequenceSpec
from penstock.server.hooks.sequence_turns import SequenceTurns
from tests.server.hooks.stage import Act, PuppetEngine, Stage, is_set

HELD = """
    current = None
    def pre_inference(sample, signature, metadata, parameters):
        global current
        current = sample
        parameters["began"].set()
        parameters["gate"].wait(10)
        if sample["x"] < 0:
            raise ValueError("no")
        return [sample["x"]] * 4
"""


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from(["ok", "fails", "cancelled"]))))
def test_requests_of_a_sequence_stay_in_order_whatever_each_one_takes(requests: list[tuple[str, int, str]]) -> None:
    async def main() -> None:
        turns, passed = SequenceTurns(), []

        async def one(number: int, name: str, steps: int, end: str) -> None:
            turn = turns.take(name)
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                if end == "fails":
                    return
                await turn.wait_turn()
            finally:
                turn.release_turn()
            passed.append((name, number))

        tasks = []
        for number, (name, steps, end) in enumerate(requests):
            tasks.append(asyncio.ensure_future(one(number, name, steps, end)))
            await asyncio.sleep(0)
            if end == "cancelled":
                tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(2 + 2 * len(requests)):
            await asyncio.sleep(0)

        for name in "ab":
            numbers = [number for each, number in passed if each == name]
            assert numbers == sorted(numbers)
        expected = {(name, number) for number, (name, _, end) in enumerate(requests) if end == "ok"}
        assert expected <= set(passed)
        assert len(turns) == 0

    asyncio.run(main())


def test_a_slow_pre_inference_delays_only_later_requests_of_its_sequence(act: Act) -> None:
    async def scene(stage: Stage) -> None:
        values: list[float] = []

        def model(inputs: list[Any]) -> list[Any]:
            values.append(float(inputs[0][0, 0]))
            return inputs

        hooks = await stage.load(HELD, PuppetEngine(model, at_once=True), replicas=4)
        object.__setattr__(stage.model.spec, "sequence", SequenceSpec())
        parameters = [stage.sample(is_open=is_open) for is_open in (False, True, True, True)]
        requests = [(1, 7), (2, 7), (-1, 7), (4, 8)]
        tasks = []
        for (x, identity), own in zip(requests, parameters, strict=True):
            terms = RequestOptions(sequence=InSequence(identity))
            tasks.append(asyncio.create_task(hooks.predict({"x": x}, terms=terms, parameters=own)))
            await is_set(own["began"])
        await tasks[3]
        assert values == [4]
        parameters[0]["gate"].set()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert values == [4, 1, 2]

    act(scene)
