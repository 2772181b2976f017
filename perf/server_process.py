"""Servers started for a benchmark, over loopback. Their CPU time is read from /proc."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import processes
from .calls import HOST

READY_LIMIT_S = 60.0
_SERVE = (sys.executable, "-m", "penstock.server.cli", "serve", "--allow-metrics=false")


class Process:
    """A server started for a run. It listens on `port`; its CPU time is read from /proc."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def cpu_s(self) -> float:
        """CPU time so far of all its threads, user and system."""
        return processes.stat(self.pid).cpu_s

    def rss_mib(self) -> float:
        """Return its resident memory now."""
        return processes.rss_bytes(self.pid) / (1 << 20)

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Make one call. Raises: RuntimeError with the answer if its status is not 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=READY_LIMIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            content = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:500]!r}")
        return content

    def counts(self, model: str) -> tuple[int, int]:
        """Rows and batches that the model has run."""
        stats: dict[str, Any] = json.loads(self.request("GET", f"/v2/models/{model}/stats"))["model_stats"][0]
        return stats["inference_count"], stats["execution_count"]


def penstock(folder: Path, *options: str) -> contextlib.AbstractContextManager[Process]:
    """Serve a model repository over HTTP until the block ends. `options` are further arguments of `serve`."""
    command = [*_SERVE, str(folder), "--allow-grpc=false", *options, "--http-port"]
    return running_server(command, http_ready("/v2/health/ready"))


@contextlib.contextmanager
def penstock_over_grpc(folder: Path, *options: str) -> Iterator[tuple[Process, int]]:
    """Serve a model repository over both protocols until the block ends. Also yields the gRPC port."""
    port = free_port()
    with penstock(folder, "--allow-grpc", "--grpc-port", str(port), *options) as process:
        yield process, port


def bare_uvicorn() -> contextlib.AbstractContextManager[Process]:
    """Serve the echo until the block ends."""
    return running_server([sys.executable, "-m", "penstock.perf.baselines.asgi_echo"], http_ready("/"))


def prototype(where: str, model: Path) -> contextlib.AbstractContextManager[Process]:
    """Serve one model with the prototype until the block ends, over both protocols. `where`: "loop" or "thread"."""
    return running_server(
        [sys.executable, "-m", "penstock.perf.baselines.prototype", where, str(model)], http_ready("/")
    )


@contextlib.contextmanager
def running_server(command: Sequence[str], check_ready: Callable[[Process], object]) -> Iterator[Process]:
    """Run a server, whose command ends with its port, from when `check_ready` succeeds until the block ends."""
    port = free_port()
    with subprocess.Popen([*command, str(port)]) as child:
        process = Process(child.pid, port)
        try:
            await_ready(process, child, check_ready)
            yield process
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


def http_ready(path: str) -> Callable[[Process], object]:
    """Return a check for `running_server`: the server is ready once it answers `path` with 200."""
    return lambda process: process.request("GET", path)


def await_ready(process: Process, child: subprocess.Popen[bytes], check_ready: Callable[[Process], object]) -> None:
    """Wait until `check_ready` succeeds. Raises: RuntimeError if the server exits or is not ready in time."""
    end = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            check_ready(process)
        except Exception as error:
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{child.args!r} did not get ready: {error}") from error
            time.sleep(0.02)
        else:
            return
