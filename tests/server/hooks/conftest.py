"""The stage on which tests of hooks play their scenes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.hooks.stage import Act, acted


@pytest.fixture
def act(tmp_path: Path) -> Iterator[Act]:
    yield from acted(tmp_path)
