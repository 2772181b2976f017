"""The cost that bad requests add to the good ones: `python -m penstock.perf.faults`.

Three models take rows of 4 numbers, which are indices into a table of 1000 rows: one bad request in a hundred has an
index beyond it, which makes ONNX Runtime raise. `lookup` is small and runs on the loop; `early` does the work of `mlp`
after the look-up, `late` before it. Loads without bad requests, with a different bad one each time, and with the same
one repeated run in turns; the server's CPU time is compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from penstock.batching.running.quarantine import MAX_FINGERPRINTS as MOST_KNOWN

from .calls import Call
from .claims import verdict
from .models import Graph, make
from .server_process import Process, penstock
from .wrk import Rounds, drive

TABLE_ROWS = 1000
CONNECTIONS = 64
BAD_ONE_IN = 100
MODELS = ("lookup", "early", "late")
MAX_COST_RATIO = 1.3
"""Limit for the CPU time relative to the same load without bad requests. Source: issue 4."""


class _Graph(Graph):
    """A Graph that can look up rows in a table."""

    def places(self, numbers: str) -> str:
        return self.node("Cast", numbers, to=TensorProto.INT64)

    def after(self, x: str) -> str:
        """Return the indices, made to depend on `x` by adding zero times its maximum."""
        zero = self.kept(np.zeros(1, np.float32))
        none_of_it = self.node("Mul", self.node("ReduceMax", x, axes=[1], keepdims=1), zero)
        return self.places(self.node("Add", "input", none_of_it))

    def look_up(self, indexes: str, width: int) -> str:
        """Return the mean of 4 rows of a table."""
        gathered = self.node("Gather", self.weight(TABLE_ROWS, width, fan_in=TABLE_ROWS), indexes, axis=0)
        return self.node("ReduceMean", gathered, axes=[1], keepdims=0)

    def layers(self, x: str, *widths: int) -> str:
        for width_in, width_out in itertools.pairwise(widths):
            x = self.node("Relu", self.node("MatMul", x, self.weight(width_in, width_out, fan_in=width_in)))
        return x


def build(name: str) -> onnx.ModelProto:
    """Build one of MODELS."""
    graph, width = _Graph(seed=11), 3 if name == "lookup" else 512
    if name == "lookup":
        result = graph.layers(graph.look_up(graph.places("input"), 16), 16, 16, 3)
    elif name == "early":
        result = graph.layers(graph.look_up(graph.places("input"), 512), 512, 2048, 2048, 512)
    else:
        result = graph.look_up(graph.after(graph.layers("input", 4, 512, 2048, 2048, 512)), 512)
    return graph.model(name, result, ("N", 4), ("N", width))


def bodies(bad_kinds: int) -> tuple[bytes, ...]:
    """Make requests, one in BAD_ONE_IN of them bad, with `bad_kinds` different bad ones (0: none). All are JSON."""
    rows = np.random.default_rng(3).integers(0, TABLE_ROWS, (BAD_ONE_IN, 4)).tolist()
    texts: list[bytes] = []
    for number in range(bad_kinds):
        rows[-1][2] = TABLE_ROWS + number
        texts += map(_body, rows)
    return tuple(texts or map(_body, rows))


def _body(row: list[int]) -> bytes:
    return json.dumps({"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": row}]}).encode()


@dataclass(slots=True)
class Kind(Rounds):
    """The results of one load of one model. `bad`: the number of different bad requests; 0: none.

    `served` and `failed` are the server's own counts.
    """

    bad: int = 0
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

    @property
    def only_bad_requests_failed(self) -> bool:
        """Whether the bad requests have failed, and no others."""
        # requests in flight when a load ended were counted by the server only
        expected_failures = (self.served + self.failed) / BAD_ONE_IN if self.bad else 0
        return abs(self.failed - expected_failures) <= len(self.loads) * 2 and not any(
            load.broken for load in self.loads
        )


def cases() -> dict[str, Kind]:
    """Make the loads: no bad requests, a different bad one each time, and the same one repeated."""
    # more than the server remembers, so each is new to it
    return {"none bad": Kind(), "each another": Kind(bad=2 * MOST_KNOWN), "the same again": Kind(bad=1)}


def lines(model: str, kinds: dict[str, Kind]) -> Iterator[str]:
    """Format the medians and the verdicts."""
    clean, *faulty_kinds = kinds
    for name, kind in kinds.items():
        yield (
            f"{model:<8}{name:<16}{kind.median('cpu_us'):8.1f} us CPU/request{kind.median('requests_per_s'):10,.0f}/s"
            f"  p99 {kind.median('p99_ms'):6.2f} ms  {kind.served:,} served, {kind.failed:,} failed"
        )
    for name in faulty_kinds:
        ratio = kinds[name].median("cpu_us") / kinds[clean].median("cpu_us")
        yield verdict(f"{model}, {name}: {ratio:.2f} times the CPU, at most {MAX_COST_RATIO}", ratio <= MAX_COST_RATIO)
    yield verdict(
        f"{model}: every good request is served", all(kind.only_bad_requests_failed for kind in kinds.values())
    )


def _counts(server: Process, model: str) -> tuple[int, int]:
    """Return how many requests the model has served, and how many have failed."""
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
        make(Path(folder), {name: partial(build, name) for name in args.models})
        with penstock(Path(folder)) as server:
            for name in args.models:
                for seconds, rounds in ((1, 1), (args.seconds, args.rounds)):  # the first is a warm-up
                    kinds = cases()
                    for kind in rounds * list(kinds.values()):
                        kind.round(server, name, seconds)
                print(*lines(name, kinds), sep="\n", flush=True)


if __name__ == "__main__":
    main()
