"""A model that exhausts a device, for `faults.py`: input `x`, and `output` with one number per row.

`hungry` needs 16 KiB of device memory for each number of a row, and accepts rows of any length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

MODEL_NAME = "hungry"
_WIDTH = 4096


def write(folder: Path) -> None:
    """Write it into a model repository."""
    import onnx

    path = folder / MODEL_NAME / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(_build(), path)


def _build() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Unsqueeze", ["x", "last"], ["column"]),
        helper.make_node("MatMul", ["column", "weight"], ["wide"]),
        helper.make_node("ReduceMax", ["wide"], ["most"], axes=[1, 2], keepdims=0),
        helper.make_node("Unsqueeze", ["most", "one"], ["output"]),
    ]
    weights = [
        numpy_helper.from_array(np.linspace(0, 1, _WIDTH, dtype=np.float32).reshape(1, -1), "weight"),
        numpy_helper.from_array(np.array([2], np.int64), "last"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    input_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "L"])
    output_info = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 1])
    graph = helper.make_graph(nodes, MODEL_NAME, [input_info], [output_info], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
