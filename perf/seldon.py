"""Seldon: a numpy class on Penstock and on the original, side by side. `python -m penstock.perf.seldon`.

Both are driven in turns by the same load, each with its default settings: the original with one worker, over REST with
a connection per request, since it closes each. CPU is that of all processes of a side. The original is an environment
with seldon-core 1.17.1: `--original PYTHON`, or SELDON_ORIGINAL. With `--batching`: Penstock with and without shared
batches, for a class whose batch costs little more than a row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from . import h2load, side_by_side
from .calls import HOST, Call, encode_grpc_message
from .h2load import RepeatedPost
from .server_process import Process, free_port
from .wrk import Load, drive, require_programs

JSON = {"Content-Type": "application/json"}
PREDICT, METHOD = "/api/v1.0/predictions", "/seldon.protos.Model/Predict"
CONNECTIONS, GRPC_CONNECTIONS, STREAMS = 64, 8, 8
TIMES_REST, TIMES_GRPC, TIMES_BATCHED = 20, 5, 3
"""Targets of issue 8: the least ratio to the original's requests/s, and to ours without batching."""

LINEAR = """
import numpy as np


class Linear:
    def __init__(self):
        self.weights = np.random.default_rng(5).random((4, 3))

    def predict(self, X, names):
        return X @ self.weights
"""
WIDE = """
import numpy as np


class Wide:
    def __init__(self):
        random = np.random.default_rng(5)
        self.first = random.random((4, 2048), np.float32)
        self.weights = random.random((2048, 2048), np.float32) / 2048
        self.last = random.random((2048, 3), np.float32)

    def predict(self, X, names):
        return np.tanh(X.astype(np.float32) @ self.first) @ self.weights @ self.last
"""
FLOWER = [5.1, 3.5, 1.4, 0.2]


class ProcessTree(side_by_side.ProcessTree):
    """A server for both protocols, and all the processes that it has started."""

    def __init__(self, pid: int, port: int, grpc_port: int) -> None:
        super().__init__(pid, port)
        self.grpc_port = grpc_port


@contextlib.contextmanager
def served(command: Sequence[str], folder: Path) -> Iterator[ProcessTree]:
    """Run a server in a folder, from when it answers over both protocols until the block ends."""
    port, grpc_port, metrics_port = free_port(), free_port(), free_port()
    arguments = [*command, "--http-port", str(port), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]

    def ask(server: Process) -> None:
        server.request("GET", "/health/ping")
        server.request("POST", PREDICT, body(), JSON)
        _called(ProcessTree(server.pid, port, grpc_port))

    with side_by_side.served(arguments, folder, port, ask) as server:
        yield ProcessTree(server.pid, port, grpc_port)


def body() -> bytes:
    """Make the body for REST."""
    return json.dumps({"data": {"ndarray": [FLOWER]}}).encode()


def message() -> bytes:
    """Encode the message for gRPC, a SeldonMessage with data.tensor, by hand: its classes may not be installed."""
    tensor = b"\n\x02\x01\x04" + b"\x12" + bytes([8 * len(FLOWER)]) + struct.pack(f"<{len(FLOWER)}d", *FLOWER)
    datum = b"\x12" + bytes([len(tensor)]) + tensor
    return b"\x1a" + bytes([len(datum)]) + datum


def _called(family: ProcessTree) -> int:
    """Send one gRPC request. Returns: the size of the answer in bytes. Raises: grpc.RpcError."""
    with grpc.insecure_channel(f"{HOST}:{family.grpc_port}") as channel:
        return len(channel.unary_unary(METHOD)(message(), timeout=10))


def drive_rest(family: ProcessTree, seconds: int) -> Load:
    """Keep 64 connections busy."""
    return drive(family, Call(PREDICT, (body(),), JSON), CONNECTIONS, seconds)


def drive_grpc(family: ProcessTree, seconds: int) -> Load:
    """Keep 64 streams busy, on 8 connections. Latencies come from one more second, with a log.

    h2load does not read `grpc-status`: failures are recognized by their answers, which have no message.
    """
    nbytes = _called(family) + 5  # as a gRPC message is framed
    posts = RepeatedPost(family.grpc_port, METHOD, encode_grpc_message(message()), GRPC_CONNECTIONS, STREAMS)
    driven, timed = h2load.drive(family, posts, seconds), h2load.drive(family, posts, 1, timed=True)
    refused = max(0, driven.answered - driven.nbytes // nbytes)
    return replace(driven, p50_ms=timed.p50_ms, p99_ms=timed.p99_ms, refused=refused)


WIRES: dict[str, Callable[[ProcessTree, int], Load]] = {"REST": drive_rest, "gRPC": drive_grpc}


def ours(folder: Path, name: str, *arguments: str) -> contextlib.AbstractContextManager[ProcessTree]:
    """Serve a class in a folder with Penstock, by the original's command."""
    command = [sys.executable, "-m", "penstock.server.cli", "seldon-core-microservice", name]
    return served([*command, *arguments], folder)


def original(python: str, folder: Path, name: str) -> contextlib.AbstractContextManager[ProcessTree]:
    """Serve it with the original."""
    return served([python, "-m", "seldon_core.microservice", name], folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.seldon", description=__doc__)
    parser.add_argument("--original", default=os.environ.get("SELDON_ORIGINAL", ""), metavar="PYTHON")
    parser.add_argument("--batching", action="store_true", help="what batches are worth, instead of the original")
    args = side_by_side.arguments(parser)
    require_programs("wrk", "h2load")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "Linear.py").write_text(LINEAR)
        (folder / "Wide.py").write_text(WIDE)
        print(f"{os.cpu_count()} CPUs; REST: {CONNECTIONS} connections, gRPC: {GRPC_CONNECTIONS} of {STREAMS} streams")
        if args.batching:
            sides = {"penstock --batching": ours(folder, "Wide", "--batching"), "penstock": ours(folder, "Wide")}
            min_ratios: dict[str, float] = dict.fromkeys(WIRES, TIMES_BATCHED)
        else:
            sides, min_ratios = {"penstock": ours(folder, "Linear")}, {"REST": TIMES_REST, "gRPC": TIMES_GRPC}
            if args.original:
                sides["seldon-core 1.17.1"] = original(args.original, folder, "Linear")
            else:
                print("the original is left out: no --original PYTHON, and no SELDON_ORIGINAL")
        side_by_side.show(sides, WIRES, min_ratios, args)


if __name__ == "__main__":
    main()
