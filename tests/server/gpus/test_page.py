"""The GPUs on the metrics page, from the time that models used to the text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.batching.model import Model
from penstock.server.settings import Settings
from penstock.server.telemetry import hardware
from penstock.server.telemetry.observability import make_metrics
from tests.fakes import fake_model
from tests.server.gpus.stub import H200, L4, Stub


class FakeEngine:
    def __init__(self, *models: Model) -> None:
        self.loaded = list(models)

    def models(self) -> list[Model]:
        return self.loaded


def test_the_energy_of_a_model_stays_on_the_metrics_page_after_an_unload(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_MAX_WAIT_S", 30.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{L4},{H200}")
    model = fake_model("iris", 3)
    model.spec = replace(model.spec, metric_tags=(("team", "a"),))
    engine: Any = FakeEngine(model)
    metrics = make_metrics(Settings(metrics_interval_ms=1), engine, lambda: (None, None))

    async def page() -> str:
        """Return a page of values read after this call."""
        count_calls = stub.calls()["nvmlDeviceGetCount_v2"]
        while True:
            text = (await metrics.render()).decode()
            if stub.calls()["nvmlDeviceGetCount_v2"] > count_calls:
                return text

    async def main() -> list[str]:
        pages = [await page()]
        model.device_ns["cuda:1"] = 10**15  # more than the time passed: the model was never idle
        stub.say(H200, "energy", "5002500")
        pages.append(await page())
        engine.loaded = []
        pages.append(await page())
        return pages

    before, after, unloaded = asyncio.run(main())
    labels = f'_team="a",model="iris",version="3",gpu_uuid="{H200}"'
    assert "penstock_energy_joules_total" not in before
    assert 'penstock_device_seconds_total{_team="a",model="iris",version="3",device="cuda:1"} 1000000\n' in after
    for text in (after, unloaded):
        assert f"\npenstock_energy_joules_total{{{labels}}} 2.5\n" in text
        assert f'\nnv_energy_consumption{{gpu_uuid="{H200}"}} 2.5\n' in text
        assert f'\npenstock_energy_rest_joules_total{{gpu_uuid="{H200}"}} 0\n' in text
