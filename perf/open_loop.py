"""The open loop from the benchmarks' side: runs open_loop_sender.py, and returns what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .calls import HOST, Call
from .open_loop_sender import INITIAL_CONNECTIONS, SKIPPED
from .server_process import Process

Times = np.ndarray[tuple[int], np.dtype[np.int64]]
Records = np.ndarray[tuple[int], np.dtype[np.void]]


@dataclass(frozen=True, slots=True)
class OpenLoopResult:
    """The results of one load: a RECORD for each request (perf/open_loop_sender.py), and their cost.

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


def run_open_loop(
    process: Process,
    calls: Sequence[Call],
    at_ns: Times,
    request_indexes: Times | None = None,
    *,
    connections: int = 2048,
    opened: int = INITIAL_CONNECTIONS,
) -> OpenLoopResult:
    """Send request i at `at_ns[i]` from the start, whether or not earlier ones were answered.

    `request_indexes[i]` is the index in `calls` of request i; by default all are the first. Only a call's first body is
    sent. Of `connections`, as many are used as there are requests in flight; `opened` are open from the start. Units:
    nanoseconds, ascending. Threads: blocks until all is answered, at most a minute after the last request.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        at_file, indexes_file, records_file = folder / "at.npy", folder / "which.npy", folder / "records.npy"
        np.save(at_file, np.asarray(at_ns, np.int64))
        np.save(
            indexes_file,
            np.zeros(len(at_ns), np.int64) if request_indexes is None else np.asarray(request_indexes, np.int64),
        )
        requests = [str(folder / f"request{number}") for number, _ in enumerate(calls)]
        for path, call in zip(requests, calls, strict=True):
            Path(path).write_bytes(call.request())
        order = {
            "host": HOST, "port": process.port, "connections": connections, "opened": opened,
            "requests": requests, "at": str(at_file), "which": str(indexes_file), "records": str(records_file),
        }  # fmt: skip
        command = [sys.executable, "-m", "penstock.perf.open_loop_sender"]
        # numpy's BLAS would start threads that spin for a while
        single_threaded = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        before_s = process.cpu_s()
        completed = subprocess.run(
            command, input=json.dumps(order), env=single_threaded, capture_output=True, text=True, check=True
        )
        cpu_s = process.cpu_s() - before_s
        report, records_read = json.loads(completed.stdout), np.load(records_file)
    sent = max(int((records_read["status"] != SKIPPED).sum()), 1)
    return OpenLoopResult(records_read, report["connections"], cpu_s / sent * 1e6, report["cpu_s"] / sent * 1e6)
