"""`penstock abeja` for tests over its ports: within the process of the tests, or as a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from penstock.server.abeja.command import parse_settings
from tests.forking import Forked
from tests.live import live_server
from tests.originals import Player

from .original import ORIGINAL
from .scenarios.definitions import HANDLERS

COMMAND = [sys.executable, "-m", "penstock.server.cli", "abeja"]
_WITHIN_S = 60
_SHOWN = 5000
_OURS = ("ABEJA_", "TRAINING_JOB_", "PENSTOCK_")
_NAMED = {"HANDLER", "PORT", "HEALTHCHECK_PORT", "CONTEXT"}
_PORT = re.compile(r"\b(HTTP|health) on http://[^\s,]*:(\d+)")


PORTS = ("--port=0", "--health-port=0", "--http-address=127.0.0.1")


@dataclass
class Served:
    """A server. `ports`: "" takes requests, "health" only reports the health."""

    ports: dict[str, int]

    @property
    def player(self) -> Player:
        """Give a Player that sends requests to it."""
        return Player(ORIGINAL, self.ports)


@dataclass
class Started(Served):
    """A process that may be serving."""

    child: subprocess.Popen[bytes] | Forked
    output: IO[bytes]

    def whole_output(self) -> str:
        """Give the whole output of the process and the handler."""
        return Path(self.output.name).read_text("utf-8", "replace")

    def health(self) -> int:
        """Give the status of its health check; 0 if there is no answer."""
        with contextlib.suppress(OSError):
            case = {"method": "GET", "path": "/health_check", "port": "health"}
            return int(self.player.play(case)["status"])
        return 0


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Give the environment without the variables that the original read, and with those in `more`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS) and name not in _NAMED}
    return {**inherited, "PYTHONDONTWRITEBYTECODE": "1", **more}


@contextlib.contextmanager
def started(
    *words: str, folder: Path = HANDLERS, start: Callable[..., Any] = subprocess.Popen, **more: str
) -> Iterator[Started]:
    """Start a process without waiting until it serves. `start`: called like Popen. `more`: its environment."""
    with tempfile.NamedTemporaryFile() as output:
        child = start(
            [*COMMAND, *PORTS, "--log-format=json", *words], cwd=folder, env=environment(more), stdout=output,
            stderr=output,
        )  # fmt: skip
        served = Started({}, child, output)
        try:
            served.ports = _ports(served)
            yield served
        finally:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextlib.contextmanager
def serving(*words: str, folder: Path = HANDLERS, **more: str) -> Iterator[Served]:
    """Serve within this process, as a command line in a folder would. `more`: the environment."""
    with _environment_of(environment(more)):
        settings = parse_settings(
            [*PORTS, "--allow-grpc=false", "--allow-metrics=false", *words, str(folder)], os.environ
        )
        with live_server(**{field.name: getattr(settings, field.name) for field in fields(settings)}) as live:
            (health,) = live.server._extra_ports
            yield Served({"": live.http_port, "health": health.port})


def serving_group(server: Mapping[str, Any], *words: str) -> contextlib.AbstractContextManager[Served]:
    """Serve as described by the `server` of a group."""
    handler = [f"--handler={server['handler']}"] if server["handler"] else []
    return serving(*handler, *words, **server["environment"])


@contextlib.contextmanager
def _environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def await_ready(served: Started) -> None:
    """Wait until the server is ready. Raises: AssertionError if it ends first, or is not ready within a minute."""
    end = time.monotonic() + _WITHIN_S
    while served.health() != 200:
        assert served.child.poll() is None, served.whole_output()[-_SHOWN:]
        assert time.monotonic() < end, served.whole_output()[-_SHOWN:]
        time.sleep(0.02)


def _ports(served: Started) -> dict[str, int]:
    end = time.monotonic() + _WITHIN_S
    while time.monotonic() < end:
        for line in served.whole_output().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if found := dict(_PORT.findall(json.loads(line)["msg"])):
                    return {"": int(found["HTTP"]), "health": int(found["health"])}
        if served.child.poll() is not None:
            break
        time.sleep(0.02)
    return {}
