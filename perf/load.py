"""Closed-loop load from outside: wrk drives a server over loopback, and /proc tells the CPU time the server took.

wrk is Debian's package: compiled, one thread, so that the load costs little of the two cores it shares with the server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
READY_WITHIN_S = 60.0
_SERVE = (sys.executable, "-m", "penstock.server.cli", "serve", "--allow-metrics=false")

_SCRIPT = """
wrk.method = "POST"
local bodies = {}
for i, path in ipairs({%s}) do
    local file = assert(io.open(path, "rb"))
    bodies[i] = file:read("*a")
    file:close()
end
wrk.body = bodies[1]
if #bodies > 1 then
    local turn, texts = 0, {}
    function request()
        turn = turn %% #bodies + 1
        texts[turn] = texts[turn] or wrk.format(nil, nil, nil, bodies[turn])
        return texts[turn]
    end
end
function done(summary, latency, requests)
    local e = summary.errors
    io.write(string.format(
        '\\n{"requests": %%d, "us": %%d, "p50_us": %%d, "p99_us": %%d, "refused": %%d, "broken": %%d}\\n',
        summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
        e.status, e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Call:
    """What every connection sends, over and over; several bodies take turns."""

    path: str
    bodies: tuple[bytes, ...]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk saw, and what it cost the server.

    `refused`: answers of status 400 and above; `broken`: connections that failed.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    refused: int
    broken: int


class Process:
    """A server started for a run: reached on `port`, its CPU time read from /proc."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.port = port

    def cpu_s(self) -> float:
        """CPU time so far of all its threads, user and system."""
        after_name = Path(f"/proc/{self.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Memory that it holds now."""
        return (
            int(Path(f"/proc/{self.pid}/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        )

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """Make one call. Raises: RuntimeError with the answer if it is not 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=READY_WITHIN_S)
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


@contextlib.contextmanager
def penstock(folder: Path) -> Iterator[Process]:
    """Serve a model repository over HTTP until the block ends."""
    with running(
        [*_SERVE, str(folder), "--allow-grpc=false", "--http-port"], _http_ready("/v2/health/ready")
    ) as process:
        yield process


@contextlib.contextmanager
def penstock_over_grpc(folder: Path) -> Iterator[tuple[Process, int]]:
    """Serve a model repository over both protocols until the block ends; gives the gRPC port too."""
    port = free_port()
    command = [*_SERVE, str(folder), "--grpc-port", str(port), "--http-port"]
    with running(command, _http_ready("/v2/health/ready")) as process:
        yield process, port


@contextlib.contextmanager
def bare_uvicorn() -> Iterator[Process]:
    """Serve the echo until the block ends."""
    with running([sys.executable, "-m", "penstock.perf.echo"], _http_ready("/")) as process:
        yield process


@contextlib.contextmanager
def running(command: Sequence[str], ask: Callable[[Process], object]) -> Iterator[Process]:
    """Run a server, its port the last word of its command, from when `ask` does not raise until the block ends."""
    port = free_port()
    with subprocess.Popen([*command, str(port)]) as child:
        process = Process(child.pid, port)
        try:
            _await_ready(process, child, ask)
            yield process
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()


def free_port() -> int:
    """Give a port that nobody listens on."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


def _http_ready(path: str) -> Callable[[Process], object]:
    return lambda process: process.request("GET", path)


def _await_ready(process: Process, child: subprocess.Popen[bytes], ask: Callable[[Process], object]) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            ask(process)
        except Exception as error:
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{child.args!r} did not get ready: {error}") from error
            time.sleep(0.02)
        else:
            return


def drive(process: Process, call: Call, connections: int, seconds: int) -> Load:
    """Keep `connections` busy for `seconds`, each sending as soon as it has its answer."""
    if not shutil.which("wrk"):
        raise SystemExit("the benchmark needs wrk: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"body{number}") for number, _ in enumerate(call.bodies)]
        for path, body in zip(paths, call.bodies, strict=True):
            path.write_bytes(body)
        script = Path(folder, "call.lua")
        script.write_text(_SCRIPT % ", ".join(f'"{path}"' for path in paths), "utf-8")
        headers = [word for name, value in call.headers.items() for word in ("-H", f"{name}: {value}")]
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
        before_s = process.cpu_s()
        ended = subprocess.run(
            [*command, *headers, f"http://{HOST}:{process.port}{call.path}"], capture_output=True, text=True, check=True
        )
        cpu_s = process.cpu_s() - before_s
    seen = json.loads(ended.stdout.splitlines()[-1])
    return Load(
        requests_per_s=seen["requests"] / seen["us"] * 1e6,
        p50_ms=seen["p50_us"] / 1e3,
        p99_ms=seen["p99_us"] / 1e3,
        cpu_us=cpu_s * 1e6 / max(seen["requests"], 1),
        refused=seen["refused"],
        broken=seen["broken"],
    )
