"""Cortex: the gain from batching between the hooks. `python -m penstock.perf.cortex`.

The same server serves each project twice: as it is, and one request at a time from before pre_inference until after
post_inference, which is what Cortex guaranteed. For comparison, the same model is also served through plain `infer`,
without hooks. The ONNX models fix one row, as most exported ones do. Projects whose handler or model needs a package
that this Python lacks (Pillow, TensorFlow) are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import importlib
import importlib.util
import io
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import uvloop

from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec
from penstock.server.hooks.engine import HookedEngine
from penstock.server.process import prepare
from penstock.server.serve import Server
from penstock.server.settings import Settings

from . import models
from .background_load import measure_when_idle
from .calls import HOST, Call
from .server_process import Process, http_ready, penstock, running_server
from .side_by_side import ProcessTree
from .wrk import drive

JSON = {"Content-Type": "application/json"}
PATIENCE_S = 10.0
"""How long to wait for others to leave the machine idle. What they use after that is printed."""
SAVED_MODEL = Path(__file__).parents[1] / "examples" / "cortex" / "s3" / "penstock-examples" / "iris" / "tensorflow"
"""Iris as TensorFlow 1 exported its estimators: four inputs of any number of rows."""
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
TENSORFLOW = """
labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]


def pre_inference(sample, signature, metadata):
    return {name: [sample[name]] for name in signature["predict"]["inputs"]}


def post_inference(prediction, signature, metadata):
    return labels[int(prediction["class_ids"][0])]
"""
PIXELS = """
import base64

import numpy as np


def pre_inference(sample, signature, metadata):
    pixels = np.frombuffer(base64.b64decode(sample["image"]), np.uint8)
    return {signature[0].name: pixels.astype(np.float32) / 255}


def post_inference(prediction, signature, metadata):
    return int(prediction[0][0].argmax())
"""
PICTURE = """
import base64
import io

import numpy as np
from PIL import Image


def pre_inference(sample, signature, metadata):
    picture = Image.open(io.BytesIO(base64.b64decode(sample["image"])))
    pixels = np.atleast_3d(np.asarray(picture, dtype=np.float32)) / 255
    return {signature[0].name: pixels.transpose(2, 0, 1)}


def post_inference(prediction, signature, metadata):
    return int(prediction[0][0].argmax())
"""
FLOWER = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}


@dataclass(frozen=True, slots=True)
class Project:
    """One project: how its ONNX model is made (None: SAVED_MODEL), its handler, and a sample.

    `shape` and `datatype` are those of one row of each input, as sent to plain `infer`. `needs` is a package that this
    Python must have.
    """

    build: Callable[[], onnx.ModelProto] | None
    handler: str
    sample: Mapping[str, Any]
    shape: tuple[int, ...]
    inputs: tuple[str, ...] = field(default=("input",), kw_only=True)
    datatype: str = field(default="FP32", kw_only=True)
    needs: str = field(default="", kw_only=True)


def digits() -> onnx.ModelProto:
    """Build LeNet-5, which reads a digit of 28 x 28 pixels."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13]>
        digits (float[N, 1, 28, 28] input) => (float[N, 10] output) {
            a = Conv<pads = [2, 2, 2, 2]>(input, w0)
            b = Relu(a) c = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(b)
            d = Conv(c, w1)
            e = Relu(d) f = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(e)
            g = Flatten(f) h = MatMul(g, w2)
            i = Relu(h) j = MatMul(i, w3)
            k = Relu(j) output = MatMul(k, w4)
        }""")
    rng = np.random.default_rng(6)
    for number, shape in enumerate(((6, 1, 5, 5), (16, 6, 5, 5), (400, 120), (120, 84), (84, 10))):
        values = rng.normal(0, 0.1, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, f"w{number}"))
    return model


def image(side: int, colours: int, encoding: str) -> dict[str, str]:
    """Encode a smooth pattern as text: raw pixels if no encoding is named, or if Pillow is not installed."""
    x, y = np.meshgrid(np.linspace(0, 6, side), np.linspace(0, 4, side))
    pixels = np.stack([np.sin(x), np.cos(y), np.sin(x + y)], axis=2)[:, :, :colours].squeeze()
    pixel_bytes = (pixels * 127 + 128).astype(np.uint8)
    content = pixel_bytes.tobytes()
    if encoding and importlib.util.find_spec("PIL"):
        file = io.BytesIO()
        importlib.import_module("PIL.Image").fromarray(pixel_bytes).save(file, encoding)
        content = file.getvalue()
    return {"image": base64.b64encode(content).decode()}


PROJECTS: Mapping[str, Project] = {
    "iris": Project(models.iris, IRIS, FLOWER, (1, 4)),
    "iris, globals": Project(models.iris, GLOBALS, {**FLOWER, "name": "a"}, (1, 4)),
    "iris, TensorFlow": Project(
        None, TENSORFLOW, FLOWER, (1,), inputs=tuple(FLOWER), datatype="FP64", needs="tensorflow"
    ),
    "mlp": Project(models.mlp, VECTOR, {"values": [round(0.01 * i, 2) for i in range(512)]}, (1, 512)),
    "digit, pixels": Project(digits, PIXELS, image(28, 1, ""), (1, 1, 28, 28)),
    "digit, PNG": Project(digits, PICTURE, image(28, 1, "PNG"), (1, 1, 28, 28), needs="PIL"),
    "ResNet-18, JPEG of 32": Project(models.cnn, PICTURE, image(32, 3, "JPEG"), (1, 3, 32, 32), needs="PIL"),
    "ResNet-18, JPEG of 224": Project(models.cnn, PICTURE, image(224, 3, "JPEG"), (1, 3, 224, 224), needs="PIL"),
}


def write(folder: Path, project: Project) -> None:
    """Write a project with one API, and beside it a repository with the same model."""
    project_folder, plain_folder = folder / "project", folder / "plain" / "plain" / "1"
    project_folder.mkdir()
    plain_folder.mkdir(parents=True)
    if project.build is None:
        shutil.copytree(SAVED_MODEL, project_folder / "model")
        shutil.copytree(SAVED_MODEL / "1", plain_folder / "model.savedmodel")
    else:
        model = project.build()
        for axis, length in enumerate(project.shape[1:], 1):
            model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = length
        onnx.save(model, plain_folder / "model.onnx")
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 1
        onnx.save(model, project_folder / "model")
    (project_folder / "handler.py").write_text(project.handler)
    kind = "onnx" if project.build else "tensorflow"
    api = {"kind": "api", "name": "api", kind: {"model": "model", "request_handler": "handler.py"}}
    (project_folder / "cortex.yaml").write_text(json.dumps([{"kind": "deployment", "name": "perf"}, api]))


class OneByOne(HookedEngine):
    """An engine whose models take one request at a time, hooks included."""

    async def open(self, spec: ModelSpec) -> Model:
        """Load a model that way. Raises: InferError."""
        hooks = spec.hooks and replace(spec.hooks, replicas=1)
        policy = replace(spec.policy, cap_rows=1)
        return await super().open(replace(spec, hooks=hooks, policy=policy, frees_rows=False))


async def serve_one_by_one(project: Path, port: int) -> None:
    """Serve a project one request at a time until SIGTERM."""
    stop_requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_requested.set)
    settings = Settings(
        model_repository=(str(project),), dialect="cortex", http_address=HOST, http_port=port, allow_grpc=False,
        allow_metrics=False,
    )  # fmt: skip
    server = Server(settings, models=OneByOne)
    await server.open()
    await server.load()
    await stop_requested.wait()
    await server.drain()
    await server.close()


@contextlib.contextmanager
def served(folder: Path, mode: str) -> Iterator[Process]:
    """Serve what `write` has written, in one of three ways. Workers count: a TensorFlow model has one."""
    project = folder / "project"
    if mode == "plain infer":
        serving = penstock(folder / "plain")
    elif mode == "batched":
        serving = penstock(project, "--dialect", "cortex", "--http-address", HOST)
    else:
        command = [sys.executable, "-m", "penstock.perf.cortex", "--one-by-one", str(project), "--port"]
        serving = running_server(command, http_ready("/v2/health/ready"))
    with serving as server:
        yield ProcessTree(server.pid, server.port)


def call_of(project: Project, mode: str) -> Call:
    """Make the request. Tensors are sent as binary, as tritonclient sends them."""
    if mode != "plain infer":
        return Call("/perf/api", (json.dumps(project.sample).encode(),), JSON)
    row = np.full(project.shape, 0.5, "f4" if project.datatype == "FP32" else "f8").tobytes()
    entry = {"datatype": project.datatype, "shape": project.shape, "parameters": {"binary_data_size": len(row)}}
    head = json.dumps({"inputs": [{"name": name, **entry} for name in project.inputs]}).encode()
    headers = {**JSON, "Inference-Header-Content-Length": str(len(head))}
    return Call("/v2/models/plain/infer", (head + row * len(project.inputs),), headers)


WAYS = ("one by one", "batched", "plain infer")


def measured(project: Project, seconds: int, rounds: int, connections: int) -> Iterator[str]:
    """Measure the three ways in turns and report them side by side."""
    rates: dict[str, list[float]] = {mode: [] for mode in WAYS}
    costs: dict[str, list[float]] = {mode: [] for mode in WAYS}
    sizes: dict[str, list[float]] = {mode: [] for mode in WAYS}
    background_cores: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, project)
        for _ in range(rounds):
            for mode in WAYS:
                with served(folder, mode) as server:
                    call = call_of(project, mode)
                    server.request("POST", call.path, call.bodies[0], call.headers)
                    drive(server, call, connections, 1)
                    measure = partial(drive, server, call, connections, seconds)
                    load, cores = measure_when_idle(server, measure, time.monotonic() + PATIENCE_S)
                    background_cores.append(cores)
                    if load.refused or load.broken:
                        raise SystemExit(f"{mode}: {load.refused} refused, {load.broken} broken")
                    rates[mode].append(load.requests_per_s)
                    costs[mode].append(load.cpu_us)
                    rows, batches = server.counts("plain" if mode == "plain infer" else "api")
                    sizes[mode].append(rows / max(batches, 1))
    median_rates = {mode: statistics.median(values) for mode, values in rates.items()}
    for mode in WAYS:
        cost, size = statistics.median(costs[mode]), statistics.median(sizes[mode])
        yield f"  {mode:12}{median_rates[mode]:9.0f} requests/s  {cost:7.1f} us of CPU each  {size:5.1f} a batch"
    speedups = [ours / baseline for ours, baseline in zip(rates["batched"], rates["one by one"], strict=True)]
    plain_ratios = [ours / baseline for ours, baseline in zip(rates["batched"], rates["plain infer"], strict=True)]
    speedup, plain_ratio = statistics.median(speedups), statistics.median(plain_ratios)
    speedup_list = ", ".join(f"{ours:.1f}" for ours in speedups)
    yield f"  batched is {speedup:.1f} times one by one ({speedup_list}), {plain_ratio:.2f} of plain infer"
    yield f"  others used {max(background_cores):.2f} cores at most"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("projects", nargs="*", help=f"of {', '.join(PROJECTS)}; all of them where none is named")
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--one-by-one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_by_one:
        prepare()
        uvloop.run(serve_one_by_one(args.one_by_one, args.port))
        return
    print(f"{os.cpu_count()} CPUs, {args.connections} connections")
    for name in args.projects or PROJECTS:
        project = PROJECTS[name]
        if project.needs and not importlib.util.find_spec(project.needs):
            print(f"{name}: left out, this Python has no {project.needs}", flush=True)
            continue
        print(name, flush=True)
        for line in measured(project, args.seconds, args.rounds, args.connections):
            print(line, flush=True)


if __name__ == "__main__":
    main()
