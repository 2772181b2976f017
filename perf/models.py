"""The benchmark's models, generated with fixed seeds as a Triton repository: `python -m penstock.perf.models DIR`.

`iris` is all overhead (4-16-3). `mlp` is bound by its 25 MB of weights, so batching gains tenfold (512-2048-2048-512).
`cnn` is bound by arithmetic, so batching gains little (ResNet-18 with folded batch norms). `ragged` takes rows of any
length, with the work of `mlp`, so its batches grow as far as the lanes allow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int | str, ...]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
DEFAULT_FOLDER = Path("perf/.models")


class Graph:
    """A chain of nodes under construction. Each method adds nodes and returns the name of their result."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        return self.kept(self._rng.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32))

    def kept(self, values: Array) -> str:
        """Add existing weights."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def whole(self, *values: int) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def dense(self, x: str, width_in: int, width_out: int) -> str:
        return self.node(
            "Gemm", x, self.weight(width_in, width_out, fan_in=width_in), self.weight(width_out, fan_in=width_in)
        )

    def conv(self, x: str, width_in: int, width_out: int, size: int, stride: int = 1) -> str:
        fan_in = width_in * size * size
        weights = self.weight(width_out, width_in, size, size, fan_in=fan_in), self.weight(width_out, fan_in=fan_in)
        return self.node("Conv", x, *weights, strides=[stride] * 2, pads=[size // 2] * 4)

    def model(self, name: str, result: str, width_in: Shape, width_out: Shape) -> onnx.ModelProto:
        self._nodes.append(helper.make_node("Identity", [result], ["output"]))
        inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, list(width_in))]
        outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, list(width_out))]
        graph = helper.make_graph(self._nodes, name, inputs, outputs, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def iris() -> onnx.ModelProto:
    """Build 4-16-3 with softmax."""
    graph = Graph(seed=1)
    hidden = graph.node("Relu", graph.dense("input", 4, 16))
    return graph.model("iris", graph.node("Softmax", graph.dense(hidden, 16, 3), axis=1), ("N", 4), ("N", 3))


def mlp() -> onnx.ModelProto:
    """Build 512-2048-2048-512."""
    graph = Graph(seed=2)
    hidden = graph.node("Relu", graph.dense("input", 512, 2048))
    hidden = graph.node("Relu", graph.dense(hidden, 2048, 2048))
    return graph.model("mlp", graph.dense(hidden, 2048, 512), ("N", 512), ("N", 512))


def cnn() -> onnx.ModelProto:
    """Build ResNet-18 for 224 x 224 images, each batch norm folded into the convolution before it."""
    graph = Graph(seed=3)
    x = graph.node("Relu", graph.conv("input", 3, 64, 7, stride=2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 64
    for stage_width in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and stage_width > width else 1
            y = graph.node("Relu", graph.conv(x, width, stage_width, 3, stride))
            y = graph.conv(y, stage_width, stage_width, 3)
            shortcut = x if stage_width == width else graph.conv(x, width, stage_width, 1, stride)
            x = graph.node("Relu", graph.node("Add", y, shortcut))
            width = stage_width
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    return graph.model("cnn", graph.dense(x, 512, 1000), ("N", 3, 224, 224), ("N", 1000))


def ragged() -> onnx.ModelProto:
    """Build a model of rows of any length L, returned shifted by what a 1-2048-2048-1 network makes of their mean."""
    graph = Graph(seed=4)
    mean = graph.node("ReduceMean", "input", axes=[1], keepdims=1)
    hidden = graph.node("Relu", graph.dense(mean, 1, 2048))
    hidden = graph.node("Relu", graph.dense(hidden, 2048, 2048))
    return graph.model("ragged", graph.node("Add", "input", graph.dense(hidden, 2048, 1)), ("N", "L"), ("N", "L"))


def deep() -> onnx.ModelProto:
    """Build a model of rows of 64 numbers, each carried through 16 layers 512 wide: 0.5 GFLOP a row from 256 bytes.

    Batching gains little, and a core does a few hundred rows/s, so the offered load can be many times the capacity.
    """
    graph = Graph(seed=5)
    x = graph.node("MatMul", graph.node("Reshape", "input", graph.whole(0, 64, 1)), graph.weight(1, 512, fan_in=1))
    weight = graph.weight(512, 512, fan_in=512)
    for _ in range(16):
        x = graph.node("Relu", graph.node("MatMul", x, weight))
    x = graph.node("ReduceMean", x, axes=[1], keepdims=0)
    return graph.model("deep", graph.dense(x, 512, 8), ("N", 64), ("N", 8))


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = MappingProxyType(
    {"iris": iris, "mlp": mlp, "cnn": cnn, "ragged": ragged}
)


def make(folder: Path, builders: Mapping[str, Callable[[], onnx.ModelProto]] = MODELS) -> None:
    """Write the models that are missing from the repository, or older than this file."""
    for name, build in builders.items():
        path = folder / name / "1" / "model.onnx"
        if not path.exists() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
            path.parent.mkdir(parents=True, exist_ok=True)
            onnx.save(build(), path)


def main() -> None:
    """Make the repository named on the command line."""
    parser = argparse.ArgumentParser(description="Make the benchmark's models as a model repository.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()
