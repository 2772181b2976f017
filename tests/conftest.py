"""Fixtures and hooks for all tests."""

from __future__ import annotations

import compileall
import fcntl
import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.forking import MADE, Forker, the_forker
from tests.savedmodels import BUILT, build

# The same examples each time, on a busy machine as on an idle one. tests/deep.py searches for new ones.
settings.register_profile(
    "house", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
"""numpy's own threads poll for work before they sleep, which takes a third of the time to import numpy on two cores, as
some 2000 processes of a run do. A number that is already set is kept."""
ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "batching", "backends", "perf")
FORKED = (
    "clients/test_tensorflow", "cortex/test_tensorflow", "deepaas/", "seldon/", "server/deepaas/",
    "server/python_models/", "server/seldon/",
)  # fmt: skip
"""Where workers of servers within this process are forked (tests/workers.py), but for files whose names end so:"""
STARTED = ("_faults.py", "_trainings_live.py")
"""These tests are about how workers end, and the output of the processes that workers have forked."""
COMPILES_NOTHING = sys.dont_write_bytecode


def pytest_configure(config: pytest.Config) -> None:
    """Compile what hundreds of processes import: if PYTHONDONTWRITEBYTECODE is set, each would compile it for itself.

    Of the tests, each worker first reads a different share, and finds the others' compiled: rewriting their assertions
    again takes as long as everything else in reading them.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None:
        for package in PACKAGES:
            compileall.compile_dir(ROOT / package, quiet=2)
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py"))
        first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
        config.args = files[first:] + files[:first]


def pytest_collectstart() -> None:
    """Keep the garbage collector from scanning ever more tests while they are collected: they stay alive."""
    gc.disable()
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files in one order, wherever a worker began to read. Tests of one file keep their order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from scanning the tests while they run: each collection would take a second.

    Any garbage among them stays too: there is little of it, and finding it takes that second.
    """
    sys.dont_write_bytecode = COMPILES_NOTHING
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Keep the collector from scanning what other test files left: there is ever more of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """Reset the log level that a test has set: the next test would pay for it, in time and in memory."""
    logger = logging.getLogger("penstock")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keep the garbage collector from freeing anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def forker() -> Forker:
    """Return the Forker, which starts commands in milliseconds."""
    return the_forker()


@pytest.fixture(autouse=True, scope="module")
def _forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork workers, which takes milliseconds, in tests that do not concern their processes."""
    file = request.path.relative_to(ROOT / "tests").as_posix()
    if not file.startswith(FORKED) or file.endswith(STARTED):
        yield
        return
    from penstock.server.workers import worker
    from tests.workers import ForkedProcess

    the_forker()  # now: tests compare the open files before and after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Process", ForkedProcess)
        yield


@pytest.fixture
def started_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Really start the workers of one test: it examines their processes."""
    from penstock.server.workers import process, worker

    monkeypatch.setattr(worker, "Process", process.Process)


def pytest_unconfigure() -> None:
    """Close all forkers."""
    for made in MADE:
        made.close()


@pytest.fixture(scope="session")
def savedmodels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the SavedModels of tests/savedmodels.py, not to be written to: `savedmodels / "iris"`.

    It is built once for all processes of a run: the first one builds it, and the others wait.
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
