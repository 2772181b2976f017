"""The cost of a front end with an engine compared with one process: `python -m penstock.perf.fronts`.

Real processes over loopback, both topologies in turns. CPU is that of all processes of a server, per request, from
/proc; for each topology the least disturbed of several runs counts. wrk drives them: it is compiled, so the load takes
little of the cores that it shares with them.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.environments.environments import Environments
from penstock.server.fronts.engine_service import EngineService
from penstock.server.fronts.model_table import FrontModelTable
from penstock.server.fronts.published_engine import PublishedEngine
from penstock.server.fronts.remote_engine import RemoteEngine
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message

from . import bench, processes
from .beside import Family
from .load import Call, Load, Process, drive, penstock
from .models import Graph, iris, make

CONNECTIONS = (1, 8, 64)
SECONDS = 2
ROUNDS = 2
IN_FLIGHT = 64
BARE_ROUNDS = 1000
BUDGET_US = 15.0
LARGE = 150_000
"""FP32 values: 600 kB."""
LARGE_8 = bench.Case("echo", "binary", 8, ((1, LARGE),))


class Serving(Family):
    """A server, including its supervisor, and the processes that serve."""

    def pids(self) -> list[int]:
        """Return the processes, except a spare one, which is importing modules meanwhile."""
        seen = {pid: each for pid, each in processes.living().items() if each.name != "starting"}
        return processes.descended([self.pid], seen)


@contextmanager
def served(folder: Path, fronts: int) -> Iterator[Serving]:
    """Serve a repository with one process, or with `fronts` front ends and an engine, until the block ends."""
    with penstock(folder, "--http-workers", str(fronts)) as process:
        yield Serving(process.pid, process.port)


def echo() -> onnx.ModelProto:
    """Make a model that returns its input, so that only transport is measured."""
    return Graph(seed=0).model("echo", "input", ("N", LARGE), ("N", LARGE))


def _small() -> Call:
    row = b'{"inputs":[{"name":"input","shape":[1,4],"datatype":"FP32","data":[5.1,3.5,1.4,0.2]}]}'
    return Call("/v2/models/iris/infer", (row,), {"Content-Type": "application/json"})


def _best(serve: Callable[[], AbstractContextManager[Process]], call: Call, connections: int) -> Load:
    """Measure one topology once, after a warm-up."""
    with serve() as process:
        drive(process, call, connections, 1)
        loads = [drive(process, call, connections, SECONDS) for _ in range(ROUNDS)]
    return min(loads, key=lambda load: load.cpu_us)


class Counting:
    """A sink that signals when a number of requests have come back."""

    def __init__(self) -> None:
        self._left = 0
        self._done = asyncio.Event()

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Count."""
        self._left -= len(requests)
        if not self._left:
            self._done.set()

    async def round(self, submit: Callable[[InferRequest], None], model: Model) -> int:
        """Have 64 requests served concurrently. Returns: the CPU time of this process. Units: nanoseconds."""
        self._left = IN_FLIGHT
        self._done.clear()
        row = np.ones((1, 4), np.float32)
        start_ns = time.process_time_ns()
        for _ in range(IN_FLIGHT):
            submit(InferRequest(model, [row], 1, ((4,),), (0,), self))
        await self._done.wait()
        return time.process_time_ns() - start_ns


async def print_bare(path: Path) -> None:
    """Print the hop's own CPU time: both halves on one loop, without dialects, compared with calling an Engine."""
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    published = PublishedEngine(engine)
    model = await published.open(ModelSpec("iris", 1, path, policy=BatchPolicy(executor="loop")))
    await published.publish("iris", [model])
    published.complete_load()
    here, there = socket.socketpair()
    remote = RemoteEngine()
    placed = asyncio.Event()

    def to_front(messages: list[Message]) -> None:
        for _, number, body, _, _ in remote.receive(messages):
            model_table.receive(number, body)

    front = Link(there, to_front, lambda _: None)
    model_table = FrontModelTable(remote, front, Environments().interpreter, placed.set)
    remote.attach(front)

    def to_engine(messages: list[Message]) -> None:
        for kind, number, body, _, _ in service.receive(messages):
            published.receive(link, kind, number, body)

    link = Link(here, to_engine, print)
    service = EngineService(engine, link, published.models)
    published.attach(link)
    await placed.wait()
    sink = Counting()
    called = min([await sink.round(engine.submit, model) for _ in range(BARE_ROUNDS)]) / IN_FLIGHT / 1000
    hopped = min([await sink.round(remote.submit, remote.model("iris")) for _ in range(BARE_ROUNDS)]) / IN_FLIGHT / 1000
    more = hopped - called
    kept = "kept" if more <= BUDGET_US else "not kept"
    print(f"iris, {IN_FLIGHT} at once, Engine alone: {called:.1f} us CPU, by RemoteEngine: {hopped:.1f} us")
    print(f"the hop alone: {more:.1f} us, budget {BUDGET_US:.0f}: {kept}", flush=True)
    front.close()
    link.close()
    await model_table.close()
    await engine.stop(1)


def main() -> None:
    """Print what each topology costs, and the difference. With `bare`: only the hop, without clients' sockets."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, {"iris": iris, "echo": echo})
        asyncio.run(print_bare(folder / "iris" / "1" / "model.onnx"))
        if "bare" in sys.argv:
            return
        cases = [("iris", _small(), connections) for connections in CONNECTIONS] + [
            ("600 kB", bench.make_call(LARGE_8), 8)
        ]
        print("model    connections  topology            requests/s  p50 ms  p99 ms   CPU us", flush=True)
        for model, call, connections in cases:
            costs = []
            for title, fronts in (("one process", 0), ("1 front end, engine", 1)):
                load = _best(partial(served, folder, fronts), call, connections)
                broken = f"  {load.refused} refused, {load.broken} broken" if load.refused or load.broken else ""
                print(
                    f"{model:8} {connections:11}  {title:19} {load.requests_per_s:10.0f} {load.p50_ms:7.2f} "
                    f"{load.p99_ms:7.2f} {load.cpu_us:8.1f}{broken}",
                    flush=True,
                )
                costs.append(load.cpu_us)
            more = costs[1] - costs[0]
            small = connections == max(CONNECTIONS) and model == "iris"
            word = f", budget {BUDGET_US:.0f}: {'kept' if more <= BUDGET_US else 'not kept'}" if small else ""
            print(f"{model:8} {connections:11}  the hop: {more:.1f} us{word}", flush=True)


if __name__ == "__main__":
    main()
