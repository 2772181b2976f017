"""Cortex: what batching behind the hooks is worth. `python -m penstock.perf.cortex`.

Each project is served twice by the same server: as it is, and one request at a time from before pre_inference until
after post_inference, which is what Cortex promised. Beside them stands the same model through plain `infer`, without
hooks. The models fix one row, as most exported ones do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import uvloop

from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.hooks.engine import HookedEngine
from penstock.server.process import prepare
from penstock.server.serve import Server
from penstock.server.settings import Settings

from . import models
from .load import HOST, Call, Process, drive, penstock, running

JSON = {"Content-Type": "application/json"}
IRIS = """
labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]


def pre_inference(sample, signature, metadata):
    return {signature[0].name: [
        sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"],
    ]}


def post_inference(prediction, signature, metadata):
    return labels[int(prediction[0][0].argmax())]
"""
GLOBALS = """
labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
name = None


def pre_inference(sample, signature, metadata):
    global name
    name = sample["name"]
    return [sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"]]


def post_inference(prediction, signature, metadata):
    return {"name": name, "label": labels[int(prediction[0][0].argmax())]}
"""
VECTOR = """
import numpy as np


def pre_inference(sample, signature, metadata):
    return {signature[0].name: np.asarray(sample["values"], dtype=np.float32)}


def post_inference(prediction, signature, metadata):
    return int(prediction[0][0].argmax())
"""
FLOWER = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}


@dataclass(frozen=True, slots=True)
class Project:
    """One project: its model, its handler, and a sample."""

    model: str
    handler: str
    sample: object
    width: int


PROJECTS: Mapping[str, Project] = {
    "iris": Project("iris", IRIS, FLOWER, 4),
    "iris, globals": Project("iris", GLOBALS, {**FLOWER, "name": "a"}, 4),
    "mlp": Project("mlp", VECTOR, {"values": [round(0.01 * i, 2) for i in range(512)]}, 512),
}


def write(folder: Path, project: Project) -> None:
    """Write a project of one API, and beside it a repository of the same model."""
    model = models.MODELS[project.model]()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    (folder / "project").mkdir()
    onnx.save(model, folder / "project" / "model.onnx")
    (folder / "project" / "handler.py").write_text(project.handler)
    api = {"kind": "api", "name": "api", "onnx": {"model": "model.onnx", "request_handler": "handler.py"}}
    (folder / "project" / "cortex.yaml").write_text(json.dumps([{"kind": "deployment", "name": "perf"}, api]))
    (folder / "plain" / "plain" / "1").mkdir(parents=True)
    onnx.save(models.MODELS[project.model](), folder / "plain" / "plain" / "1" / "model.onnx")


class OneByOne(HookedEngine):
    """An engine whose models take one request at a time, hooks included."""

    async def open(self, spec: ModelSpec) -> Model:
        """Load a model so. Raises: InferError."""
        hooks = spec.hooks and replace(spec.hooks, replicas=1)
        policy = replace(spec.policy, cap_rows=1)
        return await super().open(replace(spec, hooks=hooks, policy=policy, frees_rows=False))


async def serve_one_by_one(project: Path, port: int) -> None:
    """Serve a project one request at a time until SIGTERM."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    settings = Settings(
        model_repository=(str(project),), dialect="cortex", http_address=HOST, http_port=port, allow_grpc=False,
        allow_metrics=False,
    )  # fmt: skip
    server = Server(settings, models=OneByOne)
    await server.open()
    await server.load()
    await asked.wait()
    await server.drain()
    await server.close()


@contextlib.contextmanager
def served(folder: Path, way: str) -> Iterator[Process]:
    """Serve what `write` has written, in one of three ways."""
    if way == "plain infer":
        with penstock(folder / "plain") as server:
            yield server
        return
    project = str(folder / "project")
    command = [sys.executable, "-m", "penstock.server.cli", "serve", project, "--dialect", "cortex"]
    command += ["--http-address", HOST, "--allow-grpc=false", "--allow-metrics=false", "--http-port"]
    if way == "one by one":
        command = [sys.executable, "-m", "penstock.perf.cortex", "--one-by-one", project, "--port"]
    with running(command, lambda server: server.request("GET", "/v2/health/ready")) as server:
        yield server


def call_of(project: Project, way: str) -> Call:
    """Give what is asked."""
    if way != "plain infer":
        return Call("/perf/api", (json.dumps(project.sample).encode(),), JSON)
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, project.width], "data": [0.5] * project.width}
    return Call("/v2/models/plain/infer", (json.dumps({"inputs": [tensor]}).encode(),), JSON)


WAYS = ("one by one", "batched", "plain infer")


def measured(project: Project, seconds: int, rounds: int, connections: int) -> Iterator[str]:
    """Give the three ways side by side, in turns."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, project)
        for _ in range(rounds):
            for way in WAYS:
                with served(folder, way) as server:
                    call = call_of(project, way)
                    server.request("POST", call.path, call.bodies[0], call.headers)
                    drive(server, call, connections, 1)
                    load = drive(server, call, connections, seconds)
                    if load.refused or load.broken:
                        raise SystemExit(f"{way}: {load.refused} refused, {load.broken} broken")
                    rates[way].append(load.requests_per_s)
                    costs[way].append(load.cpu_us)
                    rows, batches = server.counts("plain" if way == "plain infer" else "api")
                    sizes[way].append(rows / max(batches, 1))
    middle = {way: statistics.median(seen) for way, seen in rates.items()}
    for way in WAYS:
        cost, size = statistics.median(costs[way]), statistics.median(sizes[way])
        yield f"  {way:12}{middle[way]:9.0f} requests/s  {cost:7.1f} us of CPU each  {size:5.1f} a batch"
    gains = [one / other for one, other in zip(rates["batched"], rates["one by one"], strict=True)]
    shares = [one / other for one, other in zip(rates["batched"], rates["plain infer"], strict=True)]
    gain, share = statistics.median(gains), statistics.median(shares)
    yield f"  batched is {gain:.1f} times one by one, {share:.2f} of plain infer"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--one-by-one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one_by_one:
        prepare()
        uvloop.run(serve_one_by_one(asked.one_by_one, asked.port))
        return
    print(f"{os.cpu_count()} CPUs, {asked.connections} connections")
    for name, project in PROJECTS.items():
        print(f"{name} ({project.model}, one row fixed)", flush=True)
        for line in measured(project, asked.seconds, asked.rounds, asked.connections):
            print(line, flush=True)


if __name__ == "__main__":
    main()
