"""Load from outside, over loopback. The server's CPU time for it is read from /proc.

`drive` is wrk's closed loop: Debian's package, compiled, one thread, so that the load takes little of the two cores
that it shares with the server; h2load.py has the one for gRPC. `flood` is an open loop, in which every request has its
time (perf/flood.py).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.server.grpc.framing import PREFIX

from . import processes
from .flood import INITIAL_CONNECTIONS, SKIPPED

Times = np.ndarray[tuple[int], np.dtype[np.int64]]
Records = np.ndarray[tuple[int], np.dtype[np.void]]

HOST = "127.0.0.1"
READY_LIMIT_S = 60.0
_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}
_SERVE = (sys.executable, "-m", "penstock.server.cli", "serve", "--allow-metrics=false")

_SCRIPT = """
wrk.method = "POST"
local bodies = {}
local file = assert(io.open("%s", "rb"))
for length in io.lines("%s") do
    bodies[#bodies + 1] = file:read(tonumber(length)) or ""
end
file:close()
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
    """What every connection sends repeatedly. Several bodies are sent in turn."""

    path: str
    bodies: tuple[bytes, ...]
    headers: Mapping[str, str]

    def request(self) -> bytes:
        """Encode the request with the first body."""
        return encode_post(self.path, self.headers, self.bodies[0])


def encode_post(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Encode a POST request of HTTP/1.1, head and body."""
    said = {"Host": HOST, **headers, "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def encode_grpc_message(message: bytes) -> bytes:
    """Encode a gRPC message with its five-byte prefix."""
    return PREFIX.pack(0, len(message)) + message


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk or h2load measured, and its cost to the server.

    `refused`: answers with status 400 and above; `broken`: connections that failed.
    """

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    refused: int
    broken: int


@dataclass(slots=True)
class Rounds:
    """The results of the rounds of one case."""

    loads: list[Load] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Return the median of one figure of Load."""
        return float(statistics.median(getattr(load, name) for load in self.loads))

    def ratio_to(self, others: Rounds, name: str) -> float:
        """Return the median ratio of one figure to another case's, round by round, since the machine's speed drifts."""
        pairs = zip(self.loads, others.loads, strict=True)
        return float(statistics.median(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs))


@dataclass(frozen=True, slots=True)
class FloodResult:
    """The results of one flood: a RECORD for each request (perf/flood.py), and their cost.

    Units: CPU microseconds per request sent, of the server and of the load itself.
    """

    records: Records
    connections: int
    cpu_us: float
    load_cpu_us: float

    def answered(self, status: int = 200) -> Records:
        """Return the RECORDs of the requests answered with one status."""
        return np.extract(self.records["status"] == status, self.records)

    def latency_ms(self, quantile: float, status: int = 200) -> float:
        """Return a quantile (0 to 1) of the times from due to answered with one status; 0 if there are none."""
        took_ns = self.answered(status)["took_ns"]
        return float(np.quantile(took_ns, quantile)) / 1e6 if len(took_ns) else 0.0

    def server_latency_ms(self, quantile: float, status: int = 200) -> float:
        """Return the same from sent to answered: the server's part, without the load's lateness."""
        answered = self.answered(status)
        took_ns = answered["took_ns"] - answered["late_ns"]
        return float(np.quantile(took_ns, quantile)) / 1e6 if len(took_ns) else 0.0

    def lateness_ms(self, quantile: float) -> float:
        """Return a quantile of the load's lateness in sending."""
        late_ns = self.records["late_ns"][self.records["status"] != SKIPPED]
        return float(np.quantile(late_ns, quantile)) / 1e6 if len(late_ns) else 0.0

    @property
    def skipped(self) -> int:
        """How many could not be sent because every connection was in use."""
        return int((self.records["status"] == SKIPPED).sum())

    def unexpected(self, *expected: int) -> int:
        """Count the requests that were sent but ended in none of the statuses `expected`."""
        return int((~np.isin(self.records["status"], [*expected, SKIPPED])).sum())


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


def penstock(folder: Path, *words: str) -> contextlib.AbstractContextManager[Process]:
    """Serve a model repository over HTTP until the block ends. `words` are further arguments of `serve`."""
    command = [*_SERVE, str(folder), "--allow-grpc=false", *words, "--http-port"]
    return running(command, http_ready("/v2/health/ready"))


@contextlib.contextmanager
def penstock_over_grpc(folder: Path, *words: str) -> Iterator[tuple[Process, int]]:
    """Serve a model repository over both protocols until the block ends. Also yields the gRPC port."""
    port = free_port()
    with penstock(folder, "--allow-grpc", "--grpc-port", str(port), *words) as process:
        yield process, port


def bare_uvicorn() -> contextlib.AbstractContextManager[Process]:
    """Serve the echo until the block ends."""
    return running([sys.executable, "-m", "penstock.perf.echo"], http_ready("/"))


def prototype(where: str, model: Path) -> contextlib.AbstractContextManager[Process]:
    """Serve one model with the prototype until the block ends, over both protocols. `where`: "loop" or "thread"."""
    return running([sys.executable, "-m", "penstock.perf.prototype", where, str(model)], http_ready("/"))


@contextlib.contextmanager
def running(command: Sequence[str], ask: Callable[[Process], object]) -> Iterator[Process]:
    """Run a server, whose command ends with its port, from when `ask` succeeds until the block ends."""
    port = free_port()
    with subprocess.Popen([*command, str(port)]) as child:
        process = Process(child.pid, port)
        try:
            await_ready(process, child, ask)
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
    """Return a check for `running`: the server is ready once it answers `path` with 200."""
    return lambda process: process.request("GET", path)


def await_ready(process: Process, child: subprocess.Popen[bytes], ask: Callable[[Process], object]) -> None:
    """Wait until `ask` succeeds. Raises: RuntimeError if the server exits or is not ready in time."""
    end = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            ask(process)
        except Exception as error:
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{child.args!r} did not get ready: {error}") from error
            time.sleep(0.02)
        else:
            return


def require_programs(*programs: str) -> None:
    """Check that the load programs are installed. Raises: SystemExit."""
    for program in programs:
        if not shutil.which(program):
            raise SystemExit(f"this needs {program}: apt-get install {_PACKAGES[program]}")


def drive(process: Process, call: Call, connections: int, seconds: int) -> Load:
    """Keep `connections` busy for `seconds`, each sending as soon as it has its answer."""
    require_programs("wrk")
    with tempfile.TemporaryDirectory() as folder:
        bodies, lengths, script = (Path(folder, name) for name in ("bodies", "lengths", "call.lua"))
        bodies.write_bytes(b"".join(call.bodies))
        lengths.write_text("".join(f"{len(body)}\n" for body in call.bodies), "utf-8")
        script.write_text(_SCRIPT % (bodies, lengths), "utf-8")
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


def flood(
    process: Process,
    calls: Sequence[Call],
    at_ns: Times,
    which: Times | None = None,
    *,
    connections: int = 2048,
    opened: int = INITIAL_CONNECTIONS,
) -> FloodResult:
    """Send request i at `at_ns[i]` from the start, whether or not earlier ones were answered.

    `which[i]` is the index in `calls` of request i; by default all are the first. Only a call's first body is sent. Of
    `connections`, as many are used as there are requests in flight; `opened` are open from the start.
    Units: nanoseconds, ascending. Threads: blocks until all is answered, at most a minute after the last request.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at, kinds, records = folder / "at.npy", folder / "which.npy", folder / "records.npy"
        np.save(at, np.asarray(at_ns, np.int64))
        np.save(kinds, np.zeros(len(at_ns), np.int64) if which is None else np.asarray(which, np.int64))
        requests = [str(folder / f"request{number}") for number, _ in enumerate(calls)]
        for path, call in zip(requests, calls, strict=True):
            Path(path).write_bytes(call.request())
        order = {
            "host": HOST, "port": process.port, "connections": connections, "opened": opened,
            "requests": requests, "at": str(at), "which": str(kinds), "records": str(records),
        }  # fmt: skip
        command = [sys.executable, "-m", "penstock.perf.flood"]
        # numpy's BLAS would start threads that spin for a while
        alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        before_s = process.cpu_s()
        ended = subprocess.run(command, input=json.dumps(order), env=alone, capture_output=True, text=True, check=True)
        cpu_s = process.cpu_s() - before_s
        seen, found = json.loads(ended.stdout), np.load(records)
    sent = max(int((found["status"] != SKIPPED).sum()), 1)
    return FloodResult(found, seen["connections"], cpu_s / sent * 1e6, seen["cpu_s"] / sent * 1e6)
