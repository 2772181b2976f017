"""h2load (Debian: nghttp2-client), a closed loop: compiled, one thread.

It does not read `grpc-status`: callers over gRPC must check by other means that the answers were good.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .calls import HOST
from .server_process import Process
from .wrk import Load, require_programs

GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")
JSON = ("--h1", "-H", "content-type: application/json")


@dataclass(frozen=True, slots=True)
class RepeatedPost:
    """The request sent repeatedly. `wire` is GRPC or JSON; `body` is as on the wire."""

    port: int
    path: str
    body: bytes
    connections: int
    streams: int = 1
    wire: tuple[str, ...] = GRPC


@dataclass(frozen=True, slots=True)
class Seen(Load):
    """A Load with the number of answered requests and their payload bytes."""

    answered: int
    nbytes: int


def drive(process: Process, posts: RepeatedPost, seconds: int, *, timed: bool = False) -> Seen:
    """Keep every stream busy for `seconds`. Latencies are 0 unless `timed`, which costs a log line per request."""
    require_programs("h2load")
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder, "body"), Path(folder, "log")
        body.write_bytes(posts.body)
        command = ["h2load", f"-c{posts.connections}", f"-m{posts.streams}", f"-D{seconds}", "-d", str(body)]
        command += [*posts.wire, *([f"--log-file={log}"] if timed else []), f"http://{HOST}:{posts.port}{posts.path}"]
        before_s = process.cpu_s()
        completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60)
        cpu_s = process.cpu_s() - before_s
        took_us = [int(line.rsplit("\t", 1)[1]) for line in log.read_text("ascii").splitlines()] if timed else [0]
    answered, broken, nbytes = parse_counts(completed.stdout)
    p50_us, p99_us = np.percentile(took_us, (50, 99))
    return Seen(
        requests_per_s=answered / seconds,
        p50_ms=float(p50_us) / 1e3,
        p99_ms=float(p99_us) / 1e3,
        cpu_us=cpu_s * 1e6 / max(answered, 1),
        refused=0,
        broken=broken,
        answered=answered,
        nbytes=nbytes,
    )


def parse_counts(output: str) -> tuple[int, int, int]:
    """Parse how many requests succeeded, how many did not, and the bytes. Raises: RuntimeError."""
    requests = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", output)
    traffic = re.search(r"\((\d+)\) data", output)
    if requests is None or traffic is None:
        raise RuntimeError(f"h2load said:\n{output[-1000:]}")
    succeeded, *unsuccessful = map(int, requests.groups())
    return succeeded, sum(unsuccessful), int(traffic[1])
