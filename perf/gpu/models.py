"""The models of the check, generated from seeds: a ResNet-50, a BERT-base encoder and an MLP, in three precisions.

The machine that runs them writes them, since they are too large to transfer. All precisions of a model have the same
weights, rounded. `small` models are stand-ins with the same graphs for a machine without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.perf.models import Graph

Tensor = np.ndarray[Any, Any]
FP32, FP16, BF16 = "fp32", "fp16", "bf16"
_OPSET, _IR = 20, 9
_SENT_ROWS = 4
_FAR = -10_000.0
"""Added to the scores of masked tokens; half precision can represent it."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the graphs. `image`: pixels a side; `blocks`: in each stage; `length`: tokens in a row."""

    image: int = 224
    width: int = 64
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    classes: int = 1000
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    length: int = 128
    words: int = 30_522
    features: int = 512
    dense: int = 2048


FULL = Size()
SMALL = Size(32, 8, (1, 1), 10, 2, 32, 2, 16, 100, 16, 32)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of model in one precision, at one size."""

    kind: str
    precision: str
    size: Size = FULL

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.precision}"

    @property
    def datatype(self) -> str:
        """The datatype of floating-point inputs and outputs in the v2 protocol."""
        return self.precision.upper()

    @property
    def dtype(self) -> Any:
        """Their numpy dtype; bf16 is carried as bit patterns."""
        return {FP32: np.float32, FP16: np.float16, BF16: np.uint16}[self.precision]

    def inputs(self, rows: int, seed: int = 0) -> dict[str, Tensor]:
        """Draw rows of input, by name; bf16 as bit patterns. The same seed draws the same numbers in all precisions."""
        rng, size = np.random.default_rng(seed), self.size
        if self.kind == "encoder":
            lengths = rng.integers(size.length // 2, size.length + 1, (rows, 1))
            mask = (np.arange(size.length) < lengths).astype(np.int64)
            return {"ids": rng.integers(0, size.words, (rows, size.length)), "mask": mask}
        shape = (size.features,) if self.kind == "mlp" else (3, size.image, size.image)
        return {"input": cast(rng.standard_normal((rows, *shape), np.float32), self.precision)}


def cast(values: Tensor, precision: str) -> Tensor:
    """Round single precision to another precision; to bf16 by rounding to nearest, as bit patterns."""
    if precision == BF16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16 if precision == FP16 else np.float32)


def bf16_to_fp32(values: Tensor, precision: str) -> Tensor:
    """Return the output of `cast` in double precision."""
    if precision == BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class _Graph(Graph):
    """A graph whose weights have a given precision; they are drawn in single precision, which is faster."""

    def __init__(self, seed: int, precision: str) -> None:
        super().__init__(seed)
        self._precision = precision

    def weight(self, *shape: int, fan_in: int, scale: float = 2.0) -> str:
        values = self._rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(scale / fan_in))
        return self.kept(values)

    def kept(self, values: Tensor) -> str:
        from onnx import TensorProto, helper, numpy_helper

        name = f"w{len(self._weights)}"
        rounded = cast(values, self._precision)
        if self._precision == BF16:
            tensor = helper.make_tensor(name, TensorProto.BFLOAT16, rounded.shape, rounded.tobytes(), raw=True)
        else:
            tensor = numpy_helper.from_array(rounded, name)
        self._weights.append(tensor)
        return name

    def scalar(self, value: int) -> str:
        from onnx import numpy_helper

        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.array(value, np.int64), name))
        return name

    def linear(self, x: str, width_in: int, width_out: int) -> str:
        """Multiply along the last axis; the weights preserve the variance."""
        weight, bias = (
            self.weight(width_in, width_out, fan_in=width_in, scale=1.0),
            self.weight(width_out, fan_in=width_in, scale=0.01),
        )
        return self.node("Add", self.node("MatMul", x, weight), bias)

    def normed(self, x: str, width: int) -> str:
        one, zero = self.kept(np.ones(width, np.float32)), self.kept(np.zeros(width, np.float32))
        return self.node("LayerNormalization", x, one, zero, axis=-1, epsilon=1e-5)

    def written(self, variant: Variant, result: str, width_out: int) -> Any:
        """Make the model, with inputs as the Variant draws them. `width_out`: the width of its output."""
        from onnx import TensorProto, helper

        real = {FP32: TensorProto.FLOAT, FP16: TensorProto.FLOAT16, BF16: TensorProto.BFLOAT16}[variant.precision]
        self._nodes.append(helper.make_node("Identity", [result], ["output"]))
        inputs = [
            helper.make_tensor_value_info(
                name, TensorProto.INT64 if each.dtype == np.int64 else real, ["N", *each.shape[1:]]
            )
            for name, each in variant.inputs(1).items()
        ]
        outputs = [helper.make_tensor_value_info("output", real, ["N", width_out])]
        graph = helper.make_graph(self._nodes, variant.name, inputs, outputs, self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)


def _cnn(variant: Variant) -> Any:
    """Build a ResNet-50: bottlenecks of 1x1, 3x3 (with the stride) and 1x1, with batch norms folded in."""
    graph, size = _Graph(11, variant.precision), variant.size
    x = graph.node("Relu", graph.conv("input", 3, size.width, 7, stride=2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width_in = size.width
    for stage, blocks in enumerate(size.blocks):
        inner = size.width << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = graph.node("Relu", graph.conv(x, width_in, inner, 1))
            y = graph.node("Relu", graph.conv(y, inner, inner, 3, stride))
            y = graph.node("Mul", graph.conv(y, inner, 4 * inner, 1), graph.kept(np.full(1, 0.5, np.float32)))
            shortcut = x if width_in == 4 * inner else graph.conv(x, width_in, 4 * inner, 1, stride)
            x = graph.node("Relu", graph.node("Add", y, shortcut))
            width_in = 4 * inner
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    return graph.written(variant, graph.dense(x, width_in, size.classes), size.classes)


def _encoder(variant: Variant) -> Any:
    """Build BERT-base: embeddings, layers of attention and GELU; the output is the pooled vector of the first token."""
    graph, size = _Graph(12, variant.precision), variant.size
    ids = graph.node("Gather", graph.weight(size.words, size.hidden, fan_in=1), "ids", axis=0)
    placed = graph.node("Add", ids, graph.weight(1, size.length, size.hidden, fan_in=1))
    x = graph.normed(placed, size.hidden)
    real = {FP32: 1, FP16: 10, BF16: 16}[variant.precision]
    visible = graph.node("Unsqueeze", graph.node("Cast", "mask", to=real), graph.whole(1, 2))
    hides = graph.node(
        "Mul", graph.node("Sub", graph.kept(np.ones(1, np.float32)), visible), graph.kept(np.full(1, _FAR))
    )
    for _ in range(size.layers):
        x = graph.normed(graph.node("Add", x, _attention(graph, x, hides, size)), size.hidden)
        widened = graph.node("Gelu", graph.linear(x, size.hidden, 4 * size.hidden))
        x = graph.normed(graph.node("Add", x, graph.linear(widened, 4 * size.hidden, size.hidden)), size.hidden)
    first_token = graph.node("Gather", x, graph.scalar(0), axis=1)
    return graph.written(variant, graph.node("Tanh", graph.linear(first_token, size.hidden, size.hidden)), size.hidden)


def _attention(graph: _Graph, x: str, hides: str, size: Size) -> str:
    width = size.hidden // size.heads
    split = graph.whole(0, 0, size.heads, width)

    def heads(order: list[int]) -> str:
        return graph.node(
            "Transpose", graph.node("Reshape", graph.linear(x, size.hidden, size.hidden), split), perm=order
        )

    query, key, value = heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), heads([0, 2, 1, 3])
    scale = graph.kept(np.full(1, width**-0.5, np.float32))
    scores = graph.node("Add", graph.node("Mul", graph.node("MatMul", query, key), scale), hides)
    attended = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), value)
    merged = graph.node("Reshape", graph.node("Transpose", attended, perm=[0, 2, 1, 3]), graph.whole(0, 0, size.hidden))
    return graph.linear(merged, size.hidden, size.hidden)


def _mlp(variant: Variant) -> Any:
    """Build the MLP 512-2048-2048-512."""
    graph, size = _Graph(13, variant.precision), variant.size
    x = graph.node("Relu", graph.linear("input", size.features, size.dense))
    x = graph.node("Relu", graph.linear(x, size.dense, size.dense))
    return graph.written(variant, graph.linear(x, size.dense, size.features), size.features)


BUILDERS: Mapping[str, Callable[[Variant], Any]] = MappingProxyType({"cnn": _cnn, "encoder": _encoder, "mlp": _mlp})


def model_file(folder: Path, variant: Variant) -> Path:
    """Return a Variant's file in a model repository, and write it if it is missing."""
    path = folder / variant.name / "1" / "model.onnx"
    if not path.exists():
        import onnx

        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        onnx.save(BUILDERS[variant.kind](variant), part)
        part.rename(path)
    return path


def requests_file(folder: Path, variant: Variant) -> Path | None:
    """Write the rows that the load generator sends if random numbers will not do; None if they will."""
    if variant.kind != "encoder":
        return None
    inputs = variant.inputs(_SENT_ROWS)
    path = folder / f"{variant.name}.json"
    steps = [{name: each[row].tolist() for name, each in inputs.items()} for row in range(_SENT_ROWS)]
    path.write_text(json.dumps({"data": steps}), "utf-8")
    return path
