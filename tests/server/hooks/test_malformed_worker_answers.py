"""Workers that send malformed answers, and samples that cannot be sent to them: every request ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from tests.server.hooks.stage import Act, Stage

pytestmark = pytest.mark.slow
FORGING = """
import gc, struct, time

def pre_inference(sample, signature, metadata):
    if "forge" in sample:
        channel = next(each for each in gc.get_objects() if type(each).__name__ == "Channel")
        kind, number, body = sample["forge"]
        channel.send(kind, number, body.encode())
        time.sleep(60)
    return [[1, 2, 3, 4]]
"""
REPLY, ERROR, ANSWER = 19, 20, 64
FIRST = 2
"""The number of the first call after the one that opens a worker."""


@pytest.mark.parametrize(
    ("forged", "code"),
    [
        ((REPLY, FIRST, ""), Code.INTERNAL),
        ((REPLY, FIRST, "x" * 40), Code.INTERNAL),
        ((ERROR, FIRST, "{}"), Code.NOT_READY),
    ],
)
def test_a_malformed_answer_fails_its_request_and_ends_the_worker(act: Act, forged: Any, code: Code) -> None:
    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FORGING, workers=1)
        with pytest.raises(InferError) as refused:
            await asyncio.wait_for(hooks.predict({"forge": forged}), 5)
        assert refused.value.code is code
        assert await asyncio.wait_for(hooks.predict({}), 10)

    act(scene)


def test_a_sample_that_is_nested_too_deeply_fails_without_affecting_other_requests(act: Act) -> None:
    deep: list[Any] = []
    for _ in range(100_000):  # Python 3.11 writes 1,000 as JSON, 3.13 ten times as many
        deep = [deep]

    async def scene(stage: Stage) -> None:
        hooks = await stage.load(FORGING, workers=1)
        for _ in range(3):
            calls = [asyncio.ensure_future(hooks.predict(sample)) for sample in ({"a": deep}, {}, {"a": deep}, {})]
            async with asyncio.timeout(5):
                answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [isinstance(each, InferError) for each in answers] == [True, False, True, False]

    act(scene)
