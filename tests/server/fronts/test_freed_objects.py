"""Objects that an engine keeps for a front end, or a front end for its engine, are freed when the other disconnects."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import pytest
import uvloop

from penstock.server.fronts.engine_server import EngineServer
from penstock.server.fronts.front import FrontServer
from tests.live import settings_for
from tests.server.fronts.live_fronts import attach, running_fronts

IRIS = Path(__file__).parents[3] / "examples" / "iris"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_collector")]


async def _until_gone(parts: list[weakref.ref[object]]) -> None:
    async with asyncio.timeout(10):
        while any(part() is not None for part in parts):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


def _of_a_front_end(engine: EngineServer, number: int) -> list[weakref.ref[object]]:
    front = engine._fronts[number]
    return [weakref.ref(each) for each in (front, front.link, front.service, front._control)]


def _of_an_engine(front: FrontServer) -> list[weakref.ref[object]]:
    model_table = front._model_table
    assert model_table is not None
    return [weakref.ref(model_table), weakref.ref(model_table._link)]


def _of_its_models(front: FrontServer) -> list[weakref.ref[object]]:
    model_table = front._model_table
    assert model_table is not None
    return [weakref.ref(each) for each in (*model_table._models.values(), *model_table._hooks.values())]


def test_a_front_end_that_disconnects_leaves_no_object_in_the_engine() -> None:
    async def main() -> None:
        settings = settings_for(IRIS, allow_metrics=False)
        async with running_fronts(settings) as (_, engine):
            other = FrontServer(settings)
            number = attach(engine, other)
            assert await other.wait_ready(10)
            parts = _of_a_front_end(engine, number)
            await other.close()
            await _until_gone(parts)

    uvloop.run(main())


def test_an_engine_that_disconnects_leaves_no_object_in_a_front_end() -> None:
    async def main() -> None:
        settings = settings_for(IRIS, allow_metrics=False)
        async with running_fronts(settings) as ((front,), engine):
            models = _of_its_models(front)
            assert len(models) == 2
            for number in (1, 2):
                parts = _of_an_engine(front)
                engine.detach(number)
                await _until_gone(parts)
                attach(engine, front)
                assert await front.wait_ready(10)
            # hooks are modules, which only the garbage collector frees: at the latest with the next engine
            await _until_gone(models)

    uvloop.run(main())
