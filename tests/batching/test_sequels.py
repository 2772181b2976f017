"""Sequels: requests of a sequence reach an ensemble's sequence model in order, whatever earlier steps do."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.spec import SequenceSpec
from tests.batching.ensembles import House, ensemble_spec, house, step, values_of
from tests.fakes import PATIENCE_S

pytestmark = pytest.mark.anyio

LATE, GUILTY = 1.0, -1.0
MANY = 400
"""More than the interpreter's stack would hold, were each to let the next one go from within its own end."""


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


def same(inputs: list[Any]) -> list[Any]:
    return [inputs[0]]


class Pair:
    """An ensemble of a model with two Instances, one of which waits with LATE and with GUILTY, and a sequence model."""

    def __init__(self, there: House) -> None:
        self.there = there
        self.first = threading.Event()

    def before(self, inputs: list[Any]) -> list[Any]:
        value = inputs[0].flat[0]
        if value in (LATE, GUILTY) and not self.first.wait(PATIENCE_S):
            raise TimeoutError("nobody let the first one go")
        if value == GUILTY:
            raise InferError(Code.INVALID, "a guilty row")
        return [inputs[0]]

    async def serve(self, *, nested: bool = False) -> None:
        self.first.set()  # the warm-up
        await self.there.serve("before", self.before, count=2, cap_rows=1)
        self.first.clear()
        sums = replace(self.there.spec("sums", same), sequence=SequenceSpec(direct=False, idle_us=60_000_000))
        await self.there.engine.load(sums)
        self.there.backends["sums"].runs.clear()
        last = "sums"
        if nested:
            await self.there.engine.load(ensemble_spec("inner", "x", "y", step("sums", "x=x", "y=y")))
            last = "inner"
        steps = step("before", "x=in", "y=between"), step(last, "x=between", "y=out")
        await self.there.engine.load(ensemble_spec("pair", "in", "out", *steps))

    def ask(self, value: float, identity: int | str = 7, *, start: bool = False) -> InferRequest:
        request = self.there.request("pair", value)
        request.sequence = InSequence(identity, start)
        self.there.engine.submit(request)
        return request

    @property
    def came(self) -> list[float]:
        """The values that the sequence model received, in order."""
        return [float(run.inputs[0].flat[0]) for run in self.there.backends["sums"].runs if run.inputs[0] is not None]

    @property
    def stored_count(self) -> int:
        ensemble = self.there.engine.model("pair").ensemble
        return 0 if ensemble is None else len(ensemble.sequels)


@pytest.mark.parametrize("nested", [False, True])
async def test_a_request_that_overtook_another_of_its_sequence_waits_for_it(nested: bool) -> None:
    async with house() as there:
        pair = Pair(there)
        await pair.serve(nested=nested)
        for value in (LATE, 2, 3):
            pair.ask(value, start=value == LATE)
        pair.ask(5, 8, start=True)
        assert values_of(await there.sink.holds(1)) == [5]

        pair.first.set()

        assert values_of(await there.sink.holds(4)) == pair.came == [5, LATE, 2, 3]
        assert pair.stored_count == 0
        assert there.at_rest()


async def test_a_request_that_fails_in_an_earlier_step_releases_the_requests_waiting_for_it() -> None:
    async with house() as there:
        pair = Pair(there)
        await pair.serve()
        pair.ask(GUILTY, start=True)
        others = [pair.ask(2 + each) for each in range(MANY)]
        pair.ask(5, 8, start=True)
        await there.sink.holds(1)

        pair.first.set()
        await there.sink.holds(MANY + 2)

        assert {each.error.message.split("must")[1] for each in others if each.error is not None} == {
            " specify the START flag on the first request of the sequence"
        }
        assert pair.came == [5]
        assert pair.stored_count == 0
        assert there.at_rest()


async def test_a_canceled_request_releases_the_requests_waiting_for_it() -> None:
    async with house() as there:
        pair = Pair(there)
        await pair.serve()
        first = pair.ask(LATE, start=True)
        for value in (2, 3):
            pair.ask(value, start=value == 2)
        pair.ask(5, 8, start=True)
        await there.sink.holds(1)

        there.engine.cancel(first)

        assert values_of(await there.sink.holds(3)) == pair.came == [5, 2, 3]
        assert pair.stored_count == 0
        pair.first.set()
