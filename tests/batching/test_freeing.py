"""Rows are freed where running the model shows that it changes no answer, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.backends.backend import FREE_ROWS
from penstock.backends.loading import LOADERS, load_onnx
from penstock.batching.loading import freeing
from penstock.batching.loading.freeing import free_rows
from penstock.batching.loading.opening import close_model, open_model
from penstock.batching.spec import ModelSpec

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def model(path: Path, nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], **more: Any) -> Path:
    """Write a model of nodes; `inputs` and `outputs` are types and shapes by name, `more` constants."""
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in more.items()]
    takes, gives = (
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    )
    graph = helper.make_graph(list(nodes), "g", takes, gives, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def iris(path: Path, rows: object = 1) -> Path:
    """A linear classifier: label by argmax, probabilities by softmax."""
    weight = np.array([[-1, 0.5, 1], [2, -0.5, -1], [-3, 0.3, 2], [-1, -0.5, 2]], np.float32)
    nodes = [
        helper.make_node("MatMul", ["input", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["h"], ["label"], axis=1, keepdims=0),
    ]
    outputs = {"label": (INT64, [rows]), "probabilities": (FLOAT, [rows, 3])}
    return model(path, nodes, {"input": (FLOAT, [rows, 4])}, outputs, w=weight)


def is_freed(path: Path) -> bool:
    spec, backend = free_rows(ModelSpec("m", 1, path), load_onnx, "cpu", load_onnx(path, "cpu", {}))
    backend.close()
    return spec.options.get(FREE_ROWS) == "1"


class Closing:
    """A Backend that records its name when it is closed."""

    def __init__(self, backend: Any, name: str, closed: list[str]) -> None:
        self._backend, self._name, self._closed = backend, name, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        self._closed.append(self._name)
        self._backend.close()


@pytest.mark.parametrize(("axis", "closes"), [(1, "as it is"), (0, "freed")])
def test_of_two_loaded_backends_the_one_that_is_not_kept_is_closed(axis: int, closes: str, tmp_path: Path) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=axis)
    path = model(tmp_path / "m.onnx", [node], {"x": (FLOAT, [1, 4])}, {"y": (FLOAT, [1, 4])})
    closed: list[str] = []

    def load(path: Path, device: str, options: Mapping[str, str]) -> Any:
        return Closing(load_onnx(path, device, options), "freed" if options.get(FREE_ROWS) else "as it is", closed)

    _, backend = free_rows(ModelSpec("m", 1, path), load, "cpu", load(path, "cpu", {}))

    assert closed == [closes]
    backend.close()


def test_an_interrupted_comparison_closes_the_backend_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def broken(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(freeing, "sharing_obstacle", broken)
    path = iris(tmp_path / "m.onnx")

    with pytest.raises(KeyboardInterrupt):
        free_rows(
            ModelSpec("m", 1, path), lambda *arguments: Closing(load_onnx(*arguments), "freed", closed), "cpu",
            Closing(load_onnx(path, "cpu", {}), "as it is", closed),
        )  # fmt: skip

    assert closed == ["freed"]


def test_a_classifier_with_a_fixed_first_axis_of_one_is_batched(tmp_path: Path) -> None:
    path = iris(tmp_path / "m.onnx")
    opened = open_model(ModelSpec("m", 1, path, frees_rows=True), LOADERS, lambda *_: None)
    try:
        assert opened.signature.batched
        assert opened.signature.input["input"].shape == (-1, 4)
        assert opened.max_rows > 1
        assert [node.shape for node in opened.node_inputs] == [[1, 4]]
    finally:
        close_model(opened)


def test_rows_are_freed_only_if_the_spec_requests_it(tmp_path: Path) -> None:
    opened = open_model(ModelSpec("m", 1, iris(tmp_path / "m.onnx")), LOADERS, lambda *_: None)
    try:
        assert not opened.signature.batched
    finally:
        close_model(opened)


def test_a_model_that_already_has_rows_is_left_unchanged(tmp_path: Path) -> None:
    def load(path: Path, device: str, options: Mapping[str, str]) -> Any:
        raise AssertionError("it need not be loaded once more")

    path = iris(tmp_path / "m.onnx", rows="N")
    spec, backend = ModelSpec("m", 1, path), load_onnx(path, "cpu", {})

    assert free_rows(spec, load, "cpu", backend) == (spec, backend)
    backend.close()


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (helper.make_node("Softmax", ["x"], ["y"], axis=0), "a sum over rows"),
        (helper.make_node("CumSum", ["x", "zero"], ["y"]), "what came before"),
        (helper.make_node("Reshape", ["x", "shape"], ["y"]), "one row inside the graph"),
        (helper.make_node("LpNormalization", ["x"], ["y"], axis=0), "a norm over rows"),
    ],
)
def test_a_graph_whose_answers_depend_on_other_rows_stays_unbatched(node: Any, why: str, tmp_path: Path) -> None:
    tensors = {"x": (FLOAT, [1, 4])}, {"y": (FLOAT, [1, 4])}
    constants: dict[str, Any] = {"zero": np.int64(0), "shape": np.array([1, 4])}
    used = {name: value for name, value in constants.items() if name in node.input}
    assert not is_freed(model(tmp_path / "m.onnx", [node], *tensors, **used)), why


def test_a_model_with_string_inputs_stays_unbatched(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    path = model(tmp_path / "m.onnx", [node], {"x": (STRING, [1, 2])}, {"y": (STRING, [1, 2])})
    assert not is_freed(path)


def test_a_model_with_a_free_axis_besides_the_rows_is_batched(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    path = model(tmp_path / "m.onnx", [node], {"x": (FLOAT, [1, "n"])}, {"y": (FLOAT, [1, "n"])})
    assert is_freed(path)


def test_free_axes_besides_the_rows_are_tested_with_lengths_above_one(tmp_path: Path) -> None:
    """Transposing and reshaping back leaves rows of width 1 unchanged, and mixes all wider ones."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Transpose", ["x"], ["turned"]),
        helper.make_node("Reshape", ["turned", "shape"], ["y"]),
    ]
    for width, free in (("n", False), (1, True)):
        path = model(tmp_path / "m.onnx", nodes, {"x": (FLOAT, [1, width])}, {"y": (FLOAT, [1, width])})
        assert is_freed(path) is free


def test_indices_that_must_be_small_are_tested_with_small_values(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = model(tmp_path / "m.onnx", [node], {"x": (INT64, [1])}, {"y": (FLOAT, [1, 3])}, table=table)
    assert is_freed(path)


@pytest.mark.parametrize("axis", [1, 0])
def test_maps_returned_by_a_classifier_are_compared_by_their_entries(tmp_path: Path, axis: int) -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=axis),
        helper.make_node("ZipMap", ["p"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    value = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, None))
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(value))
    tensors = helper.make_tensor_value_info("x", FLOAT, [1, 3]), helper.make_tensor_value_info("y", FLOAT, [1, 3])
    graph = helper.make_graph(nodes, "g", [tensors[0]], [tensors[1], maps])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    assert is_freed(tmp_path / "m.onnx") is bool(axis)
