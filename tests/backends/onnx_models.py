"""ONNX models for tests, made in code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.backends.signature import TensorSpec
from tests.backends.contract import MODELS, TABLE

Node = onnx.NodeProto


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Node:
    """Make a node; `domain` may be among the attributes."""
    return helper.make_node(operator, inputs, outputs, **attributes)


def value(name: str, code: int, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    """Describe a tensor; with None as its shape, the rank is free, too."""
    return helper.make_tensor_value_info(name, code, shape)


def save(
    path: Path,
    nodes: Sequence[Node],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Mapping[str, Array] | None = None,
) -> Path:
    """Write a model. IR 9 is what ONNX Runtime 1.20 still reads."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def contract_model(name: str, path: Path) -> Path:
    """Write the model that `contract.MODELS[name]` describes."""
    signature = MODELS[name]
    nodes, initializers = _CONTRACT[name]
    return save(path, nodes, _values(signature.inputs), _values(signature.outputs), initializers)


def _values(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
    axes = "NMKL"
    return [
        value(
            spec.name,
            DATATYPES[spec.datatype].onnx_code,
            [axes[axis] if dim < 0 else dim for axis, dim in enumerate(spec.shape)],
        )
        for spec in specs
    ]


def floats(values: Sequence[Any]) -> Array:
    """Make an array of FP32."""
    return np.array(values, np.float32)


def ints(values: Sequence[Any]) -> Array:
    """Make an array of INT64."""
    return np.array(values, np.int64)


_CONTRACT: dict[str, tuple[list[Node], dict[str, Array]]] = {
    "rows": (
        [node("Mul", ["x", "two"], ["doubled"]), node("ReduceSum", ["x", "one"], ["total"], keepdims=0)],
        {"two": floats([2]), "one": ints([1])},
    ),
    "free": ([node("Add", ["x", "one"], ["y"])], {"one": ints([1])}),
    "scalar": ([node("Mul", ["a", "b"], ["y"]), node("ReduceSum", ["y"], ["y_total"], keepdims=0)], {}),
    "strings": ([node("Identity", ["x"], ["y"])], {}),
    "optional": ([node("Add", ["x", "offset"], ["y"])], {"offset": floats([10, 10])}),
    "turns": (
        [
            node("ReduceMax", ["turns"], ["most"], keepdims=0),
            node(
                "Loop",
                ["most", "", "x"],
                ["y"],
                body=helper.make_graph(
                    [node("Identity", ["go"], ["on"]), node("Mul", ["before", "unchanged"], ["after"])],
                    "turn",
                    [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("before", 1, None)],
                    [value("on", TensorProto.BOOL, []), value("after", 1, None)],
                ),
            ),
        ],
        {"unchanged": floats([1])},
    ),
    "picky": ([node("Gather", ["table", "x"], ["y"])], {"table": TABLE}),
}

FLOAT = TensorProto.FLOAT
INT64 = TensorProto.INT64
STRING = TensorProto.STRING
BFLOAT16 = TensorProto.BFLOAT16
