"""What a hop is measured with where nothing is said."""

from __future__ import annotations

from pathlib import Path

from penstock.backends.loading import LOADERS
from penstock.perf import ipc


def test_the_default_model_is_made_and_loads(tmp_path: Path) -> None:
    path = ipc.make_model(tmp_path / "made")

    backend = LOADERS["onnxruntime"](path, "cpu", {})

    assert [spec.name for spec in backend.graph.inputs] == ["input"]
