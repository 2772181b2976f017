"""The operators in a file, and inputs that some of them must never get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from penstock.backends.errors import Code, InferError
from penstock.backends.onnx import load
from penstock.backends.onnx_operators import never_empty, operators
from penstock.backends.protobuf_fields import fields
from tests.backends.contract import batched, infer
from tests.backends.onnx_models import FLOAT, INT64, node, save, value

HIDDEN, WIDTH = 2, 3


def recurrent(path: Path, operator: str) -> Path:
    """Write a model with the batch first, as frameworks do: x [N, T, 3] becomes y [N, 2]."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    weights: dict[str, Any] = {
        "w": np.ones((1, gates * HIDDEN, WIDTH), np.float32), "r": np.ones((1, gates * HIDDEN, HIDDEN), np.float32),
        "first": np.array([0], np.int64),
    }  # fmt: skip
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node(operator, ["t", "w", "r"], ["", "h"], hidden_size=HIDDEN),
        node("Squeeze", ["h", "first"], ["y"]),
    ]
    return save(path, nodes, [value("x", FLOAT, ["N", "T", WIDTH])], [value("y", FLOAT, ["N", HIDDEN])], weights)


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
@pytest.mark.parametrize("shape", [(0, 2, WIDTH), (1, 0, WIDTH), (0, 0, WIDTH)])
def test_empty_inputs_are_rejected_for_operators_that_crash_on_them(
    tmp_path: Path, operator: str, shape: tuple[int, ...]
) -> None:
    # without a check, the whole server dies: "terminate called without an active exception"
    backend = load(recurrent(tmp_path / "model.onnx", operator), "cpu", {"intra_op_thread_count": "1"})
    binding = backend.bind(batched(backend.graph), 4)

    with pytest.raises(InferError, match=f"input 'x' has no elements: got .*operator {operator}") as caught:
        infer(binding, [np.zeros(shape, np.float32)])

    assert caught.value.code is Code.INVALID
    assert infer(binding, [np.zeros((2, 2, WIDTH), np.float32)])[0].shape == (2, HIDDEN)


@pytest.mark.parametrize(
    ("version", "guarded"), [("1.24.1", True), ("1.30.0", True), ("1.31.0", False), ("1.32.0", False), ("2.0", False)]
)
def test_empty_inputs_are_rejected_for_topk_in_older_versions_of_onnx_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, guarded: bool
) -> None:
    # with 1.24 to 1.30 a TopK of no rows divides by zero: SIGFPE
    monkeypatch.setattr("penstock.backends.onnx.onnxruntime.__version__", version)
    path = save(
        tmp_path / "model.onnx", [node("TopK", ["x", "two"], ["y", "at"])], [value("x", FLOAT, ["N", 5])],
        [value("y", FLOAT, ["N", 2])], {"two": np.array([2])},
    )  # fmt: skip

    assert load(path, "cpu", {}).never_empty == ("TopK" if guarded else "")
    assert never_empty(version) >= {"LSTM", "GRU"}


def test_empty_inputs_are_accepted_for_other_operators(tmp_path: Path) -> None:
    backend = load(recurrent(tmp_path / "model.onnx", "RNN"), "cpu", {})
    binding = backend.bind(batched(backend.graph), 4)

    assert infer(binding, [np.zeros((0, 2, WIDTH), np.float32)])[0].shape == (0, HIDDEN)


def test_empty_inputs_are_rejected_for_gpu_models_whose_nodes_may_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.backends.onnx_cuda.load_on_gpu", lambda path, number, options: SimpleNamespace())

    assert load(recurrent(tmp_path / "model.onnx", "GRU"), "cuda:0", {}).never_empty == "GRU"


def test_operators_are_found_in_branches_and_functions(tmp_path: Path) -> None:
    inner = helper.make_graph([node("LSTM", ["a"], ["b"])], "inner", [], [value("b", FLOAT, [])])
    middle = helper.make_graph(
        [node("If", ["c"], ["b"], then_branch=inner, else_branch=inner)], "middle", [], [value("b", FLOAT, [])]
    )
    graph = helper.make_graph(
        [node("Add", ["x", "x"], ["s"]), node("Loop", ["n", "c"], ["y"], body=middle)],
        "outer", [value("x", FLOAT, [2]), value("n", INT64, [])], [value("y", FLOAT, [])],
        [helper.make_tensor("weights", TensorProto.FLOAT, [1000], np.ones(1000, np.float32))],
    )  # fmt: skip
    function = helper.make_function("own", "Twice", ["a"], ["b"], [node("Mul", ["a", "a"], ["b"])], [])
    model = helper.make_model(graph, functions=[function], opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    onnx.save(model, path)

    assert operators(path) == {"Add", "Loop", "If", "LSTM", "Mul"}


def test_the_values_of_a_tree_ensemble_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 500 trees of scikit-learn, with a field for each number, took 3 to 6 s in Python
    forest = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], nodes_values=[0.5] * 10_000)
    graph = helper.make_graph([forest], "forest", [value("x", FLOAT, [2])], [value("y", FLOAT, [1])])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    read = []

    def counted(message: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        for field in fields(message, at, end):
            read.append(field)
            yield field

    monkeypatch.setattr("penstock.backends.onnx_operators.fields", counted)

    assert operators(tmp_path / "model.onnx") == {"TreeEnsembleRegressor"}
    assert len(read) < 100


def test_a_model_that_scales_by_all_rows_has_a_shared_scale(tmp_path: Path) -> None:
    outputs = ["y", "scale", "zero"]
    path = save(
        tmp_path / "model.onnx", [node("DynamicQuantizeLinear", ["x"], outputs)], [value("x", FLOAT, ["N", 3])],
        [value("y", TensorProto.UINT8, ["N", 3])],
    )  # fmt: skip

    assert load(path, "cpu", {}).shared_scale == "DynamicQuantizeLinear"
    assert load(recurrent(tmp_path / "other.onnx", "RNN"), "cpu", {}).shared_scale == ""


def test_a_missing_file_has_no_operators(tmp_path: Path) -> None:
    assert operators(tmp_path / "none.onnx") == frozenset()


@given(garbage=st.binary(max_size=200))
def test_any_bytes_can_be_read_for_operators(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.onnx"
    path.write_bytes(garbage)

    assert all(isinstance(name, str) for name in operators(path))
