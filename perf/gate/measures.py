"""The measures of the gate: each is a ratio of two things measured one right after the other.

The cost of a request is the CPU time of the server's process, under a closed loop of the generator. The cost of a path
within the process is compared with a loop of plain Python. Both sides slow down alike if the machine is slow or busy.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import uvloop

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.perf import bench, micro, micro_rpc, static_policies
from penstock.perf.server_process import penstock
from penstock.perf.simulator.arrivals import ONE_ROW
from penstock.perf.simulator.run_times import RunTimes
from penstock.perf.simulator.simulation import simulate
from penstock.server.hooks.runner import Hooks
from penstock.server.v2.rpc.encode import RpcEncoder, encode_id_and_mark
from penstock.server.v2.rpc.inference import RpcInference

from .testbed import CONCURRENCY, QUIET, Testbed

MANY = 128
_ROUNDS, _TURNS = 15, 4
_OBJECTS = 2000
_SIMULATED = 4000
_RUN_NS = {1: 200_000, 64: 1_300_000}
"""The run time of a batch in the simulation, by rows."""


class _Item:
    __slots__ = ("key", "rows")

    def __init__(self, key: tuple[int, ...], rows: int) -> None:
        self.key = key
        self.rows = rows


def yardstick_us() -> float:
    """Return the CPU microseconds of plain Python with a hundred small objects, as a server's work has many.

    There are enough objects that pressure on a shared cache slows this down as it does the server.
    """
    return micro.fastest_us(_plain_python, _OBJECTS // 100, number=2)


def _plain_python() -> int:
    waiting: dict[tuple[int, ...], list[_Item]] = {}
    for number in range(_OBJECTS):
        item = _Item((number % 7, 4), number & 3)
        waiting.setdefault(item.key, []).append(item)
    return sum(item.rows for items in waiting.values() for item in sorted(items, key=_by_rows))


def _by_rows(item: _Item) -> int:
    return item.rows


def _in_yardsticks(us: Callable[[], float], turns: int = 1) -> float:
    """Measure in turns with the yardstick; the fastest of each counts."""
    yardsticks_us = [yardstick_us()]
    costs_us = []
    for _ in range(turns):
        costs_us.append(us())
        yardsticks_us.append(yardstick_us())
    return min(costs_us) / min(yardsticks_us)


def _with_model(
    testbed: Testbed, measure: Callable[[Engine, Model], Coroutine[Any, Any, float]], policy: BatchPolicy
) -> float:
    async def run() -> float:
        engine = Engine(asyncio.get_running_loop(), LOADERS)
        try:
            return await measure(engine, await engine.load(ModelSpec("iris", 1, testbed.iris, policy=policy)))
        finally:
            await engine.stop(1.0)

    np.seterr(all="ignore")
    rounds, micro.ROUNDS = micro.ROUNDS, _ROUNDS
    try:
        return _in_yardsticks(lambda: uvloop.run(run()), _TURNS)
    finally:
        micro.ROUNDS = rounds


def trip(testbed: Testbed) -> float:
    """Return the cost of a whole HTTP request within the process, 32 per loop turn, in yardsticks."""

    async def measure(engine: Engine, model: Model) -> float:
        body = micro.document(model.signature.inputs[0].name, 4)
        head = b"POST /v2/models/iris/infer HTTP/1.1\r\nhost: localhost:8000\r\ncontent-type: application/json\r\n"
        return await micro.trip_us(engine, CONCURRENCY, head + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    return _with_model(testbed, measure, BatchPolicy(executor="loop"))


def scheduling(testbed: Testbed) -> float:
    """Return the cost of scheduling, from submit to delivery without a run, 64 requests per turn, in yardsticks."""

    async def measure(engine: Engine, model: Model) -> float:
        return await micro.scheduling_us(engine, model, micro.Queue(64))

    return _with_model(testbed, measure, BatchPolicy(executor="loop"))


def rpc(testbed: Testbed) -> float:
    """Return the cost of decoding a repeated gRPC message and encoding its answer, in yardsticks."""

    async def measure(engine: Engine, model: Model) -> float:
        inference = RpcInference(engine, lambda model: Hooks(engine, model))
        encoder = RpcEncoder(model.name, model.version, model.signature)
        sent, output = micro_rpc.message(model.signature.inputs[0].name), [np.zeros((1, 3), np.float32)]
        inference.decode(sent, sink=None)  # type: ignore[arg-type]
        decoded = micro.fastest_us(lambda: inference.find(sent, sink=None))  # type: ignore[arg-type]
        return decoded + micro.fastest_us(lambda: encoder.encode_plain((0,), output, encode_id_and_mark("")))

    return _with_model(testbed, measure, BatchPolicy(executor="loop"))


def http_cpu(testbed: Testbed) -> float:
    """Return the server's CPU for an iris request in JSON, relative to bare uvicorn's echo."""
    return testbed.server_ratio("penstock", "uvicorn", "JSON")


def grpc_cpu(testbed: Testbed) -> float:
    """Return the server's CPU for an iris request over gRPC, relative to grpc.aio with the same model."""
    return testbed.server_ratio("penstock", "grpc.aio", "gRPC")


def generator_http(testbed: Testbed) -> float:
    """Return the generator's CPU for a request over HTTP, in yardsticks."""
    return _in_yardsticks(lambda: testbed.client_us("bare", "JSON"))


def generator_grpc(testbed: Testbed) -> float:
    """Return the generator's CPU for a request over gRPC, in yardsticks."""
    return _in_yardsticks(lambda: testbed.client_us("bare", "gRPC"))


def batch_cpu(testbed: Testbed) -> float:
    """Return the server's CPU per row of the mlp, with 128 in flight, relative to ONNX Runtime in batches of 32."""
    window, spent_s = testbed.drive("penstock", "binary", MANY)
    return spent_s / len(window.ends_ns) * 1e6 / _onnxruntime_us(testbed.folder / "mlp" / "1" / "model.onnx", 32)


def _onnxruntime_us(path: Path, rows: int) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {"input": np.random.default_rng(0).random((rows, *bench.MLP[0][1:]), dtype=np.float32)}
    return micro.fastest_us(lambda: session.run(None, feed), rows, number=5)


def batching(testbed: Testbed) -> float:
    """Return the default batcher's p99 relative to a cap of 64 without delay: the mean over all loads of policies.py.

    It is simulated: the figure is the same on any machine, and changes only with the batcher.
    """
    return testbed.cached(_simulated)


def _simulated() -> float:
    (key,), ratios = {kind.key for kind in ONE_ROW}, []
    run_times = RunTimes({key: _RUN_NS})
    for cell in static_policies.cells():
        _, knee_per_s = run_times.knee(cell.kinds[0].key, MANY // 2)
        arrivals = cell.arrivals(knee_per_s, cell.seconds(knee_per_s, _SIMULATED), 0)
        tried = (static_policies.DEFAULT_POLICY, static_policies.static_grid()["cap 64, 0 ms"])
        default_figures, static_figures = (
            static_policies.figures(simulate(arrivals, policy, run_times)) for policy in tried
        )
        ratios.append(default_figures.p99_ms / static_figures.p99_ms)
    return statistics.fmean(ratios)


def command_line(_testbed: Testbed) -> float:
    """Return the CPU of `penstock --help`, relative to a Python that does nothing."""
    arguments = ["-c", "from penstock.server.cli import main; main(['--help'])"]
    return _cpu_s(arguments) / _cpu_s(["-c", "pass"])


def start(testbed: Testbed) -> float:
    """Return the CPU of the server until it is ready, relative to importing its dependencies."""
    return _cpu_until_ready(testbed.folder / "iris") / _cpu_s(
        ["-c", "import numpy, onnxruntime, uvloop, uvicorn, orjson"]
    )


def _cpu_s(arguments: Sequence[str]) -> float:
    """Return the CPU seconds of a run of Python, the least of three."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))


def _cpu_until_ready(model: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(model, Path(folder, model.name))
        with penstock(Path(folder), QUIET) as process:
            return process.cpu_s()


MEASURES: Mapping[str, Callable[[Testbed], float]] = MappingProxyType(
    {
        measure.__name__: measure
        for measure in (
            http_cpu, grpc_cpu, batch_cpu, batching, generator_http, generator_grpc, trip, scheduling, rpc,
            command_line, start,
        )
    }
)  # fmt: skip
"""The names that budgets.toml may use."""
