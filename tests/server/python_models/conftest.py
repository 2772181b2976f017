"""Stages for Python models in their workers, and clients of the module's live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.http as triton_http

from tests.live import Live
from tests.server.python_models.inside_stage import Open, Stage


@pytest.fixture
def opened() -> Iterator[Open]:
    stages: list[Stage] = []

    def open_one(*terms: Any, **more: Any) -> Stage:
        stages.append(Stage(*terms, **more))
        return stages[-1]

    yield open_one
    for stage in stages:
        stage.close()


@pytest.fixture
def http(live: Live) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(live.address, concurrency=8) as client:
        yield client
