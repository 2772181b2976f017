"""The model repository that the client tests serve: NVIDIA's example models, one identity per datatype, odd shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from tests.backends.onnx_models import FLOAT, INT64, STRING, Node, floats, ints, node, save, value

INT32 = TensorProto.INT32
Axes = Sequence[int | str]
Tensors = Mapping[str, tuple[int, Axes]]

SIMPLE_CONFIG = """
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
]
"""
VERSIONS_CONFIG = "version_policy: { all {} }"
SUM_AND_DIFFERENCE = [node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]), node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"])]
HEAVY_WIDTH = 256


def write(
    root: Path, name: str, nodes: Sequence[Node], tensors: tuple[Tensors, Tensors],
    initializers: Mapping[str, Array] | None = None, *, version: int = 1, config: str = "",
) -> None:  # fmt: skip
    """Write one version of a model; `tensors` are its inputs and its outputs."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    inputs, outputs = ([value(each, *described) for each, described in side.items()] for side in tensors)
    save(folder / "model.onnx", nodes, inputs, outputs, initializers)
    if config:
        (root / name / "config.pbtxt").write_text(config)


def write_examples(root: Path) -> Path:
    """Write NVIDIA's `simple`, `simple_string` and `simple_identity`; `simple_auto` is `simple` unconfigured."""
    for name, config in (("simple", SIMPLE_CONFIG), ("simple_auto", "")):
        write(root, name, SUM_AND_DIFFERENCE, _pair(INT32), config=config)
    casts = [node("Cast", [f"INPUT{i}"], [f"in{i}"], to=INT32) for i in (0, 1)]
    work = [node("Add", ["in0", "in1"], ["out0"]), node("Sub", ["in0", "in1"], ["out1"])]
    texts = [node("Cast", [f"out{i}"], [f"OUTPUT{i}"], to=STRING) for i in (0, 1)]
    write(root, "simple_string", [*casts, *work, *texts], _pair(STRING))
    write(root, "simple_identity", [node("Identity", ["INPUT0"], ["OUTPUT0"])],
          ({"INPUT0": (STRING, ["N", 16])}, {"OUTPUT0": (STRING, ["N", 16])}))  # fmt: skip
    return root


def _pair(code: int) -> tuple[Tensors, Tensors]:
    return {f"INPUT{i}": (code, ["N", 16]) for i in (0, 1)}, {f"OUTPUT{i}": (code, ["N", 16]) for i in (0, 1)}


def write_identities(root: Path) -> Path:
    """Write `identity_<datatype>` [N,M] for every datatype."""
    for datatype in DATATYPES:
        write_identity(root, f"identity_{datatype}", "", datatype)
    return root


def write_identity(root: Path, name: str, config: str, datatype: str = "FP32") -> None:
    """Write a model [N,M] that returns `x` as `y`."""
    described = (DATATYPES[datatype].onnx_code, ["N", "M"])
    write(root, name, [node("Identity", ["x"], ["y"])], ({"x": described}, {"y": described}), config=config)


def write_shapes(root: Path) -> Path:
    """Write models without a batch axis, with a fixed one, with three free axes, and with mixed tensors."""
    for name, axes in (("whole", [2, 3]), ("scalar", []), ("fixed", [4, 2]), ("free", ["N", "T", "D"])):
        write(root, name, [node("Neg", ["x"], ["y"])], ({"x": (FLOAT, axes)}, {"y": (FLOAT, axes)}))
    write(
        root, "mixed",
        [
            node("Mul", ["a", "two"], ["twice"]), node("Identity", ["words"], ["same"]),
            node("ReduceSum", ["n", "one"], ["total"], keepdims=0),
        ],
        (
            {"a": (FLOAT, ["N", 3]), "words": (STRING, ["N", "W"]), "n": (INT64, ["N", 2])},
            {"twice": (FLOAT, ["N", 3]), "same": (STRING, ["N", "W"]), "total": (INT64, ["N"])},
        ),
        {"two": floats([2]), "one": ints([1])},
    )  # fmt: skip
    write(root, "quotient", [node("Div", ["a", "b"], ["y"])],
          ({"a": (FLOAT, ["N", "M"]), "b": (FLOAT, ["N", "M"])}, {"y": (FLOAT, ["N", "M"])}))  # fmt: skip
    write(root, "versions", [node("Identity", ["x"], ["y"])], _rows(1), config=VERSIONS_CONFIG)
    for version in (2, 10):
        add = [node("Add", ["x", "more"], ["y"])]
        write(root, "versions", add, _rows(1), {"more": floats([version])}, version=version)
    return root


def write_heavy(root: Path) -> Path:
    """Write `heavy`: slow enough for requests to queue up, and run on a thread to keep the event loop free."""
    layers = 24
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    weights = {f"w{i}": np.eye(HEAVY_WIDTH, dtype=np.float32) for i in range(layers)}
    nodes = [node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    write(root, "heavy", nodes, _rows(HEAVY_WIDTH), weights)
    (root / "heavy" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    return root


def _rows(width: int) -> tuple[Tensors, Tensors]:
    return {"x": (FLOAT, ["N", width])}, {"y": (FLOAT, ["N", width])}
