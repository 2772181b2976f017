"""wrk (Debian: wrk), a closed loop over HTTP: compiled, one thread. The server's CPU time is read from /proc.

It takes little of the two cores that it shares with the server. h2load.py has the closed loop for gRPC, and
open_loop.py an open loop, in which every request has its time.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .calls import HOST, Call
from .server_process import Process

_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}
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

    def ratio_to(self, reference: Rounds, name: str) -> float:
        """Return the median ratio of one figure to another case's, round by round, since the machine's speed drifts."""
        pairs = zip(self.loads, reference.loads, strict=True)
        return float(statistics.median(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs))


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
        headers = [argument for name, value in call.headers.items() for argument in ("-H", f"{name}: {value}")]
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
        before_s = process.cpu_s()
        completed = subprocess.run(
            [*command, *headers, f"http://{HOST}:{process.port}{call.path}"], capture_output=True, text=True, check=True
        )
        cpu_s = process.cpu_s() - before_s
    summary = json.loads(completed.stdout.splitlines()[-1])
    return Load(
        requests_per_s=summary["requests"] / summary["us"] * 1e6,
        p50_ms=summary["p50_us"] / 1e3,
        p99_ms=summary["p99_us"] / 1e3,
        cpu_us=cpu_s * 1e6 / max(summary["requests"], 1),
        refused=summary["refused"],
        broken=summary["broken"],
    )
