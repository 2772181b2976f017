"""What holds for every test."""

from __future__ import annotations

import compileall
import fcntl
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.forking import Forker
from tests.savedmodels import BUILT, build

# The same examples each time, on a busy machine as on an idle one. HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile(
    "house", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""numpy's own threads, which look for work before they sleep: a third of what it takes to import numpy on two cores, as
some 2000 processes of a run do. Whoever asks for another number has it."""
ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "batching", "backends", "perf")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what hundreds of processes import: where PYTHONDONTWRITEBYTECODE is set, each would do so for itself."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for package in PACKAGES:
            compileall.compile_dir(ROOT / package, quiet=2)


def pytest_collectstart() -> None:
    """Keep the collector from walking over ever more tests while they are collected: they stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor while they run: where a test asks for a collection, it would walk for a second over all of the others."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Keep it from what other files have left, too: there is ever more of it, and each collection walks over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """Take back what a test has had a server log: the next test would pay for it, in time and in memory."""
    logger = logging.getLogger("penstock")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Give who starts commands in milliseconds."""
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def savedmodels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the SavedModels of tests/savedmodels.py, not to be written to: `savedmodels / "iris"`.

    It is built once for all processes of a run: whoever is first does so, and the others wait.
    """
    if BUILT in os.environ:
        return Path(os.environ[BUILT])
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return build(tmp_path_factory.mktemp("savedmodels"))
    folder = tmp_path_factory.getbasetemp().parent / "savedmodels"
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lock.seek(0, os.SEEK_END):
            folder.mkdir(exist_ok=True)
            build(folder)
            lock.write("built")
    return folder
