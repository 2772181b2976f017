"""Free rows: frees the first axis of a SavedModel whose signature fixes it to 1 in every tensor.

Used by tensorflow.py for the option FREE_ROWS. The caller must find out whether the answers stay the same: a graph may
have the 1 in its operations as well (batching/loading/freeing.py). It needs no TensorFlow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .errors import Code, InferError
from .signature import Signature, TensorSpec

_SHAPES_ATTRIBUTE = "_output_shapes"


def with_free_rows(graph: Signature) -> tuple[Signature, frozenset[str]]:
    """Free the first axis of every input and output that has it fixed to 1.

    Returns: the Signature, and the names of those inputs.
    Raises: InferError (INVALID) if that is impossible: an axis is missing or fixed to more, or none is fixed.
    """
    tensors = (*graph.inputs, *graph.outputs)
    for spec in tensors:
        if not spec.shape or spec.shape[0] not in {1, -1}:
            raise InferError(Code.INVALID, f"'{spec.name}' has no first axis of length 1")
    if all(spec.shape[0] == -1 for spec in tensors):
        raise InferError(Code.INVALID, "no tensor has a first axis fixed at 1")
    fixed = frozenset(spec.name for spec in graph.inputs if spec.shape[0] == 1)
    inputs, outputs = (tuple(map(_free_first_axis, specs)) for specs in (graph.inputs, graph.outputs))
    return Signature(inputs, outputs, graph.batched), fixed


def _free_first_axis(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=(-1, *spec.shape[1:]))


def free_placeholders(graph_def: Any, names: frozenset[str]) -> None:
    """Free the first axis of the named placeholders in a GraphDef, which is modified.

    The shapes stored in the graph are dropped everywhere: TensorFlow infers them anew, and would otherwise optimize by
    the old ones.
    """
    for node in graph_def.node:
        if node.name in names and node.attr["shape"].shape.dim:
            node.attr["shape"].shape.dim[0].size = -1
        node.attr.pop(_SHAPES_ATTRIBUTE, None)
    for function in graph_def.library.function:
        for node in function.node_def:
            node.attr.pop(_SHAPES_ATTRIBUTE, None)
        for argument in function.arg_attr.values():
            argument.attr.pop(_SHAPES_ATTRIBUTE, None)
