"""`make bench`: the running server under closed-loop load, beside bare uvicorn, the prototype and ONNX Runtime alone.

These machines drift by a third within the hour, so everything compared runs in turns, round after round, and the table
holds medians. Every case is warmed up once before it counts. Targets of issue 2 that are figures of another machine are
also reported as multiples of the prototype (baselines/prototype.py), whose figures on that machine are known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import models
from .baselines import onnx_runtime
from .calls import Call
from .claims import verdict
from .server_process import Process, bare_uvicorn, penstock, prototype
from .wrk import Rounds, drive

ECHO = "echo"
WARM_UP_S = 1
COLUMNS = f"{'p50 ms':>8} {'p99 ms':>8} {'CPU us':>8} {'rows/batch':>10} {'of offline':>10}"
PROTOTYPE_MODES = {"iris": "loop", "mlp": "thread"}
"""Where the prototype runs a model."""
HEAD = f"{'case':<20} {'c':>4} {'req/s':>9} {COLUMNS}"


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table. `shapes`: of the tensors sent in turn."""

    model: str
    wire: str
    connections: int
    shapes: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        return f"{self.model} {self.wire}"


@dataclass(slots=True)
class CaseRounds(Rounds):
    """The rounds of one case, with its batch sizes."""

    rows_per_batch: list[float] = field(default_factory=list)

    def drive(self, server: Process, model: str, sent: Call, connections: int, seconds: int) -> None:
        """Measure once more, and count the rows and batches that the model runs meanwhile."""
        rows, batches = server.counts(model)
        self.loads.append(drive(server, sent, connections, seconds))
        rows_after, batches_after = server.counts(model)
        self.rows_per_batch.append((rows_after - rows) / max(batches_after - batches, 1))

    @property
    def rows(self) -> float:
        return statistics.median(self.rows_per_batch) if self.rows_per_batch else 0.0


IRIS, MLP, CNN = ((1, 4),), ((1, 512),), ((1, 3, 224, 224),)
SHORT, LONG = (1, 256), (1, 384)
ECHO_64 = Case(ECHO, "JSON", 64, IRIS)
IRIS_1, IRIS_64 = Case("iris", "JSON", 1, IRIS), Case("iris", "JSON", 64, IRIS)
MLP_32, MLP_128 = Case("mlp", "binary", 32, MLP), Case("mlp", "binary", 128, MLP)
MLP_JSON = Case("mlp", "JSON", 32, MLP)
CNN_8 = Case("cnn", "binary", 8, CNN)
ALONE, MIXED = Case("ragged", "one shape", 64, (SHORT,)), Case("ragged", "two shapes", 64, (SHORT, LONG))
HALF = Case("ragged", "one shape", 32, (SHORT,))
"""What one of the two shapes would get without the other's clients."""
CASES = (IRIS_1, ECHO_64, IRIS_64, MLP_32, MLP_128, MLP_JSON, CNN_8, HALF, ALONE, MIXED)


@dataclass(frozen=True, slots=True)
class FigureTarget:
    """The target of issue 2 for one figure of Load, and the prototype's figure on the same machine."""

    figure: str
    bound: float
    prototype: float
    is_minimum: bool = False


TARGETS = {
    IRIS_1: FigureTarget("p50_ms", 0.05, 0.03),
    IRIS_64: FigureTarget("cpu_us", 12, 8.3),
    MLP_32: FigureTarget("requests_per_s", 14_000, 14_000, is_minimum=True),
    MLP_128: FigureTarget("requests_per_s", 18_000, 17_500, is_minimum=True),
    MLP_JSON: FigureTarget("requests_per_s", 9_000, 9_500, is_minimum=True),
}


def make_call(case: Case) -> Call:
    """Make the case's request, in JSON or as a JSON header with a raw tensor."""
    path = f"/v2/models/{case.model}/infer"
    tensors = [np.random.default_rng(5).random(shape, dtype=np.float32) for shape in case.shapes]
    if case.wire == "JSON":
        return Call(path, tuple(_json(tensor) for tensor in tensors), {"Content-Type": "application/json"})
    heads = {len(_binary_head(tensor)) for tensor in tensors}
    if len(heads) > 1:
        raise ValueError(f"{case.name}: bodies sent in turn share their headers, so their heads must be as long")
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(heads.pop())}
    return Call(path, tuple(_binary_head(tensor) + tensor.tobytes() for tensor in tensors), headers)


def _json(tensor: models.Array) -> bytes:
    values = [round(float(value), 4) for value in tensor.ravel()]
    entry = {"name": "input", "shape": tensor.shape, "datatype": "FP32", "data": values}
    return json.dumps({"inputs": [entry]}).encode()


def _binary_head(tensor: models.Array) -> bytes:
    input_entry = {"name": "input", "shape": tensor.shape, "datatype": "FP32"}
    output_entry = {"name": "output", "parameters": {"binary_data": True}}
    return json.dumps(
        {"inputs": [{**input_entry, "parameters": {"binary_data_size": tensor.nbytes}}], "outputs": [output_entry]}
    ).encode()


class Bench:
    """The servers under load and the figures so far."""

    def __init__(self, cases: list[Case], servers: Mapping[str, Process], folder: Path) -> None:
        self.results = {case: CaseRounds() for case in cases}
        self.prototype = {case: Rounds() for case in cases if case in TARGETS}
        self.offline: dict[str, list[float]] = {case.model: [] for case in cases if case.model != ECHO}
        self._servers = servers
        self._folder = folder

    def check(self) -> None:
        """Send every case once, so that no error is measured for speed."""
        for case in self.results:
            sent = make_call(case)
            for body in sent.bodies:
                self._server(case).request("POST", sent.path, body, sent.headers)
        for case in self.prototype:
            sent = make_call(case)
            self._servers[case.model].request("POST", sent.path, sent.bodies[0], sent.headers)

    def round(self, seconds: int) -> None:
        """Measure everything once, one after the other."""
        for case, line in self.results.items():
            server = self._server(case)
            if case in self.prototype:
                peer = self._servers[case.model]
                self.prototype[case].loads.append(drive(peer, make_call(case), case.connections, seconds))
            if case.model == ECHO:
                line.loads.append(drive(server, make_call(case), case.connections, seconds))
            else:
                line.drive(server, case.model, make_call(case), case.connections, seconds)
        for model, rates in self.offline.items():
            rates.append(onnx_runtime.best_rows_per_s(self._folder / model / "1" / "model.onnx")["best"])

    def discard_warm_up(self) -> None:
        """Drop the results of the warm-up."""
        for case in self.results:
            self.results[case] = CaseRounds()
        for case in self.prototype:
            self.prototype[case] = Rounds()
        for rates in self.offline.values():
            rates.clear()

    def _server(self, case: Case) -> Process:
        return self._servers[ECHO if case.model == ECHO else "penstock"]

    def table(self) -> str:
        """Format the medians."""
        rows = [HEAD]
        for case, line in self.results.items():
            rate = line.median("requests_per_s")
            row = f"{case.name:<20} {case.connections:>4} {rate:>9,.0f} {line.median('p50_ms'):>8.3f}"
            row += f" {line.median('p99_ms'):>8.3f} {line.median('cpu_us'):>8.1f}"
            if case.model != ECHO:
                row += f" {line.rows:>10.1f} {rate / statistics.median(self.offline[case.model]):>10.3f}"
            failed = sum(load.refused + load.broken for load in line.loads)
            rows.append(row + (f"  {failed} FAILED" if failed else ""))
        for case, peer in self.prototype.items():
            row = f"{'prototype, ' + case.wire:<20} {case.connections:>4} {peer.median('requests_per_s'):>9,.0f}"
            row += f" {peer.median('p50_ms'):>8.3f} {peer.median('p99_ms'):>8.3f} {peer.median('cpu_us'):>8.1f}"
            rows.append(f"{row}  {case.model}")
        rows += [
            f"offline {model}: ONNX Runtime alone does {statistics.median(rates):,.0f} rows/s"
            for model, rates in self.offline.items()
        ]
        return "\n".join(rows)

    def verdicts(self) -> list[str]:
        """Report which of issue 2's targets are met."""
        lines = []

        def say(case: Case, name: str, value: float, bound: float, *, is_minimum: bool) -> None:
            limit = f"at {'least' if is_minimum else 'most'} {bound:,.4g}"
            text = f"{case.name} at {case.connections}: {name} {value:,.3f}, {limit}"
            lines.append(verdict(text, value >= bound if is_minimum else value <= bound))

        for case, line in self.results.items():
            if case in TARGETS:
                target = TARGETS[case]
                say(case, target.figure, line.median(target.figure), target.bound, is_minimum=target.is_minimum)
                times = line.ratio_to(self.prototype[case], target.figure)
                ratio_limit = target.bound / target.prototype
                say(case, f"{target.figure}, times the prototype's", times, ratio_limit, is_minimum=target.is_minimum)
            if case == IRIS_64 and ECHO_64 in self.results:
                times = line.ratio_to(self.results[ECHO_64], "requests_per_s")
                say(case, "times bare uvicorn's requests/s", times, 1.5, is_minimum=True)
            elif case == MIXED:
                for reference in (ALONE, HALF):
                    name = f"of the rows/batch of one shape with {reference.connections}"
                    say(case, name, line.rows / self.results[reference].rows, 0.8, is_minimum=True)
        return lines


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    names = sorted({case.model for case in CASES})
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of load per case and round")
    args = parser.parse_args()
    folder = models.DEFAULT_FOLDER
    models.make(folder)
    with contextlib.ExitStack() as stack:
        cases = [case for case in CASES if case.model in args.models]
        servers = {}
        if ECHO in args.models:
            servers[ECHO] = stack.enter_context(bare_uvicorn())
        if set(args.models) - {ECHO}:
            servers["penstock"] = stack.enter_context(penstock(folder))
        for model in {case.model for case in cases if case in TARGETS}:
            servers[model] = stack.enter_context(prototype(PROTOTYPE_MODES[model], folder / model / "1" / "model.onnx"))
        bench = Bench(cases, servers, folder)
        bench.check()
        bench.round(WARM_UP_S)
        bench.discard_warm_up()
        for number in range(args.rounds):
            bench.round(args.seconds)
            print(f"round {number + 1} of {args.rounds} done", flush=True)
    print(bench.table(), *bench.verdicts(), sep="\n")


if __name__ == "__main__":
    main()
