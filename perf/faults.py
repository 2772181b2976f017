"""What bad requests cost the good ones: `python -m penstock.perf.faults`.

Three models of rows of 4 numbers, which are places in a table of 1000: one bad request in a hundred asks for a place
beyond it, and makes ONNX Runtime raise. `lookup` is small and runs on the loop; `early` does the work of `mlp` after
the look-up, `late` before it. Loads without bad requests, with others each time, and with the same one again and again
run in turns; the server's CPU time is compared.
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

from penstock.batching.running.quarantine import MOST as MOST_KNOWN

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


def bodies(bad: int) -> tuple[bytes, ...]:
    """Write requests, one in BAD_ONE_IN of which is bad if so asked, `bad` different ones; all answers are JSON."""
    rows = np.random.default_rng(3).integers(0, PLACES, (BAD_ONE_IN, 4)).tolist()
    texts: list[bytes] = []
    for number in range(bad):
        rows[-1][2] = PLACES + number
        texts += map(_body, rows)
    return tuple(texts or map(_body, rows))


def _body(row: list[int]) -> bytes:
    return json.dumps({"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": row}]}).encode()


@dataclass(slots=True)
class Kind:
    """What the rounds of one load of one model have given. `bad`: how many different bad requests; 0: none.

    `served` and `failed` are the server's own counts.
    """

    bad: int
    loads: list[Load] = field(default_factory=list)
    served: int = 0
    failed: int = 0

    def round(self, server: Process, model: str, seconds: int) -> None:
        """Measure it once."""
        served, failed = _counts(server, model)
        call = Call(f"/v2/models/{model}/infer", bodies(self.bad), {"Content-Type": "application/json"})
        self.loads.append(drive(server, call, CONNECTIONS, seconds))
        served_after, failed_after = _counts(server, model)
        self.served += served_after - served
        self.failed += failed_after - failed

    def median(self, name: str) -> float:
        """Give the median of one figure of Load."""
        return float(statistics.median(getattr(load, name) for load in self.loads))

    @property
    def is_whole(self) -> bool:
        """Whether who is bad has failed, and nobody else."""
        # what was under way when a load ended was counted by the server, and by nobody else
        bad = (self.served + self.failed) / BAD_ONE_IN if self.bad else 0
        return abs(self.failed - bad) <= len(self.loads) * 2 and not any(load.broken for load in self.loads)


def cases() -> dict[str, Kind]:
    """Make the loads: without bad requests, with others each time, and with one that comes again and again."""
    # more than the server remembers, so that each is a new one to it
    return {"none bad": Kind(0), "each another": Kind(2 * MOST_KNOWN), "the same again": Kind(1)}


def lines(model: str, kinds: dict[str, Kind]) -> Iterator[str]:
    """Write the medians and whether they hold."""
    clean, *others = kinds
    for name, kind in kinds.items():
        yield (
            f"{model:<8}{name:<16}{kind.median('cpu_us'):8.1f} us CPU/request{kind.median('requests_per_s'):10,.0f}/s"
            f"  p99 {kind.median('p99_ms'):6.2f} ms  {kind.served:,} served, {kind.failed:,} failed"
        )
    for name in others:
        ratio = kinds[name].median("cpu_us") / kinds[clean].median("cpu_us")
        yield f"{model}, {name}: {ratio:.2f} times the CPU, at most {MOST}: {_verdict(ratio <= MOST)}"
    yield f"{model}: every good request is served: {_verdict(all(kind.is_whole for kind in kinds.values()))}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


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
                for seconds, rounds in ((1, 1), (args.seconds, args.rounds)):  # the first to warm up
                    kinds = cases()
                    for kind in rounds * list(kinds.values()):
                        kind.round(server, name, seconds)
                print(*lines(name, kinds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
