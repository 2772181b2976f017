"""A graph whose first axis is fixed at one row, with that axis freed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from penstock.backends.backend import FREE_ROWS
from penstock.backends.errors import InferError
from penstock.backends.loading import load_onnx
from penstock.backends.onnx_rows import ROWS_AXIS, with_free_rows
from penstock.backends.signature import Signature

FREED = {FREE_ROWS: "1"}


def linear(*, rows: int | str = 1, weights_as_input: bool = False) -> onnx.ModelProto:
    """x [rows, 4] times a weight: y [rows, 3]."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.arange(12, dtype=np.float32))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 4])]
    if weights_as_input:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3]))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "linear", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 3])], [weight],
        value_info=[helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 3])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, doc_string="kept")


def test_the_first_axis_of_inputs_and_outputs_is_freed_and_all_else_is_kept() -> None:
    before = linear()
    changed, freed = with_free_rows(before.SerializeToString())
    after = onnx.ModelProto.FromString(changed)
    assert freed == {"x", "y"}
    for value, dims in ((after.graph.input[0], 4), (after.graph.output[0], 3)):
        first, second = value.type.tensor_type.shape.dim
        assert (first.dim_param, second.dim_value) == (ROWS_AXIS, dims)
        assert not first.HasField("dim_value")
    assert not after.graph.value_info
    for side in (before, after):
        del side.graph.input[:], side.graph.output[:], side.graph.value_info[:]
    assert after == before


def test_weights_listed_as_inputs_are_unchanged() -> None:
    changed, freed = with_free_rows(linear(weights_as_input=True).SerializeToString())
    shape = onnx.ModelProto.FromString(changed).graph.input[1].type.tensor_type.shape
    assert freed == {"x", "y"}
    assert [dim.dim_value for dim in shape.dim] == [4, 3]


@pytest.mark.parametrize(
    ("rows", "reason"), [(2, "'x' has no first axis of length 1"), ("N", "no tensor has a first axis fixed at 1")]
)
def test_a_model_without_a_first_axis_of_one_is_rejected(rows: int | str, reason: str) -> None:
    with pytest.raises(InferError, match=reason):
        with_free_rows(linear(rows=rows).SerializeToString())


def test_a_scalar_has_no_axis_to_free() -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], "sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    with pytest.raises(InferError, match="'y' has no first axis"):
        with_free_rows(helper.make_model(graph).SerializeToString())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_model_or_are_rejected(garbage: bytes) -> None:
    with contextlib.suppress(InferError):
        with_free_rows(garbage)


def test_a_model_with_freed_rows_runs_several_rows_and_keeps_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(linear(), path)
    backend = load_onnx(path, "cpu", FREED)
    assert backend.graph.input["x"].shape == (-1, 4)
    assert [(node.name, node.shape, node.type) for node in backend.node_inputs] == [("x", [1, 4], "tensor(float)")]
    assert [node.shape for node in backend.node_outputs] == [[1, 3]]
    binding = backend.bind(Signature(backend.graph.inputs, backend.graph.outputs, batched=True), 2)
    (buffer,) = binding.acquire_buffers(2, [(2, 4)])
    assert buffer is not None
    buffer[:] = [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert binding.run((0,))[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    backend.close()


def test_external_weights_are_found_when_rows_are_freed(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(linear(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    backend = load_onnx(path, "cpu", FREED)
    assert backend.graph.output["y"].shape == (-1, 3)
    backend.close()


def test_a_missing_file_is_an_error_when_rows_are_freed(tmp_path: Path) -> None:
    with pytest.raises(InferError, match="No such file"):
        load_onnx(tmp_path / "none.onnx", "cpu", FREED)
