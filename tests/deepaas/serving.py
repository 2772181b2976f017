"""A live Penstock that serves the models of a group, as `penstock deepaas-run` or `penstock serve`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.server.deepaas.command import parse
from tests.deepaas.replay import COMPILED, MODULES, installed, words_of
from tests.forking import Forked, the_forker
from tests.live import live_server

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
_LISTENING = re.compile(r"HTTP on http://127\.0\.0\.1:(\d+)(?s:.*)ready, serving")
_READY_WITHIN_S = 60


def run_words(server: Mapping[str, Any], folder: Path) -> list[str]:
    """Say it in the words of the original's command."""
    return ["deepaas-run", "--listen-port", "0", *words_of(server, folder)]


def serve_words(server: Mapping[str, Any], folder: Path) -> list[str]:
    """Say it in our own words, with models that are not installed."""
    models = [f"{name}={point}" for name, point in server["models"].items()]
    return ["serve", "--dialect", "deepaas", "--http-port", "0", "--metrics-port", "0", "--grpc-port", "0", *models]


@contextlib.contextmanager
def served(server: Mapping[str, Any]) -> Iterator[int]:
    """Serve the models of a group within this process, as the original's command would. Yields: the port."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        installed(server, folder)
        before, environment = (dict(os.environ), list(sys.path)), environment_of(server, folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [str(MODULES), name]  # where what is installed is looked for; none of it is imported here
        try:
            settings = parse(run_words(server, folder)[1:], os.environ).settings
            with live_server(**{field.name: getattr(settings, field.name) for field in fields(settings)}) as live:
                yield live.http_port
        finally:
            os.environ.clear()
            os.environ.update(before[0])
            sys.path[:] = before[1]


@contextlib.contextmanager
def served_apart(server: Mapping[str, Any], words: Any = run_words) -> Iterator[int]:
    """Serve them in a process. Yields: the port. Raises: RuntimeError, with the log, if it does not serve."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+b") as log:
        folder = Path(name)
        installed(server, folder)
        child = the_forker().start(
            [PENSTOCK, *words(server, folder)],
            cwd=name,
            env=environment_of(server, folder),
            stdout=log,
            stderr=log,
        )
        try:
            yield _port(child, folder / "log")
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # the session that was begun for it, and nothing else
            child.wait()


def environment_of(server: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Give the environment in which the models of a group are installed, and nothing else is said."""
    return {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "OPENBLAS_NUM_THREADS": "1",  # as tests/conftest.py has it
        "PYTHONPATH": os.pathsep.join([str(MODULES), str(folder)]),
        "PYTHONPYCACHEPREFIX": str(COMPILED),
        **server.get("environment", {}),
    }


def _port(child: Forked, log: Path) -> int:
    end = time.monotonic() + _READY_WITHIN_S
    while child.poll() is None and time.monotonic() < end:
        if found := _LISTENING.search(log.read_text("utf-8", "replace")):
            return int(found.group(1))
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.05)
    raise RuntimeError(log.read_text("utf-8", "replace")[-3000:])
