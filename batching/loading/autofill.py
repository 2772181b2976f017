"""Autofill: what Triton's TensorFlow backend completes in a configuration and its ONNX backend does not.

There, a configuration that declares its tensors but not `max_batch_size` means batching if its dims omit the rows, and
declarations may be partial. Used by completion.py. The rules and texts are those of AutoCompleteHelper in
tensorflow_backend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.shapes.derived import derived_names
from penstock.batching.spec import ModelSpec

from .tensor_checks import has_row_axis, model_dims


def max_batch_rows(spec: ModelSpec, graph: Signature, rowless_names: Collection[str]) -> int:
    """Return the configured value, or else infer it from the model and the declared dims.

    Tensors in `rowless_names` never have rows. The declared dims of a tensor of unknown rank are trusted, where Triton
    gives up.
    Raises: InferError (INVALID).
    """
    configured = spec.policy.max_batch_rows
    if configured == 0 or not spec.auto_complete:
        return configured or 0
    declared = {each.name for each in (*spec.inputs, *spec.outputs) if each.shape or each.reshape is not None}
    tensors = [each for each in (*graph.inputs, *graph.outputs) if each.name not in rowless_names]
    informative = [each for each in tensors if each.shape or each.name not in declared]
    if not all(has_row_axis(each) for each in informative):
        if not configured:
            return 0
        text = (
            f"unable to autofill for '{spec.name}', configuration specified max-batch {configured} but model signature"
        )
        raise InferError(Code.INVALID, f"{text} does not support batching")
    if configured:
        return configured
    if tensors and not informative:
        return 0  # neither the model nor the configuration shows rows
    if all(each.optional for each in graph.inputs):
        return 0  # no input that clients must send determines the number of rows
    return spec.policy.default_max_batch_rows if _omits_row_axis(spec, graph, rowless_names) else 0


def _omits_row_axis(spec: ModelSpec, graph: Signature, rowless_names: Collection[str]) -> bool:
    """Whether the declared dims have one axis less than the model; also True if nothing is declared."""
    pairs = [(each, graph.input.get(each.name)) for each in spec.inputs]
    pairs += [(each, graph.output.get(each.name)) for each in spec.outputs]
    hints = {
        len(tensor.shape) == len(model_dims(each)) + 1
        for each, tensor in pairs
        if tensor is not None and tensor.shape and model_dims(each) and each.name not in rowless_names
    }
    if len(hints) > 1:
        text = (
            f"unable to autofill for '{spec.name}', model tensor configurations are contradicting each other in terms"
        )
        raise InferError(Code.INVALID, f"{text} of whether batching is supported")
    return hints != {False}


def complete_tensors(spec: ModelSpec, graph: Signature, *, batched: bool) -> ModelSpec:
    """Complete the declared tensors, and declare the missing inputs if some are declared.

    Datatypes and dims come from the model. Configured values stay, for completion.py to check. Outputs that are not
    declared are left out, unless none is.
    Raises: InferError (INVALID).
    """
    inputs = spec.inputs
    if inputs and spec.auto_complete:
        known_names = {*(each.name for each in inputs), *derived_names(spec)}
        missing = [each.name for each in graph.inputs if not each.optional and each.name not in known_names]
        inputs += tuple(TensorSpec(name, "", ()) for name in missing)
    return replace(
        spec, inputs=_complete_side(spec, "input", inputs, graph.input, batched),
        outputs=_complete_side(spec, "output", spec.outputs, graph.output, batched),
    )  # fmt: skip


def _complete_side(
    spec: ModelSpec, kind: str, tensors: tuple[TensorSpec, ...], graph_tensors: Mapping[str, TensorSpec], batched: bool
) -> tuple[TensorSpec, ...]:
    batch_outputs = {each.name for each in spec.batch_outputs}
    results = []
    for configured in tensors:
        tensor = graph_tensors.get(configured.name)
        if not configured.datatype and not spec.auto_complete:
            text = f"model {kind} '{configured.name}' must specify 'data_type' for {spec.name}"
            raise InferError(Code.INVALID, text)
        if tensor is None or not spec.auto_complete:
            results.append(configured)
            continue
        completed = replace(configured, datatype=configured.datatype or tensor.datatype)
        if not (
            configured.shape
            or configured.reshape is not None
            or configured.ragged
            or configured.is_shape
            or configured.name in batch_outputs
        ):
            completed = replace(completed, shape=tensor.shape[1:] if batched else tensor.shape)
        results.append(completed)
    return tuple(results)
