"""What scheduling costs is measured on the Engine itself, without a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import onnx
import pytest

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.perf import micro, models


@pytest.mark.slow
def test_every_queue_is_measured_with_and_without_a_target_and_compared_with_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.iris(), path)
    monkeypatch.setattr(micro, "ROUNDS", 1)

    async def measure() -> None:
        engine = Engine(asyncio.get_running_loop(), LOADERS)
        await micro.scheduling(engine, path)
        await engine.stop(1.0)

    asyncio.run(measure())

    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("scheduling, a target") for line in lines] == [False, False, False, True, True, True, False]
    assert lines[-1].startswith("scheduling: ")
    assert lines[-1].endswith(("at most 3: holds", "at most 3: DOES NOT HOLD"))
