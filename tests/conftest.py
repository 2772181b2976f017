"""What holds for every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.savedmodels import BUILT, build

# The same examples each time, on a busy machine as on an idle one. HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile(
    "house", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """Take back what a test has had a server log: the next test would pay for it, in time and in memory."""
    logger = logging.getLogger("penstock")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def savedmodels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the SavedModels of tests/savedmodels.py, not to be written to: `savedmodels / "iris"`."""
    built = os.environ.get(BUILT)
    return Path(built) if built else build(tmp_path_factory.mktemp("savedmodels"))
