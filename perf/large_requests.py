"""Bodies: what a request with a large tensor costs the event loop's thread, over HTTP and gRPC.

`python -m penstock.perf.large_requests [--rounds 5]`. The model returns eight numbers of its input, so that mainly
receiving is measured. gRPC is driven by h2load, whose frames have 16 KiB whatever a server requests, and by `penstock
perf`'s generator, whose frames have the size that the server requests. To compare two trees, run it in both, in turns,
with PYTHONPATH at the .typing folder of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from penstock.server.protobuf import service_pb2

from . import h2load, processes
from .calls import HOST, Call, encode_grpc_message
from .generator.fleet import fleet
from .generator.orders import INFER, GrpcCall, Load, Target
from .models import Graph, make
from .payloads.repeated import Repeated
from .server_process import Process, penstock_over_grpc
from .wrk import drive

SIZES = (25_000, 75_000, 150_000)
"""Numbers in a request, of four bytes each."""
_CONNECTIONS, _IN_FLIGHT = 6, 12

Way = Callable[[Process, int, int, int], float]
"""Drives a server (its gRPC port, numbers in a request, seconds). Returns: how many requests were answered."""


def slicing(numbers: int) -> onnx.ModelProto:
    """Build a model that takes rows of `numbers` values and returns the first eight."""
    graph = Graph(seed=0)
    return graph.model(
        f"slice{numbers}", graph.node("Slice", "input", graph.whole(0), graph.whole(8), graph.whole(1)),
        ("N", numbers), ("N", 8),
    )  # fmt: skip


def over_http(process: Process, port: int, numbers: int, seconds: int) -> float:
    """Drive with wrk."""
    raw = np.arange(numbers, dtype=np.float32).tobytes()
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, numbers], "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    call = Call(
        f"/v2/models/slice{numbers}/infer", (text + raw,), {"Inference-Header-Content-Length": str(len(text))}
    )  # fmt: skip
    return drive(process, call, _CONNECTIONS, seconds).requests_per_s * seconds


def _message(numbers: int) -> bytes:
    message = service_pb2().ModelInferRequest(model_name=f"slice{numbers}")
    message.inputs.add(name="input", datatype="FP32", shape=[1, numbers])
    message.raw_input_contents.append(np.arange(numbers, dtype=np.float32).tobytes())
    return encode_grpc_message(message.SerializeToString())


def in_small_frames(process: Process, port: int, numbers: int, seconds: int) -> float:
    """Drive with h2load."""
    return h2load.drive(process, h2load.RepeatedPost(port, INFER, _message(numbers), _CONNECTIONS), seconds).answered


def in_large_frames(process: Process, port: int, numbers: int, seconds: int) -> float:
    """Drive with the generator."""
    target = Target(HOST, port, grpc=GrpcCall(INFER))
    with fleet(target, Repeated((_message(numbers),)), 1) as running:
        running.start_load(Load(concurrency=_IN_FLIGHT))
        running.wait(seconds)
        running.halt()
        return len(running.take().ends_ns)


WAYS: dict[str, Way] = {"HTTP": over_http, "gRPC, 16 KiB": in_small_frames, "gRPC": in_large_frames}


def main() -> None:
    """Print a line for each way and size."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.large_requests", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), {f"slice{numbers}": partial(slicing, numbers) for numbers in SIZES})
        with penstock_over_grpc(Path(folder)) as (process, port):
            print(f"{'':14} {'kB':>5} {'loop us':>9} {'requests/s':>11}")
            for name, drive_way in WAYS.items():
                for numbers in SIZES:
                    loop_us, per_s = _measured(partial(drive_way, process, port, numbers, args.seconds), process, args)
                    print(f"{name:14} {numbers * 4 // 1000:>5} {loop_us:>9.1f} {per_s:>11,.0f}", flush=True)


def _measured(drive_once: Callable[[], float], process: Process, args: argparse.Namespace) -> tuple[float, float]:
    samples = []
    for _ in range(args.rounds):
        before_ns = processes.loop_ns(process.pid)
        answered = max(drive_once(), 1)
        samples.append(((processes.loop_ns(process.pid) - before_ns) / answered / 1e3, answered / args.seconds))
    loop_us, per_s = (statistics.median(figures) for figures in zip(*samples, strict=True))
    return loop_us, per_s


if __name__ == "__main__":
    main()
