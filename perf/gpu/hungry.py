"""Models that bring a device into trouble, for `faults.py`; all take `x`, and give `output` with one number a row.

`hungry` needs 16 KiB of device memory for each of the numbers of a row, whose length is free. `cliff` reads from where
`x` says, which a CPU checks, and a device does not: far away is an illegal address, the error that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HUNGRY, CLIFF = "hungry", "cliff"
FAR = 1 << 40
_WIDTH, _CLIFF_LENGTH = 4096, 1024


def write(folder: Path) -> None:
    """Write both into a model repository."""
    import onnx

    for name, model in ((HUNGRY, _hungry()), (CLIFF, _cliff())):
        path = folder / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)


def _hungry() -> Any:
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
    return _model(HUNGRY, nodes, weights, (TensorProto.FLOAT, ["N", "L"]))


def _cliff() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("GatherND", ["ground", "x"], ["found"]),
        helper.make_node("Unsqueeze", ["found", "one"], ["output"]),
    ]
    weights = [
        numpy_helper.from_array(np.arange(_CLIFF_LENGTH, dtype=np.float32), "ground"),
        numpy_helper.from_array(np.array([1], np.int64), "one"),
    ]
    return _model(CLIFF, nodes, weights, (TensorProto.INT64, ["N", 1]))


def _model(name: str, nodes: Sequence[Any], weights: Sequence[Any], taken: tuple[int, list[str | int]]) -> Any:
    from onnx import TensorProto, helper

    given = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 1])
    graph = helper.make_graph(nodes, name, [helper.make_tensor_value_info("x", *taken)], [given], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
