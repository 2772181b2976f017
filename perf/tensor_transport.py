"""CPU time of a request by how its tensors travel, without sockets: `python -m penstock.perf.tensor_transport`.

A model with two inputs (INT64, 128 a row) that computes next to nothing is called over both protocols, with its tensors
in the request or in system shared memory. Connections are fed bytes, as in `micro.py`. `--only WAY --rounds N` runs
only one way: under `valgrind --tool=callgrind`, the difference between 2 N and N rounds is the instructions of N
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import uvloop
from hpack import Encoder
from onnx import TensorProto, helper

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.grpc.connection import GrpcConnection, GrpcShared
from penstock.server.hooks.runner import Hooks
from penstock.server.http2 import frames
from penstock.server.restricted import TRITON_SERVICE
from penstock.server.v2.regions import Regions
from penstock.server.v2.rpc.services import InferenceDependencies, inference_methods
from penstock.server.v2.system_regions import SystemRegions

from .generator.orders import Target
from .micro import ROUNDS, SinkTransport, Stage, print_cost
from .payloads.grpc import GrpcWriter
from .payloads.http import HttpWriter
from .payloads.tensors import InputTensor, Place
from .payloads.writing import Call, RequestedOutput

NAME, LENGTH = "pair", 128
CONNECTIONS = (1, 16)
_TURNS = 10
_REGION, _NBYTES = "ways", LENGTH * 8
_POLICY = BatchPolicy(executor="loop", cap_rows=64)
"""One batch per turn, however long runs take here."""
_TARGET = Target("127.0.0.1", 8000)
Feed = Callable[[], None]
"""Feeds one request to a connection."""


def pair() -> onnx.ModelProto:
    """Build a model that multiplies ids with their mask."""
    nodes = [helper.make_node("Mul", ["ids", "mask"], ["masked"]), helper.make_node("Cast", ["masked"], ["y"], to=1)]
    graph = helper.make_graph(
        nodes, NAME,
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["N", LENGTH]) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", LENGTH])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


class _Answered(SinkTransport):
    """A transport that discards answers, and raises if one is not OK."""

    def write(self, data: Any) -> None:
        if b"grpc-message" in data:
            raise RuntimeError(bytes(data[-500:]).decode("latin-1"))


@dataclass(frozen=True, slots=True)
class Transport:
    """How requests travel: over which protocol, whether as JSON, whether through shared memory."""

    name: str
    grpc: bool = False
    binary: bool = True
    shared: bool = False

    def request(self) -> bytes:
        """Encode one: head and body, or a message with its prefix."""
        places = [Place(_REGION, index * _NBYTES, _NBYTES) if self.shared else None for index in range(3)]
        raw = np.ones(LENGTH, np.int64).tobytes()
        step = tuple(
            InputTensor(name, "INT64", (1, LENGTH), b"" if place else raw, place)
            for name, place in zip(("ids", "mask"), places, strict=False)
        )
        call = Call(NAME, "", (RequestedOutput("y", places[2]),) if self.shared or self.binary else ())
        if self.grpc:
            return GrpcWriter(call).whole(step)
        return HttpWriter(call, _TARGET, binary_input=self.binary, binary_output=self.binary).whole(step)


TRANSPORTS = (
    Transport("JSON over HTTP", binary=False),
    Transport("binary over HTTP"),
    Transport("shared memory over HTTP", shared=True),
    Transport("raw over gRPC", grpc=True),
    Transport("shared memory over gRPC", grpc=True, shared=True),
)


def http(engine: Engine, regions: Regions, count: int, raw: bytes) -> list[Feed]:
    """Connect `count` clients over HTTP."""
    return [partial(connection.data_received, raw) for connection in Stage(engine, count, regions).connections]


def rpc(engine: Engine, regions: Regions, count: int, message: bytes) -> list[Feed]:
    """Connect `count` clients over gRPC."""
    health = cast("Any", None)
    parts = InferenceDependencies(
        engine=engine, health=health, hooks_of=lambda model: Hooks(engine, model), regions=regions
    )
    shared = GrpcShared(inference_methods(parts))
    return [_caller(shared, message) for _ in range(count)]


def _caller(shared: GrpcShared, message: bytes) -> Feed:
    connection = GrpcConnection(shared)
    connection.connection_made(_Answered())
    settings_frame = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
    widen = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
    connection.data_received(frames.PREFACE + settings_frame + widen)
    encoder = Encoder()
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", TRITON_SERVICE + "ModelInfer"),
        (":authority", "localhost:8001"), ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    # once the fields are in the table, the block is always the same
    blocks, ids = chain([encoder.encode(fields)], repeat(encoder.encode(fields))), count(1, 2)

    def feed() -> None:
        number = next(ids)
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, number, next(blocks))
        connection.data_received(head + frames.frame(frames.DATA, frames.END_STREAM, number, message))

    return feed


async def measure(engine: Engine, feeds: list[Feed], rounds: int) -> float:
    """Return the CPU microseconds of a request's whole trip, with one request per connection in each loop turn."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(_TURNS):
            for feed in feeds:
                feed()
            await asyncio.sleep(0)
            while engine.inflight:  # noqa: ASYNC110 - the turns of the loop are what is measured
                await asyncio.sleep(0)
        best = min(best, time.process_time_ns() - start)
    return best / (_TURNS * len(feeds)) / 1e3


def _registered() -> Iterator[Regions]:
    memory = SharedMemory(create=True, size=3 * _NBYTES)
    regions = Regions(allowed=True)
    try:
        memory.buf[:] = np.ones(3 * LENGTH, np.int64).tobytes()  # type: ignore[index]  # None once closed
        SystemRegions(regions).register(_REGION, memory.name, 0, 3 * _NBYTES)
        yield regions
    finally:
        memory.close()
        memory.unlink()


async def main(folder: Path, transports: list[Transport], clients: list[int], rounds: int) -> None:
    """Print the table."""
    path = folder / "model.onnx"
    onnx.save(pair(), path)
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    await engine.load(ModelSpec(NAME, 1, path, policy=_POLICY))
    for regions in _registered():
        for many in clients:
            for transport in transports:
                connect = rpc if transport.grpc else http
                us = await measure(engine, connect(engine, regions, many, transport.request()), rounds)
                print_cost(f"{transport.name}, {many} a turn", us)
    await engine.stop(1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.tensor_transport", description=__doc__)
    parser.add_argument("--only", choices=[transport.name for transport in TRANSPORTS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--clients", type=int, nargs="*", default=CONNECTIONS)
    asked = parser.parse_args()
    chosen = [transport for transport in TRANSPORTS if asked.only in (None, transport.name)]
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(main(Path(folder), chosen, asked.clients, asked.rounds))
