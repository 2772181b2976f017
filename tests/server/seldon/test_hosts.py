"""Hosts of a component: the descriptions from workers. Tests shared by all carried calls: tests/server/carrying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.backends.errors import InferError
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import InstanceGroup
from penstock.server.seldon.messages import ComponentDescription
from tests.server.carrying.crews import Ledger
from tests.server.seldon.crews import SeldonEcho, SeldonStage


def test_a_new_workers_description_replaces_the_components_description(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = SeldonEcho()
    stage = SeldonStage(echo, lambda body: "die" if body[2:] == b"die" else "answer")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        assert stage.models.descriptions[model.name].health == ""
        echo.description = ComponentDescription(health="changed")
        engine.submit(stage.call(model, "die", ledger))
        await ledger.all(1)
        engine.submit(stage.call(model, "after", ledger))
        await ledger.all(2)
        assert stage.models.descriptions[model.name].health == "changed"

    stage.run(monkeypatch, scene)


def test_the_description_is_unchanged_when_a_new_version_fails_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = SeldonEcho()
    stage = SeldonStage(echo)
    stage.fails_to_start = lambda: len(stage.workers) == 4

    async def scene(engine: Engine, model: Model) -> None:
        echo.description = ComponentDescription(health="of what is not served")
        with pytest.raises(InferError, match="does not start"):
            await engine.load(replace(model.spec, instances=(InstanceGroup(2),)))
        assert stage.models.descriptions[model.name].health == ""

    stage.run(monkeypatch, scene, workers=2)
