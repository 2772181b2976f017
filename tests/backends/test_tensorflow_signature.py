from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.datatypes import DATATYPES as OURS
from penstock.backends.errors import Code, InferError
from penstock.backends.tensorflow_signature import DATATYPES, choose_key, read_signature

KEYS = st.sets(st.sampled_from(["predict", "serving_default", "other", "__saved_model_init_op", "a"]))


def tensor(name: str, *dims: int, dtype: str = "DT_FLOAT") -> dict[str, Any]:
    """Make a TensorInfo as in JSON, where a size of 0 is left out."""
    return {
        "name": name,
        "dtype": dtype,
        "tensorShape": {"dim": [{"size": str(dim)} if dim else {} for dim in dims]} if dims else {},
    }


def one(inputs: dict[str, Any], outputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"k": {"inputs": inputs, "outputs": outputs, **more}}


def test_every_datatype_has_a_tensorflow_type() -> None:
    assert sorted(DATATYPES.values()) == sorted(OURS)


@given(KEYS)
def test_the_default_signature_is_serving_default_or_the_first(keys: set[str]) -> None:
    signatures: dict[str, Any] = {key: {} for key in keys}
    own = {key for key in keys if not key.startswith("__")}
    if not own:
        with pytest.raises(InferError):
            choose_key(signatures, "")
        return

    key = choose_key(signatures, "")

    assert key in own
    assert key == "serving_default" or ("serving_default" not in own and key == min(own))


@given(KEYS)
def test_cortex_selects_the_only_signature_or_predict(keys: set[str]) -> None:
    signatures: dict[str, Any] = {key: {} for key in keys}
    own = sorted(key for key in keys if not key.startswith("__"))
    if len(own) == 1 or "predict" in own:
        assert choose_key(signatures, "", cortex=True) == (own[0] if len(own) == 1 else "predict")
        return
    with pytest.raises(InferError) as caught:
        choose_key(signatures, "", cortex=True)
    assert all(repr(key) in caught.value.message for key in own)


@given(KEYS, st.sampled_from(["predict", "elsewhere"]), st.booleans())
def test_a_configured_signature_is_selected_or_rejected(keys: set[str], selected: str, cortex: bool) -> None:
    signatures: dict[str, Any] = {key: {} for key in keys}
    if selected in keys:
        assert choose_key(signatures, selected, cortex=cortex) == selected
        return
    with pytest.raises(InferError, match=f"no signature '{selected}': it has "):
        choose_key(signatures, selected, cortex=cortex)


def test_tensors_are_in_the_order_of_the_graph() -> None:
    inputs = {"a": tensor("second:0", 1), "b": tensor("first:0", 1)}
    outputs = {"y": tensor("call:1", 1), "z": tensor("call:0", 1), "x": tensor("call:10", 1), "w": tensor("call:1", 1)}

    serving = read_signature(one(inputs, outputs), "k", {"first": 0, "second": 1, "call": 2})

    assert [spec.name for spec in serving.graph.inputs] == ["b", "a"]
    assert [spec.name for spec in serving.graph.outputs] == ["z", "w", "y", "x"]
    assert serving.tensors["input", "b"] == "first:0"


def test_shapes_with_zeros_and_free_axes_are_read() -> None:
    unknown = {"name": "u:0", "dtype": "DT_STRING", "tensorShape": {"unknownRank": True}}
    serving = read_signature(one({"x": tensor("x:0", -1, 0, 3), "s": tensor("s:0"), "u": unknown}, {}), "k", {})

    assert {spec.name: spec.shape for spec in serving.graph.inputs} == {"x": (-1, 0, 3), "s": (), "u": ()}
    assert serving.unranked == {"u"}
    assert {node.name: node.shape for node in serving.inputs} == {"x": [None, 0, 3], "s": [], "u": []}


def test_an_input_with_a_default_is_optional() -> None:
    described = one({"x": tensor("x:0", 1), "o": tensor("o:0", 1)}, {}, defaults={"o": {"dtype": "DT_FLOAT"}})

    assert [spec.optional for spec in read_signature(described, "k", {}).graph.inputs] == [True, False]


def test_a_reference_type_is_read_as_its_base_type() -> None:
    serving = read_signature(one({}, {"y": tensor("y:0", 1, dtype="DT_FLOAT_REF")}), "k", {})

    assert serving.graph.outputs[0].datatype == "FP32"


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (tensor("x:0", 1, dtype="DT_RESOURCE"), "DT_RESOURCE"),
        (tensor("x:0", 1, dtype="DT_VARIANT"), "DT_VARIANT"),
        ({"cooSparse": {}, "dtype": "DT_FLOAT"}, "a sparse tensor"),
        ({"compositeTensor": {}}, "a composite tensor"),
        ({"compositeTensor": {"typeSpec": {"typeSpecClass": "RAGGED_TENSOR_SPEC"}}}, "a ragged tensor"),
        ({"compositeTensor": {"typeSpec": {"typeSpecClass": "SPARSE_TENSOR_SPEC"}}}, "a sparse tensor"),
    ],
)
def test_an_unsupported_tensor_is_rejected_as_input_and_left_out_as_output(
    described: dict[str, Any], words: str
) -> None:
    with pytest.raises(InferError, match=f"input 'x' is {words}, which") as caught:
        read_signature(one({"x": described}, {"y": tensor("y:0", 1)}), "k", {})
    assert caught.value.code is Code.UNSUPPORTED

    serving = read_signature(one({}, {"x": described, "y": tensor("y:0", 1)}), "k", {})
    assert [spec.name for spec in serving.graph.outputs] == ["y"]

    with pytest.raises(InferError, match=f"output 'x' is {words}, which"):
        read_signature(one({}, {"x": described}), "k", {})


def test_a_ragged_only_output_is_rejected_with_advice() -> None:
    output = {"compositeTensor": {"typeSpec": {"typeSpecClass": "RAGGED_TENSOR_SPEC"}}}

    with pytest.raises(InferError, match=r"does not support; have the model return its \.to_tensor\(\)$"):
        read_signature(one({}, {"y": output}), "k", {})


def test_two_inputs_that_are_the_same_tensor_are_rejected() -> None:
    with pytest.raises(InferError, match="inputs 'a' and 'b' are the same tensor of the graph, 'x:0'"):
        read_signature(one({"a": tensor("x:0", 1), "b": tensor("x:0", 1)}, {"y": tensor("y:0", 1)}), "k", {})
