"""Conversions for the models of the specification's cases, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.node import Node
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.cortex.conversions import conversions
from penstock.server.cortex.onnx_values import TYPES
from penstock.server.hooks.conversions import Conversions, ModelDescription

NONE: Mapping[str, Any] = {}
_DATATYPES = {
    "float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "object": "BYTES",
} | {name: name.upper() for name in TYPES.values() if "int" in name}  # fmt: skip
Dims = list[int | str | None]


def settings(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "handler": "handler.py", "relaxed_shapes": False, "tracker": None} | more


def _node(name: str, kind: str, shape: Dims) -> tuple[Node, TensorSpec]:
    datatype = _DATATYPES.get(TYPES.get(kind, ""), kind)
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in shape)
    return Node(name, kind, shape), TensorSpec(name, datatype, dims or (1,))


def onnx(
    inputs: list[tuple[str, str, Dims]], outputs: list[tuple[str, str, Dims]] | None = None, **more: Any
) -> Conversions:
    """An ONNX model with a completed Signature; `batched` frees the first axis of all inputs and outputs."""
    batched = more.pop("batched", False)
    ins, outs = [_node(*each) for each in inputs], [_node(*each) for each in outputs or []]

    def specs(pairs: list[tuple[Node, TensorSpec]]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(spec.name, spec.datatype, (-1, *spec.shape[1:])) if batched else spec for _, spec in pairs
        )

    signature = Signature(specs(ins), specs(outs), batched)
    nodes = [node for node, _ in ins], [node for node, _ in outs]
    return conversions(ModelDescription(signature, *nodes, {}, settings("onnx", **more)))


def model_m(rows: int | str | None = 1, **more: Any) -> Conversions:
    """M of the specification, or M-dyn, or M-sym."""
    outputs: list[tuple[str, str, Dims]] = [
        ("label", "tensor(int64)", [rows]),
        ("probabilities", "tensor(float)", [rows, 3]),
    ]
    return onnx([("input", "tensor(float)", [rows, 4])], outputs, **more)


def flowers(batched: bool = True, **more: Any) -> Conversions:
    """The TensorFlow model of C25, which takes scalars."""
    names = ("sepal_length", "sepal_width", "petal_length", "petal_width")
    inputs = {name: ("DT_DOUBLE", [-1]) for name in names}
    outputs = {
        "class_ids": ("DT_INT64", [-1, 1]),
        "classes": ("DT_STRING", [-1, 1]),
        "probabilities": ("DT_FLOAT", [-1, 3]),
        "logits": ("DT_FLOAT", [-1, 3]),
        "isbig": ("DT_BOOL", [-1]),
    }
    return tensorflow(inputs, outputs, batched, **more)


_TF = {"DT_DOUBLE": "FP64", "DT_FLOAT": "FP32", "DT_HALF": "FP16", "DT_BFLOAT16": "BF16", "DT_STRING": "BYTES"}


def tensorflow(
    inputs: dict[str, tuple[str, list[int]]],
    outputs: dict[str, tuple[str, list[int]]] | None = None,
    batched: bool = True,
    **more: Any,
) -> Conversions:
    def tensor_infos(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
        return {
            name: {"name": f"{name}:0", "dtype": kind, "tensorShape": {"dim": [{"size": str(dim)} for dim in dims]}}
            for name, (kind, dims) in tensors.items()
        }

    def specs(tensors: dict[str, tuple[str, list[int]]]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, _TF.get(kind, kind.removeprefix("DT_")), tuple(dims) or (1,))
            for name, (kind, dims) in tensors.items()
        )

    outputs = outputs or {}
    predict = {
        "inputs": tensor_infos(inputs),
        "outputs": tensor_infos(outputs),
        "methodName": "tensorflow/serving/predict",
    }
    described = {"signature_def": {"predict": predict, "other": {}}, "signature_key": "predict"}
    signature = Signature(specs(inputs), specs(outputs), batched)
    return conversions(ModelDescription(signature, [], [], described, settings("tensorflow", **more)))


def refused(rules: Conversions, value: Any) -> str:
    """Give the client's error for a value, without the leading `prediction failed: `."""
    with pytest.raises(InferError) as error:
        rules.to_inputs(value, NONE)
    assert error.value.code is Code.INVALID
    return error.value.message
