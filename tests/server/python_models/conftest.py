"""Stages for Python models in their workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
