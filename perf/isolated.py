"""The cost of a run in a worker: `python -m penstock.perf.isolated [SAVEDMODEL ...]`.

A run is what an Instance does with a gathered batch: acquire buffers, fill them, run. ONNX Runtime is measured in this
process and in a worker, side by side; a SavedModel given as argument in a worker only, on zeros of one row and of 32.
CPU is that of both processes together, in the fastest of many rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from penstock.backends.backend import Backend, Binding
from penstock.backends.loading import LOADERS
from penstock.batching.spec import WorkerSpec
from penstock.server.isolated.backend import IsolatedBackend
from penstock.server.isolated.loader import IsolatedLoader, with_isolated

from .ipc import Cost, copy_us
from .models import iris
from .processes import cpu_ns

LARGE = (1, 150_000)
"""600 kB."""
_ROUNDS = 30
_ROUND_NS = 20_000_000
Shapes = list[tuple[int, ...] | None]


@dataclass(frozen=True)
class Measuring:
    """How a run is measured: the number and length of rounds. `pid` is the worker's, 0 for none."""

    pid: int = 0
    rounds: int = _ROUNDS
    round_ns: int = _ROUND_NS


def cost(binding: Binding, rows: int, shapes: Shapes, output_indexes: tuple[int, ...], measuring: Measuring) -> Cost:
    """Measure a run, with the CPU of its worker."""
    arrays = [buffer.copy() for buffer in binding.acquire_buffers(rows, shapes) if buffer is not None]
    for array in arrays:
        array[...] = b"" if array.dtype.hasobject else 0

    def run() -> Any:
        for buffer, array in zip(binding.acquire_buffers(rows, shapes), arrays, strict=True):
            if buffer is not None:
                np.copyto(buffer, array)
        return binding.run(output_indexes)

    start = time.perf_counter_ns()
    for _ in range(20):
        run()
    repeated = max(5, 20 * measuring.round_ns // (time.perf_counter_ns() - start))
    cpu = wall = float("inf")
    for _ in range(measuring.rounds):
        begin_cpu_ns, start = time.process_time_ns() + cpu_ns(measuring.pid), time.perf_counter_ns()
        for _ in range(repeated):
            run()
        wall = min(wall, time.perf_counter_ns() - start)
        cpu = min(cpu, time.process_time_ns() + cpu_ns(measuring.pid) - begin_cpu_ns)
    return Cost(cpu / repeated / 1e3, wall / repeated / 1e3)


def _plus_one() -> onnx.ModelProto:
    """Make a model that costs next to nothing, with large tensors both ways."""
    shape: list[str | int | None] = ["N", LARGE[1]]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", "output")]
    one_tensor = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(
        [helper.make_node("Add", ["input", "one"], ["output"])], "g", values[:1], values[1:], [one_tensor]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _own_python(spec: WorkerSpec, label: str) -> str:
    return spec.interpreter


def _shapes(backend: Backend, rows: int) -> Shapes:
    return [(rows, *(max(dim, 1) for dim in spec.shape[1:])) for spec in backend.graph.inputs]


def print_comparison(path: Path, label: str, rows: int, options: Mapping[str, str]) -> None:
    """Print the cost of a run of an ONNX model here and in a worker."""
    local_backend = LOADERS["onnxruntime"](path, "cpu", options)
    worker_backend = IsolatedLoader("penstock.backends.loading:load_onnx", _own_python)(path, "cpu", options)
    costs = [_cost(local_backend, rows), _cost(worker_backend, rows)]
    for backend in (local_backend, worker_backend):
        backend.close()
    for where, cost in zip(("here", "in a worker, both processes"), costs, strict=True):
        _print_cost(f"{label}, {where}", cost)
    print(f"{label}: {costs[1].cpu - costs[0].cpu:.1f} us of CPU more, {costs[1].wall - costs[0].wall:.1f} us later")


def _cost(backend: Backend, rows: int) -> Cost:
    binding = backend.bind(replace(backend.graph, batched=True), rows)
    output_indexes = tuple(range(len(backend.graph.outputs)))
    pid = backend.pid if isinstance(backend, IsolatedBackend) else 0
    return cost(binding, rows, _shapes(backend, rows), output_indexes, Measuring(pid))


def _print_cost(label: str, cost: Cost) -> None:
    print(f"{label:54}{cost.cpu:9.1f} us of CPU{cost.wall:9.1f} us")


def main(models: list[Path]) -> None:
    """Print all."""
    one_thread = {"intra_op_thread_count": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("iris", iris()), ("large", _plus_one())):
            onnx.save(model, Path(folder) / f"{name}.onnx")
        for rows in (1, 32):
            print_comparison(Path(folder) / "iris.onnx", f"iris, {rows} rows", rows, one_thread)
        print_comparison(Path(folder) / "large.onnx", "600 kB each way", 1, one_thread)
    print(f"{'one copy of 600 kB':54}{copy_us(4 * LARGE[1]):9.1f} us of CPU")
    tensorflow = with_isolated({}, _own_python)["tensorflow"]
    for path in models:
        backend = tensorflow(path, "cpu", one_thread)
        for rows in (1, 32):
            _print_cost(f"{path.name}, {rows} rows, in a worker, both processes", _cost(backend, rows))
        backend.close()


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
