"""The cost of a front end with an engine compared with one process: `python -m penstock.perf.front_ends`.

Real processes over loopback, both topologies in turns. CPU is that of all processes of a server, per request, from
/proc; for each topology the least disturbed of several runs counts. wrk drives them: it is compiled, so the load takes
little of the cores that it shares with them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import onnx

from . import bench, processes
from .calls import Call
from .models import Graph, iris, make
from .server_process import Process, penstock
from .side_by_side import ProcessTree
from .wrk import Load, drive

CONNECTIONS = (1, 8, 64)
SECONDS = 2
ROUNDS = 2
BUDGET_US = 15.0
LARGE = 150_000
"""FP32 values: 600 kB."""
LARGE_8 = bench.Case("echo", "binary", 8, ((1, LARGE),))


class Serving(ProcessTree):
    """A server, including its supervisor, and the processes that serve."""

    def pids(self) -> list[int]:
        """Return the processes, except a spare one, which is importing modules meanwhile."""
        stats = {pid: each for pid, each in processes.living().items() if each.name != "starting"}
        return processes.descended([self.pid], stats)


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


def main() -> None:
    """Print what each topology costs, and the difference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, {"iris": iris, "echo": echo})
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
            added_us = costs[1] - costs[0]
            small = connections == max(CONNECTIONS) and model == "iris"
            budget_text = (
                f", budget {BUDGET_US:.0f}: {'kept' if added_us <= BUDGET_US else 'not kept'}" if small else ""
            )
            print(f"{model:8} {connections:11}  the hop: {added_us:.1f} us{budget_text}", flush=True)


if __name__ == "__main__":
    main()
