"""Whole server processes, configured only by their environment and stopped by SIGTERM, as in a cloud's container."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.server.clouds.cloud_servers import are_right, body, outputs_of, write_simple

pytestmark = pytest.mark.slow

ON_LOOPBACK = {
    "PENSTOCK_SAGEMAKER_ADDRESS": "127.0.0.1", "PENSTOCK_VERTEX_AI_ADDRESS": "127.0.0.1", "PENSTOCK_METRICS_PORT": "0",
}  # fmt: skip
JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def running(words: list[str], environ: Mapping[str, str]) -> Iterator[tuple[str, httpx.Client]]:
    """Run a ready server, and stop it with SIGTERM. Yields where it listens, and a client of its first port."""
    command = [sys.executable, "-m", "penstock.server.cli", *words]
    environ = {**os.environ, **ON_LOOPBACK, **environ}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stderr is not None
            messages = [""]
            while not messages[-1].startswith("ready, serving"):
                messages.append(json.loads(process.stderr.readline())["msg"])
            places = next(line for line in messages if line.startswith("penstock "))
            port = re.search(r"http://127\.0\.0\.1:(\d+)", places)
            assert port is not None, messages
            with httpx.Client(base_url=port[0], timeout=30) as client:
                yield re.sub(r":\d+", "", places), client
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0


def test_vertex_ai_variables_alone_start_the_server(tmp_path: Path) -> None:
    environ = {
        "AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "0", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict",
        "AIP_STORAGE_URI": str(write_simple(tmp_path, "addsub")),
    }  # fmt: skip
    with running(["serve"], environ) as (places, client):
        assert client.get("/health").status_code == 200
        assert are_right(outputs_of(client.post("/predict", content=body()[0], headers=JSON)))

    assert places.endswith(": Vertex AI on http://127.0.0.1, metrics on http://127.0.0.1")


def test_penstock_sagemaker_serve_loads_and_invokes_a_model(tmp_path: Path) -> None:
    write_simple(tmp_path, "model")
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BIND_TO_PORT": "0"}
    with running(["sagemaker", "serve"], environ) as (places, client):
        assert client.get("/ping").status_code == 200
        load = {"model_name": "m1", "url": str(tmp_path / "model")}
        assert client.post("/models", json=load).status_code == 200
        assert are_right(outputs_of(client.post("/models/m1/invoke", content=body()[0], headers=JSON)))

    assert places.endswith(": SageMaker on http://127.0.0.1")
