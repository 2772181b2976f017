"""What bad requests cost the good ones: `python -m penstock.perf.faults`.

Three models of rows of 4 numbers, which are places in a table of 1000: one bad request in a hundred asks for a place
beyond it, and makes ONNX Runtime raise. `lookup` is small and runs on the loop; `early` does the work of `mlp` after
the look-up, `late` before it. Load without and with bad requests runs in turns; the server's CPU time is compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .load import Call, Load, Process, drive, penstock

PLACES = 1000
CONNECTIONS = 64
BAD_ONE_IN = 100
MODELS = ("lookup", "early", "late")
MOST = 1.3
"""Times the CPU time of the same load without bad requests. Source: issue 4."""


class _Graph:
    """A chain of nodes under construction."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(11)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        values = self._rng.normal(0, np.sqrt(2 / shape[0]), shape).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def places(self, numbers: str) -> str:
        return self.node("Cast", numbers, to=TensorProto.INT64)

    def after(self, x: str) -> str:
        """Give the places once `x` is there: nothing of it is added to them."""
        self.weights.append(numpy_helper.from_array(np.zeros(1, np.float32), "nothing"))
        none_of_it = self.node("Mul", self.node("ReduceMax", x, axes=[1], keepdims=1), "nothing")
        return self.places(self.node("Add", "input", none_of_it))

    def look_up(self, places: str, width: int) -> str:
        """Give the mean of 4 rows of a table."""
        found = self.node("Gather", self.weight(PLACES, width), places, axis=0)
        return self.node("ReduceMean", found, axes=[1], keepdims=0)

    def dense(self, x: str, *widths: int) -> str:
        for taken, given in itertools.pairwise(widths):
            x = self.node("Relu", self.node("MatMul", x, self.weight(taken, given)))
        return x


def build(name: str) -> onnx.ModelProto:
    """Build one of MODELS."""
    graph = _Graph()
    if name == "lookup":
        result, given = graph.dense(graph.look_up(graph.places("input"), 16), 16, 16, 3), 3
    elif name == "early":
        result, given = graph.dense(graph.look_up(graph.places("input"), 512), 512, 2048, 2048, 512), 512
    else:
        result, given = graph.look_up(graph.after(graph.dense("input", 4, 512, 2048, 2048, 512)), 512), 512
    graph.nodes.append(helper.make_node("Identity", [result], ["output"]))
    inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])]
    outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", given])]
    whole = helper.make_graph(graph.nodes, name, inputs, outputs, graph.weights)
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def bodies(bad: bool) -> tuple[bytes, ...]:
    """Write BAD_ONE_IN requests, the last one bad if so asked; its answer is JSON like the others'."""
    rows = np.random.default_rng(3).integers(0, PLACES, (BAD_ONE_IN, 4)).tolist()
    if bad:
        rows[-1][2] = PLACES
    return tuple(
        json.dumps({"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": row}]}).encode()
        for row in rows
    )


@dataclass(slots=True)
class Case:
    """What the rounds of one model have given: the loads without and with bad requests, and how answers were counted.

    `served` and `failed` are the server's own counts under the load with bad requests.
    """

    model: str
    clean: list[Load] = field(default_factory=list)
    bad: list[Load] = field(default_factory=list)
    served: int = 0
    failed: int = 0

    def round(self, server: Process, seconds: int) -> None:
        """Measure both loads once, one after the other."""
        path, headers = f"/v2/models/{self.model}/infer", {"Content-Type": "application/json"}
        self.clean.append(drive(server, Call(path, bodies(bad=False), headers), CONNECTIONS, seconds))
        served, failed = _counts(server, self.model)
        self.bad.append(drive(server, Call(path, bodies(bad=True), headers), CONNECTIONS, seconds))
        served_after, failed_after = _counts(server, self.model)
        self.served += served_after - served
        self.failed += failed_after - failed

    def lines(self) -> Iterator[str]:
        """Write the medians and whether they hold."""
        clean, bad = (statistics.median(load.cpu_us for load in loads) for loads in (self.clean, self.bad))
        rates = [statistics.median(load.requests_per_s for load in loads) for loads in (self.clean, self.bad)]
        p99 = [statistics.median(load.p99_ms for load in loads) for loads in (self.clean, self.bad)]
        yield f"{self.model:<8} CPU us/request {clean:8.1f} without bad ones, {bad:8.1f} with; ratio {bad / clean:.2f}"
        yield f"{'':8} requests/s {rates[0]:,.0f} and {rates[1]:,.0f}; p99 ms {p99[0]:.2f} and {p99[1]:.2f}"
        share = self.failed / max(self.served + self.failed, 1)
        yield f"{'':8} {self.served:,} served, {self.failed:,} failed ({share:.2%})"
        verdict = "holds" if bad / clean <= MOST else "DOES NOT HOLD"
        yield f"{'':8} at most {MOST} times the CPU: {verdict}"
        # what was under way when a load ended was counted by the server, and by nobody else
        strange = abs(self.failed - (self.served + self.failed) / BAD_ONE_IN) > len(self.bad) * 2
        lost = sum(load.broken for load in (*self.clean, *self.bad)) + sum(load.refused for load in self.clean)
        yield f"{'':8} every good request is served: {'DOES NOT HOLD' if strange or lost else 'holds'}"


def _counts(server: Process, model: str) -> tuple[int, int]:
    """Give how many requests the model has served, and how many have failed."""
    stats = json.loads(server.request("GET", f"/v2/models/{model}/stats"))["model_stats"][0]["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]


def main() -> None:
    """Run the rounds and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.faults", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of each load")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            path = Path(folder, name, "1", "model.onnx")
            path.parent.mkdir(parents=True)
            onnx.save(build(name), path)
        with penstock(Path(folder)) as server:
            for name in args.models:
                warm = Case(name)
                warm.round(server, 1)
                case = Case(name)
                for _ in range(args.rounds):
                    case.round(server, args.seconds)
                print(*case.lines(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
