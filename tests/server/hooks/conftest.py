"""The stage that every test of hooks plays on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.server.hooks.stage import GUARD_S, Act, Stage, left_behind


@pytest.fixture
def act(tmp_path: Path) -> Iterator[Act]:
    def run(scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def whole() -> None:
            stage = Stage(tmp_path)
            async with asyncio.timeout(GUARD_S):
                await scene(stage)
                await stage.close()

        asyncio.run(whole())

    yield run
    assert left_behind() == []
