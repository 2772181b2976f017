"""gRPC: Penstock beside grpc.aio and the prototype with the same model, in turns. `python -m penstock.perf.grpc`.

The load is h2load. It does not read `grpc-status`, so the server's own statistics must count as many successes as
h2load counts answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from . import h2load, models
from .bench import PROTOTYPE_MODES
from .calls import HOST, encode_grpc_message
from .claims import verdict
from .generator.orders import INFER
from .h2load import RepeatedPost
from .server_process import Process, penstock_over_grpc, prototype, running_server
from .wrk import Load, Rounds, require_programs

WARM_UP_S = 1
CPU_US, TIMES, P50_MS = 12, 8, 0.08
"""Targets of issue 3: maximum CPU per request, minimum ratio to grpc.aio's requests/s, maximum p50 of one stream."""
PROTOTYPE_US = 8
"""The prototype's figure on the machine those targets are for; relative to it they apply to any machine."""


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


def message(case: Case) -> bytes:
    """Serialize a ModelInferRequest as tritonclient does."""
    from tritonclient.grpc import service_pb2  # imports grpcio: not for those who only import names from this file

    tensor = np.random.default_rng(5).random(case.row, dtype=np.float32)
    request = service_pb2.ModelInferRequest(model_name=case.model)
    request.inputs.add(name="input", datatype="FP32", shape=case.row)
    request.raw_input_contents.append(tensor.tobytes())
    serialized: bytes = request.SerializeToString()
    return serialized


def drive(process: Process, port: int, case: Case, seconds: int) -> Load:
    """Keep every stream busy for `seconds`. Latencies are taken only for a single stream, which is slow enough."""
    posts = RepeatedPost(port, INFER, encode_grpc_message(message(case)), case.connections, case.streams)
    return h2load.drive(process, posts, seconds, timed=case.connections * case.streams == 1)


def ask(port: int, case: Case) -> None:
    """Send one request. Raises: grpc.RpcError."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        channel.unary_unary(INFER)(message(case), timeout=10)


@contextlib.contextmanager
def grpc_aio(model: Path) -> Iterator[tuple[Process, int]]:
    """Serve one model with grpc.aio until the block ends."""
    with running_server([sys.executable, "-m", "penstock.perf.baselines.grpc_aio", str(model)], _ready) as process:
        yield process, process.port


def _ready(process: Process) -> None:
    with grpc.insecure_channel(f"{HOST}:{process.port}") as channel:
        grpc.channel_ready_future(channel).result(1)


def _succeeded(process: Process, model: str) -> int:
    stats: dict[str, Any] = json.loads(process.request("GET", f"/v2/models/{model}/stats"))["model_stats"][0]
    count: int = stats["inference_stats"]["success"]["count"]
    return count


def measure(cases: Sequence[Case], rounds: int, seconds: int) -> dict[tuple[str, Case], Rounds]:
    """Run everything in turns, with one round of warm-up."""
    folder = models.DEFAULT_FOLDER
    models.make(folder)
    lines = {(server_name, case): Rounds() for case in cases for server_name in ("penstock", "grpc.aio", "prototype")}
    with contextlib.ExitStack() as stack:
        our_process, our_port = stack.enter_context(penstock_over_grpc(folder))
        peers = {
            name: stack.enter_context(grpc_aio(folder / name / "1" / "model.onnx"))
            for name in {case.model for case in cases}
        }
        prototypes = {
            name: stack.enter_context(prototype(PROTOTYPE_MODES[name], folder / name / "1" / "model.onnx"))
            for name in peers
        }
        for number in range(rounds + 1):
            for case in cases:
                bare = prototypes[case.model]
                servers = {
                    "penstock": (our_process, our_port),
                    "grpc.aio": peers[case.model],
                    "prototype": (bare, bare.port),
                }
                for server_name, (process, port) in servers.items():
                    ask(port, case)
                    before = _succeeded(our_process, case.model)
                    load = drive(process, port, case, seconds if number else WARM_UP_S)
                    succeeded = _succeeded(our_process, case.model) - before
                    if server_name == "penstock" and succeeded < load.requests_per_s * (
                        seconds if number else WARM_UP_S
                    ):
                        raise RuntimeError(f"{case}: {succeeded} inferences for more answers: some were errors")
                    if number:
                        lines[server_name, case].loads.append(load)
    return lines


def report(lines: dict[tuple[str, Case], Rounds]) -> str:
    """Format the table of medians, and which of issue 3's targets are met."""
    rows = [f"{'case':<24} {'server':<10} {'req/s':>9} {'CPU us':>8} {'p50 ms':>8} {'p99 ms':>8}"]
    for (server_name, case), line in lines.items():
        name = f"{case.model} {case.connections}x{case.streams} streams"
        times = f"{line.median('p50_ms'):>8.3f} {line.median('p99_ms'):>8.3f}" if line.median("p50_ms") else ""
        broken = sum(load.broken for load in line.loads)
        rows.append(
            f"{name:<24} {server_name:<10} {line.median('requests_per_s'):>9,.0f} {line.median('cpu_us'):>8.1f} {times}"
            + (f"  {broken} FAILED" if broken else "")
        )
    if ("penstock", MANY) in lines:
        ours, theirs = lines["penstock", MANY], lines["grpc.aio", MANY]
        ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
        cpu_us, p50_ms = ours.median("cpu_us"), lines["penstock", ONE].median("p50_ms")
        bare, prototype_ratio = ours.ratio_to(lines["prototype", MANY], "cpu_us"), CPU_US / PROTOTYPE_US
        for claim, value, holds in (
            (f"CPU us per request, at most {CPU_US}", cpu_us, cpu_us <= CPU_US),
            (f"times the prototype's CPU per request, at most {prototype_ratio:g}", bare, bare <= prototype_ratio),
            (f"times grpc.aio's requests/s, at least {TIMES}", ratio, ratio >= TIMES),
            (f"p50 ms of one stream, at most {P50_MS}", p50_ms, p50_ms <= P50_MS),
        ):
            rows.append(verdict(f"{claim}: {value:.3f}", holds))
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.grpc", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="of load per case and round")
    args = parser.parse_args()
    require_programs("h2load")
    print(report(measure(CASES, args.rounds, args.seconds)))


if __name__ == "__main__":
    main()
