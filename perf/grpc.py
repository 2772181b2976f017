"""gRPC: Penstock beside grpc.aio with the same model, in turns. `python -m penstock.perf.grpc`.

The load is h2load (Debian: nghttp2-client): compiled, one thread. It does not read `grpc-status`, so the server's own
statistics must have counted as many successes as it counted answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from . import models
from .load import HOST, Load, Process, penstock_over_grpc, prefixed, running

METHOD = "/inference.GRPCInferenceService/ModelInfer"
WARM_UP_S = 1
CPU_US, TIMES, P50_MS = 12, 8, 0.08
"""What issue 3 asks: CPU per request at most, times grpc.aio's requests/s at least, p50 of one stream at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    model: str
    row: tuple[int, ...]
    connections: int
    streams: int


MANY, ONE = Case("iris", (1, 4), 8, 8), Case("iris", (1, 4), 1, 1)
MLP = Case("mlp", (1, 512), 4, 8)
CASES = (ONE, MANY, MLP)


@dataclass(slots=True)
class Line:
    """What the rounds gave for one server."""

    loads: list[Load] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Give the median of one figure of Load."""
        return float(statistics.median(getattr(load, name) for load in self.loads))


def message(case: Case) -> bytes:
    """Write a ModelInferRequest as tritonclient does."""
    from tritonclient.grpc import service_pb2  # with grpcio: not for those who only import this file's names

    tensor = np.random.default_rng(5).random(case.row, dtype=np.float32)
    request = service_pb2.ModelInferRequest(model_name=case.model)
    request.inputs.add(name="input", datatype="FP32", shape=case.row)
    request.raw_input_contents.append(tensor.tobytes())
    written: bytes = request.SerializeToString()
    return written


def drive(process: Process, port: int, case: Case, seconds: int) -> Load:
    """Keep every stream busy for `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder, "body"), Path(folder, "log")
        content = message(case)
        body.write_bytes(prefixed(content))
        command = ["h2load", f"-c{case.connections}", f"-m{case.streams}", f"-D{seconds}", "-d", str(body)]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        one = case.connections * case.streams == 1
        if one:  # a line per request: only where there are few
            command += [f"--log-file={log}"]
        before_s = process.cpu_s()
        ended = subprocess.run([*command, f"http://{HOST}:{port}{METHOD}"], capture_output=True, text=True, check=True)
        cpu_s = process.cpu_s() - before_s
        times_us = [int(line.rsplit("\t", 1)[1]) for line in log.read_text("ascii").splitlines()] if one else [0]
    answered, broken = _counted(ended.stdout)
    return Load(
        requests_per_s=answered / seconds,
        p50_ms=statistics.median(times_us) / 1e3,
        p99_ms=float(np.percentile(times_us, 99)) / 1e3,
        cpu_us=cpu_s * 1e6 / max(answered, 1),
        refused=0,
        broken=broken,
    )


def _counted(report: str) -> tuple[int, int]:
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", report)
    if found is None:
        raise RuntimeError(f"h2load said:\n{report}")
    succeeded, failed, errored, timed_out = map(int, found.groups())
    return succeeded, failed + errored + timed_out


def ask(port: int, case: Case) -> None:
    """Have one request answered. Raises: grpc.RpcError."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        channel.unary_unary(METHOD)(message(case), timeout=10)


@contextlib.contextmanager
def grpc_aio(model: Path) -> Iterator[tuple[Process, int]]:
    """Serve one model with grpc.aio until the block ends."""
    with running([sys.executable, "-m", "penstock.perf.grpc_aio", str(model)], _ready) as process:
        yield process, process.port


def _ready(process: Process) -> None:
    with grpc.insecure_channel(f"{HOST}:{process.port}") as channel:
        grpc.channel_ready_future(channel).result(1)


def _succeeded(process: Process, model: str) -> int:
    stats: dict[str, Any] = json.loads(process.request("GET", f"/v2/models/{model}/stats"))["model_stats"][0]
    count: int = stats["inference_stats"]["success"]["count"]
    return count


def measure(cases: Sequence[Case], rounds: int, seconds: int) -> dict[tuple[str, Case], Line]:
    """Run everything in turns, once more than counts."""
    folder = models.DEFAULT_FOLDER
    models.make(folder)
    lines: dict[tuple[str, Case], Line] = {(who, case): Line() for case in cases for who in ("penstock", "grpc.aio")}
    with contextlib.ExitStack() as stack:
        ours, our_port = stack.enter_context(penstock_over_grpc(folder))
        peers = {
            name: stack.enter_context(grpc_aio(folder / name / "1" / "model.onnx"))
            for name in {case.model for case in cases}
        }
        for number in range(rounds + 1):
            for case in cases:
                for who, (process, port) in {"penstock": (ours, our_port), "grpc.aio": peers[case.model]}.items():
                    ask(port, case)
                    before = _succeeded(ours, case.model)
                    load = drive(process, port, case, seconds if number else WARM_UP_S)
                    counted = _succeeded(ours, case.model) - before
                    if who == "penstock" and counted < load.requests_per_s * (seconds if number else WARM_UP_S):
                        raise RuntimeError(f"{case}: {counted} inferences for more answers: some were errors")
                    if number:
                        lines[who, case].loads.append(load)
    return lines


def report(lines: dict[tuple[str, Case], Line]) -> str:
    """Write the table of medians, and which of issue 3's lines hold."""
    rows = [f"{'case':<24} {'server':<10} {'req/s':>9} {'CPU us':>8} {'p50 ms':>8} {'p99 ms':>8}"]
    for (who, case), line in lines.items():
        name = f"{case.model} {case.connections}x{case.streams} streams"
        times = f"{line.median('p50_ms'):>8.3f} {line.median('p99_ms'):>8.3f}" if line.median("p50_ms") else ""
        broken = sum(load.broken for load in line.loads)
        rows.append(
            f"{name:<24} {who:<10} {line.median('requests_per_s'):>9,.0f} {line.median('cpu_us'):>8.1f} {times}"
            + (f"  {broken} FAILED" if broken else "")
        )
    if ("penstock", MANY) in lines:
        ours, theirs = lines["penstock", MANY], lines["grpc.aio", MANY]
        ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
        cpu_us, p50_ms = ours.median("cpu_us"), lines["penstock", ONE].median("p50_ms")
        for what, got, holds in (
            (f"CPU us per request, at most {CPU_US}", cpu_us, cpu_us <= CPU_US),
            (f"times grpc.aio's requests/s, at least {TIMES}", ratio, ratio >= TIMES),
            (f"p50 ms of one stream, at most {P50_MS}", p50_ms, p50_ms <= P50_MS),
        ):
            rows.append(f"{what}: {got:.3f}: {'holds' if holds else 'DOES NOT HOLD'}")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.grpc", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="of load per case and round")
    args = parser.parse_args()
    if not shutil.which("h2load"):
        raise SystemExit("this needs h2load: apt-get install nghttp2-client")
    print(report(measure(CASES, args.rounds, args.seconds)))


if __name__ == "__main__":
    main()
