"""Changes that clients made in an engine are restored in the next engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.server.fronts.engine_server import EngineServer
from penstock.server.supervisor.roles import EngineProcess
from penstock.server.supervisor.saved_state import SavedState
from penstock.server.v2.regions import SYSTEM
from tests.live import settings_for


@pytest.fixture
def supervisor() -> Iterator[Any]:
    """What an engine receives before its start: the previous engine had a region."""
    region = {"name": "r", "key": "/gone", "offset": 0, "byte_size": 64}
    memory = [os.memfd_create("region")]
    os.ftruncate(memory[0], 64)
    yield SimpleNamespace(
        saved={"region r": ({"kind": SYSTEM, "region": region}, memory)}, save=lambda *_: None,
        request_end=lambda: None, logs=SimpleNamespace(apply=lambda _: None), drain_ordered=asyncio.Event(),
    )  # fmt: skip
    for each in memory:
        os.close(each)


def test_saved_regions_are_restored_before_the_engine_opens(
    supervisor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = EngineServer.open
    region_names: list[list[str]] = []

    def look(server: EngineServer) -> None:
        region_names.append([region.name for region in server.server.shared_memory.regions])

    async def opens(server: EngineServer) -> None:
        look(server)  # no request has been received yet
        await begin(server)

    monkeypatch.setattr(EngineServer, "open", opens)

    async def main() -> None:
        engine = EngineProcess(settings_for(tmp_path, allow_client_shm=True), supervisor, {})
        try:
            await engine.listen()
            await engine.load()
            look(engine._server)
        finally:
            await engine.close()

    asyncio.run(main())
    assert region_names == [["r"], ["r"]]


class Control:
    """Unloads nothing, and saves as ModelControl does; `then` is called first."""

    def __init__(self, supervisor: Any) -> None:
        self.unloaded: list[str] = []
        self.then: Callable[[], None] = lambda: None
        self.saved_state = SavedState(supervisor, supervisor.saved)

    async def unload(self, name: str, *, dependents: bool) -> None:
        self.then()
        self.unloaded.append(name)
        self.saved_state._save_model(name, {"unload": dependents})

    def restore(self) -> list[str]:
        server: Any = SimpleNamespace(control=self)
        self.saved_state._server = server
        asyncio.run(self.saved_state.restore())
        return self.unloaded


def test_a_model_loaded_by_a_client_during_startup_is_not_unloaded_by_the_restore(supervisor: Any) -> None:
    supervisor.saved = {"model m": ({"unload": False}, []), "model n": ({"unload": False}, [])}
    control = Control(supervisor)
    control.saved_state._save_model("m", {"config": "", "files": False})  # loaded

    assert control.restore() == ["n"]


def test_changes_made_in_the_old_engine_during_a_restore_are_restored_too(supervisor: Any) -> None:
    supervisor.saved = {"model m": ({"unload": False}, [])}
    control = Control(supervisor)

    def say_more() -> None:
        if not control.unloaded:
            supervisor.saved["model m"] = {"unload": True}, []

    control.then = say_more

    assert control.restore() == ["m", "m"]
