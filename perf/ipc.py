"""The cost of a round trip to another process: `python -m penstock.perf.ipc [MODEL.onnx]`, and in `perf.micro`.

A child echoes what arrives on its Channel, like a worker whose user code takes no time. CPU is that of both processes
together, in the fastest of many rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.scheduling.request_checks import make_request
from penstock.batching.sinks import submit_and_wait
from penstock.batching.spec import BatchPolicy, HookSpec, ModelSpec
from penstock.server.fronts.engine_server import EngineServer
from penstock.server.fronts.front import FrontServer
from penstock.server.fronts.remote_engine import RemoteEngine
from penstock.server.hooks.runner import Hooks
from penstock.server.ipc import wire
from penstock.server.ipc.channel import Channel
from penstock.server.ipc.link import Link
from penstock.server.settings import Settings

from . import processes
from .claims import verdict
from .models import iris, make

IN_FLIGHT = 64
BUDGET_US = 15.0
LARGE_BYTES = 600_000
COPIES = 2
"""tests/server/ipc/test_wire.py checks that there are no others."""
SIZES = (64, 1 << 10, 4 << 10, 8 << 10, 16 << 10)
_ROUNDS = 60
_COLD_BYTES = 256 << 20
_POLICY = BatchPolicy(executor="loop")
_ECHO, _CPU = wire.FIRST_KIND, wire.FIRST_KIND + 1
_NS = struct.Struct("<Q")


@dataclass
class Cost:
    """The cost of one round trip. Units: microseconds. `cpu` is of both processes, `wall` is elapsed time."""

    cpu: float
    wall: float


class Echo:
    """A connection to the child, which measures round trips."""

    def __init__(self, sock: socket.socket) -> None:
        self._link = Link(sock, self._take, self._lost)
        self._future = asyncio.get_running_loop().create_future()
        self._left = 0
        self._child_ns = 0

    def _take(self, messages: list[wire.Message]) -> None:
        for kind, _, body, _, _ in messages:
            if kind == _CPU:
                (self._child_ns,) = _NS.unpack(body)
            self._left -= 1
        if not self._left and not self._future.done():
            self._future.set_result(None)

    def _lost(self, reason: str) -> None:
        self._future.set_exception(RuntimeError(reason))

    async def _round_trips(self, kind: int, count: int, arrays: list[Any] | None) -> None:
        self._left, self._future = count, asyncio.get_running_loop().create_future()
        for number in range(count):
            self._link.send(kind, number, b"", arrays)
        await self._future

    async def _cpu_ns(self) -> int:
        """Return the CPU time that both processes have used."""
        await self._round_trips(_CPU, 1, None)
        return time.process_time_ns() + self._child_ns

    async def cost(self, nbytes: int, in_flight: int) -> Cost:
        """Measure calls with a tensor of `nbytes`, `in_flight` at a time."""
        array, repeated = np.zeros(max(1, nbytes // 4), np.float32), max(1, 512 // in_flight)
        cpu = wall = float("inf")
        for _ in range(_ROUNDS):
            begin_cpu_ns, start_ns = await self._cpu_ns(), time.perf_counter_ns()
            for _ in range(repeated):
                await self._round_trips(_ECHO, in_flight, [array])
            wall = min(wall, time.perf_counter_ns() - start_ns)
            cpu = min(cpu, await self._cpu_ns() - begin_cpu_ns)
        count = repeated * in_flight * 1e3
        return Cost(cpu / count, wall / count)

    def close(self) -> None:
        """Close the connection, which ends the child."""
        self._link.close()


@contextlib.asynccontextmanager
async def echo(inline_bytes: int = wire.INLINE_BYTES) -> AsyncIterator[Echo]:
    """Run a child for the duration of the block. Both send tensors of up to `inline_bytes` in their frames."""
    our_sock, child_sock = socket.socketpair()
    command = [sys.executable, "-m", "penstock.perf.ipc", str(child_sock.fileno()), str(inline_bytes)]
    child = subprocess.Popen(command, pass_fds=[child_sock.fileno()])  # noqa: ASYNC220 - it takes a moment
    child_sock.close()
    connection, default_inline_bytes = Echo(our_sock), wire.INLINE_BYTES
    wire.INLINE_BYTES = inline_bytes
    try:
        yield connection
    finally:
        wire.INLINE_BYTES = default_inline_bytes
        connection.close()
        child.wait()


def _serve(descriptor: int, inline_bytes: int) -> None:
    wire.INLINE_BYTES = inline_bytes
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError):
        while True:
            for kind, number, _, arrays, _ in channel.receive():
                body = _NS.pack(time.process_time_ns()) if kind == _CPU else b""
                channel.send(kind, number, body, arrays or None)
            arrays = []


def copy_us(nbytes: int) -> float:
    """Microseconds of CPU for one copy of what another core has written, which is in none of this core's caches."""
    arrays = [np.ones(nbytes, np.uint8) for _ in range(_COLD_BYTES // nbytes)]
    best = float("inf")
    for _ in range(20):
        start = time.process_time_ns()
        for source, target in pairwise(arrays):
            np.copyto(target, source)
        best = min(best, time.process_time_ns() - start)
    return best / (len(arrays) - 1) / 1e3


async def print_round_trip_cost() -> None:
    """Print the cost of a call to another process that does nothing, and the number of copies of a large tensor."""
    async with echo() as connection:
        for in_flight in (1, 8, IN_FLIGHT):
            cost = await connection.cost(16, in_flight)
            print(f"{f'hop, a row, {in_flight} in flight, both processes':54}{cost.cpu:9.2f} us")
        _print_verdict(f"hop: {cost.cpu:.2f} us of CPU a call at {IN_FLIGHT} in flight", cost.cpu)
        small, large, copy = await connection.cost(16, 1), await connection.cost(LARGE_BYTES, 1), copy_us(LARGE_BYTES)
        copies = (large.cpu - small.cpu) / copy
        print(f"{'hop, 600 kB, 1 in flight, both processes':54}{large.cpu:9.2f} us")
        print(f"{'one copy of 600 kB':54}{copy:9.2f} us")
        print(f"hop: 600 kB there and back cost {copies:.1f} copies more than a row; {COPIES} are made, one each way")


async def print_inline_cost() -> None:
    """Print the cost of a tensor by size, in its frame and in a slot: the basis for choosing INLINE_BYTES."""
    async with echo(1 << 20) as connection:
        framed = [await connection.cost(size, IN_FLIGHT) for size in SIZES]
    async with echo(0) as connection:
        slotted = [await connection.cost(size, IN_FLIGHT) for size in SIZES]
    for size, frame, slot in zip(SIZES, framed, slotted, strict=True):
        print(f"{size:6} bytes: {frame.cpu:6.2f} us in the frame, {slot.cpu:6.2f} us in a slot")


async def print_hook_cost(engine: Engine, path: Path) -> None:
    """Print the cost of a hook by where it runs, both processes together. `path` is a model of 4 numbers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hooks.py"
        file.write_text("def pre_inference(sample, signature, metadata):\n    return [sample['x']]\n", "utf-8")
        costs = []
        for version, workers in ((901, 0), (902, 1)):
            spec = HookSpec(file, workers=workers)
            before = _process_tree()
            model = await engine.load(ModelSpec("hooked", version, path, policy=_POLICY, hooks=spec))
            hooks = await Hooks.load(engine, model)
            costs.append(await _request_us(hooks, _process_tree() - before))
            await hooks.close()
            await engine.unload("hooked", version)
    here_us, there_us = costs
    print(f"{f'a request with a hook here, {IN_FLIGHT} in flight':54}{here_us:9.2f} us")
    print(f"{f'a request with a hook in a worker, {IN_FLIGHT} in flight':54}{there_us:9.2f} us")
    _print_verdict(f"hook in a worker: {there_us - here_us:.2f} us of CPU more a request", there_us - here_us)


async def _request_us(hooks: Hooks, workers: set[int]) -> float:
    """Microseconds of CPU of a request, IN_FLIGHT at a time, here and in the workers."""

    async def ask(count: int) -> None:
        for _ in range(count):
            await hooks.predict({"x": [1.0, 2.0, 3.0, 4.0]})

    best, requests_each = float("inf"), 20
    for _ in range(_ROUNDS):
        start = time.process_time_ns() + sum(map(processes.cpu_ns, workers))
        await asyncio.gather(*(ask(requests_each) for _ in range(IN_FLIGHT)))
        best = min(best, time.process_time_ns() + sum(map(processes.cpu_ns, workers)) - start)
    return best / (IN_FLIGHT * requests_each) / 1e3


async def print_front_end_cost(path: Path) -> None:
    """Print the cost of a request from a front end to the engine, both on this loop: no wake-ups are counted."""
    settings = Settings(model_repository=(str(path),), allow_http=False, allow_grpc=False, allow_metrics=False)
    engine, front = EngineServer(settings), FrontServer(settings)
    front_sock, engine_sock = socket.socketpair()
    try:
        await engine.open()
        front.attach(front_sock)
        engine.attach(engine_sock)
        await engine.load()
        await front.wait_ready(10.0)
        name = engine.engine.models()[0].name
        here_us = await _infer_us(engine.engine, engine.engine.model(name))
        there_us = await _infer_us(front.engine, front.engine.model(name))
    finally:
        await front.close()
        await engine.close()
    print(f"{f'a request from the engine itself, {IN_FLIGHT} in flight':54}{here_us:9.2f} us")
    print(f"{f'a request from a front end, {IN_FLIGHT} in flight':54}{there_us:9.2f} us")
    _print_verdict(f"front end: {there_us - here_us:.2f} us of CPU more a request", there_us - here_us)


def _print_verdict(claim: str, us: float) -> None:
    print(verdict(f"{claim}, at most {BUDGET_US:g}", us <= BUDGET_US))


async def _infer_us(engine: Engine | RemoteEngine, model: Model) -> float:
    row, requests_each, best = np.zeros((1, 4), np.float32), 20, float("inf")

    async def ask() -> None:
        for _ in range(requests_each):
            await submit_and_wait(engine, make_request(model, [row]))

    for _ in range(_ROUNDS):
        start = time.process_time_ns()
        await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
        best = min(best, time.process_time_ns() - start)
    return best / (IN_FLIGHT * requests_each) / 1e3


def _process_tree() -> set[int]:
    return set(processes.descended([os.getpid()], processes.living()))


def make_model(folder: Path) -> Path:
    """Make iris in a folder, as the default model to measure with."""
    make(folder, {"iris": iris})
    return folder / "iris" / "1" / "model.onnx"


async def main(path: Path) -> None:
    """Print all tables."""
    await print_round_trip_cost()
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    await print_hook_cost(engine, path)
    await engine.stop(1.0)
    await print_front_end_cost(path)
    await print_inline_cost()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _serve(int(sys.argv[1]), int(sys.argv[2]))
    elif len(sys.argv) > 1:
        uvloop.run(main(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as made:
            uvloop.run(main(make_model(Path(made))))
