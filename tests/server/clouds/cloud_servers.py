"""Helpers for the tests of the cloud ports: servers with such a port on loopback, and requests made by tritonclient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tritonclient.http import InferenceServerClient

from penstock.backends.backend import Array
from tests.clients.models import INT32, SIMPLE_CONFIG, SUM_AND_DIFFERENCE, Tensors, write
from tests.clients.tensors import output_of, pair
from tests.live import Live, live_server

ROWS = np.arange(16, dtype=np.int32).reshape(1, 16)
SAGEMAKER_MIME = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_MIME = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
ROUTES = {"vertex_ai_health_route": "/health", "vertex_ai_predict_route": "/predict"}


def write_simple(root: Path, name: str = "simple") -> Path:
    """Write NVIDIA's `simple` under the given name: the sum and the difference of two rows of 16."""
    inputs: Tensors = {f"INPUT{i}": (INT32, ["N", 16]) for i in (0, 1)}
    outputs: Tensors = {f"OUTPUT{i}": (INT32, ["N", 16]) for i in (0, 1)}
    write(root, name, SUM_AND_DIFFERENCE, (inputs, outputs), config=SIMPLE_CONFIG.replace('"simple"', f'"{name}"'))
    return root


def body(
    sent: tuple[bool, bool] = (False, False), binary_outputs: tuple[bool, bool] = (False, False)
) -> tuple[bytes, int]:
    """Write a request for `simple`; True stands for binary. Return the body and the size of its JSON, 0 for all."""
    outputs = [output_of(f"OUTPUT{i}", binary=way) for i, way in enumerate(binary_outputs)]
    inputs = pair(ROWS, ROWS, binary=sent)
    written, json_bytes = InferenceServerClient.generate_request_body(inputs, outputs=outputs)
    return bytes(written), json_bytes or 0


def outputs_of(response: httpx.Response, json_bytes: int | None = None) -> list[Array]:
    """Read an answer as tritonclient does."""
    assert response.status_code == 200, response.text
    found = InferenceServerClient.parse_response_body(response.content, header_length=json_bytes)
    return [found.as_numpy(f"OUTPUT{i}") for i in (0, 1)]


def are_right(outputs: Sequence[Array]) -> bool:
    """Return whether the outputs are the sum and the difference of ROWS with itself."""
    return bool((outputs[0] == 2 * ROWS).all() and (outputs[1] == 0).all())


@contextmanager
def sagemaker(*paths: Path, **settings: Any) -> Iterator[tuple[Live, httpx.Client]]:
    """Serve the paths with SageMaker's port."""
    options: dict[str, Any] = {"sagemaker_address": "127.0.0.1", "sagemaker_port": 0} | settings
    with live_server(*paths, allow_sagemaker=True, **options) as live:
        port = live.server.clouds.sagemaker
        assert port is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{port.port}", timeout=30) as client:
            yield live, client


@contextmanager
def vertex_ai(*paths: Path, **settings: Any) -> Iterator[tuple[Live, httpx.Client]]:
    """Serve the paths with Vertex AI's port."""
    options: dict[str, Any] = {**ROUTES, "vertex_ai_address": "127.0.0.1", "vertex_ai_port": 0} | settings
    with live_server(*paths, allow_vertex_ai=True, **options) as live:
        port = live.server.clouds.vertex_ai
        assert port is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{port.port}", timeout=30) as client:
            yield live, client
