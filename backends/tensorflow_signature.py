"""Which of a SavedModel's signatures is served, and what it takes and returns, read from their protobuf JSON.

Used by tensorflow.py. It needs no TensorFlow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Code, InferError
from .node import Node
from .signature import Signature, TensorSpec

DEFAULT_KEY = "serving_default"
CORTEX_KEY = "predict"
DATATYPES: Mapping[str, str] = {
    "DT_BOOL": "BOOL",
    "DT_UINT8": "UINT8",
    "DT_UINT16": "UINT16",
    "DT_UINT32": "UINT32",
    "DT_UINT64": "UINT64",
    "DT_INT8": "INT8",
    "DT_INT16": "INT16",
    "DT_INT32": "INT32",
    "DT_INT64": "INT64",
    "DT_HALF": "FP16",
    "DT_FLOAT": "FP32",
    "DT_DOUBLE": "FP64",
    "DT_BFLOAT16": "BF16",
    "DT_STRING": "BYTES",
}
"""TensorFlow's type names to Penstock's. Other types (complex numbers, resources, variants, quantized types) are not
supported."""

_RAGGED, _SPARSE = "a ragged tensor", "a sparse tensor"
_REMEDIES = {
    _RAGGED: "; have the model return its .to_tensor()",
    _SPARSE: "; have the model return tf.sparse.to_dense of it",
}
_COMPOSITES = {"RAGGED_TENSOR_SPEC": _RAGGED, "SPARSE_TENSOR_SPEC": _SPARSE}
_INTERNAL_PREFIX = "__saved_model_"
"""The prefix of the keys of TensorFlow's internal operations, for initialization and training."""

_Description = Mapping[str, Any]
logger = logging.getLogger("penstock.backends")


@dataclass(frozen=True, slots=True)
class ServedSignature:
    """One signature of a SavedModel, as it is served.

    `tensors` maps the names of all inputs and outputs to those in TensorFlow's graph. `unranked` has the names of those
    whose number of axes the model leaves open; in `graph` their shape is ().
    """

    key: str
    graph: Signature
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    tensors: Mapping[tuple[str, str], str]
    unranked: frozenset[str]


def choose_key(signatures: _Description, configured: str, *, cortex: bool = False) -> str:
    """Choose the signature to serve. `configured` is the configured key, "" if unset.

    Without one it is `serving_default`, else the first by name; TensorFlow's internal ones are skipped. `cortex`: the
    only one, else `predict`.
    Raises: InferError (INVALID), naming the existing keys.
    Source: Triton's tensorflow_backend, which uses any signature if the one it wants is missing, even a configured one;
    here that is an error. Cortex: F23.
    """
    keys = sorted(key for key in signatures if not key.startswith(_INTERNAL_PREFIX))
    existing = f"it has {', '.join(repr(key) for key in keys)}" if keys else "it has none"
    if configured:
        if configured not in signatures:
            raise InferError(Code.INVALID, f"the model has no signature '{configured}': {existing}")
        return configured
    if not keys:
        raise InferError(Code.INVALID, "the model has no signature, which defines its inputs and outputs")
    if not cortex:
        return DEFAULT_KEY if DEFAULT_KEY in keys else keys[0]
    if len(keys) > 1 and CORTEX_KEY not in keys:
        raise InferError(Code.INVALID, f"the model has several signatures, so one must be selected: {existing}")
    return keys[0] if len(keys) == 1 else CORTEX_KEY


def read_signature(signatures: _Description, key: str, order: Mapping[str, int]) -> ServedSignature:
    """Read one signature. `order` gives the position of each of the graph's nodes in the model's file.

    A protobuf map has no order. Inputs and outputs are in the order of the graph, which for TensorFlow 1 is that of
    their creation and for TensorFlow 2 that of their names. An input is optional if the signature has a default for it.
    An output of an unsupported type is left out and logged.
    Raises: InferError (UNSUPPORTED: an input, or every output, is of an unsupported type).
    """
    signature = signatures[key]
    defaults = signature.get("defaults", {})
    inputs: list[TensorSpec] = []
    names_by_tensor: dict[str, str] = {}
    for name, tensor in _in_graph_order(signature.get("inputs", {}), order):
        obstacle = _unsupported_kind(tensor)
        if obstacle:
            raise InferError(Code.UNSUPPORTED, f"input '{name}' is {obstacle}, which Penstock does not support")
        other = names_by_tensor.setdefault(tensor["name"], name)
        if other != name:
            text = f"inputs '{other}' and '{name}' are the same tensor of the graph, '{tensor['name']}'"
            raise InferError(Code.UNSUPPORTED, text)
        inputs.append(_spec(name, tensor, optional=name in defaults))
    outputs: list[TensorSpec] = []
    named_outputs = _in_graph_order(signature.get("outputs", {}), order)
    obstacles = [(name, _unsupported_kind(tensor)) for name, tensor in named_outputs]
    for (name, tensor), (_, obstacle) in zip(named_outputs, obstacles, strict=True):
        if not obstacle:
            outputs.append(_spec(name, tensor))
            continue
        text = f"output '{name}' is {obstacle}, which Penstock does not support{_REMEDIES.get(obstacle, '')}"
        if all(obstacle_ for _, obstacle_ in obstacles):
            raise InferError(Code.UNSUPPORTED, text)
        logger.warning("signature '%s': %s; the output is ignored", key, text)
    graph = Signature(tuple(inputs), tuple(outputs))
    tensors = {("input", spec.name): signature["inputs"][spec.name] for spec in graph.inputs}
    tensors |= {("output", spec.name): signature["outputs"][spec.name] for spec in graph.outputs}
    return ServedSignature(
        key,
        graph,
        tuple(_node(spec.name, signature["inputs"][spec.name]) for spec in graph.inputs),
        tuple(_node(spec.name, signature["outputs"][spec.name]) for spec in graph.outputs),
        {key_in_graph: tensor["name"] for key_in_graph, tensor in tensors.items()},
        frozenset(name for (_, name), tensor in tensors.items() if _shape(tensor) is None),
    )


def _in_graph_order(tensors: _Description, order: Mapping[str, int]) -> list[tuple[str, _Description]]:
    """Sort by position in the graph, then by output number of the operation, then by name."""

    def graph_position(item: tuple[str, _Description]) -> tuple[int, int, str]:
        node, _, output = str(item[1].get("name", "")).partition(":")
        return order.get(node, len(order)), int(output) if output.isdecimal() else 0, item[0]

    return sorted(tensors.items(), key=graph_position)


def _unsupported_kind(tensor: _Description) -> str:
    """Return what kind of unsupported tensor this is; "" if it is supported."""
    if "cooSparse" in tensor:
        return _SPARSE
    if "name" not in tensor:
        spec = tensor.get("compositeTensor", {}).get("typeSpec", {})
        return _COMPOSITES.get(spec.get("typeSpecClass", ""), "a composite tensor")
    kind = str(tensor.get("dtype", "DT_INVALID"))
    return "" if _base_type(kind) in DATATYPES else kind


def _base_type(kind: str) -> str:
    """Return the type that a TensorFlow 1 reference type refers to."""
    return kind.removesuffix("_REF")


def _spec(name: str, tensor: _Description, *, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, DATATYPES[_base_type(tensor["dtype"])], _shape(tensor) or (), optional)


def _shape(tensor: _Description) -> tuple[int, ...] | None:
    """Return the whole shape, None if the number of axes is open. JSON omits zeros."""
    shape = tensor.get("tensorShape", {})
    if shape.get("unknownRank"):
        return None
    return tuple(max(int(dim.get("size", 0)), -1) for dim in shape.get("dim", ()))


def _node(name: str, tensor: _Description) -> Node:
    shape = _shape(tensor)
    return Node(name, str(tensor["dtype"]), [None if dim < 0 else dim for dim in shape or ()])
