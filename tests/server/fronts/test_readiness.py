"""Readiness says what inference does, also when what a request needs runs in another process that is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock.server.faults import own_workers
from tests.live import Live, live_server
from tests.server.fronts.living import live_front

pytestmark = pytest.mark.slow
IRIS = Path(__file__).parents[3] / "examples" / "iris"
HOOKS = "def pre_inference(sample, metadata): return sample\n"
GUARD_S = 20.0


def _until(met: Callable[[], bool]) -> None:
    end_s = time.monotonic() + GUARD_S
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _statuses(live: Live) -> tuple[int, int, int]:
    """Give what inference, the model's readiness and the server's say."""
    sample = [5.1, 3.5, 1.4, 0.2]
    return (
        httpx.post(f"{live.url}/v2/models/iris/predict", json=sample, timeout=GUARD_S).status_code,
        httpx.get(f"{live.url}/v2/models/iris/ready").status_code,
        httpx.get(f"{live.url}/v2/health/ready").status_code,
    )


@pytest.mark.parametrize("serving", [live_server, live_front])
def test_a_model_whose_hooks_cannot_be_loaded_again_is_not_ready(
    tmp_path: Path, serving: Callable[..., contextlib.AbstractContextManager[Live]]
) -> None:
    (model,) = [path.parent.parent for path in IRIS.rglob("model.onnx")]
    shutil.copytree(model, tmp_path / "iris")
    (tmp_path / "iris" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\nworkers = 1\n', "utf-8")
    hooks = tmp_path / "iris" / "hooks.py"
    hooks.write_text(HOOKS, "utf-8")
    with serving(tmp_path) as live:
        assert _statuses(live) == (200, 200, 200)
        hooks.write_text("import nothing_of_that_name\n", "utf-8")
        for pid in own_workers():
            os.kill(pid, signal.SIGKILL)

        _until(lambda: _statuses(live) == (503, 400, 400))
        hooks.write_text(HOOKS, "utf-8")
        _until(lambda: _statuses(live) == (200, 200, 200))
