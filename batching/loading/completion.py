"""Completion: reads from the model what the configuration omits, and checks the rest against the model.

The rules and texts are those of Triton's ONNX Runtime backend, and of its TensorFlow backend where they differ
(autofill.py), so that a configuration that loads there loads here.
Called by the Engine for every version it loads, and by `penstock check`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.shapes.bound import bound_signature
from penstock.batching.shapes.derived import derived_names, stored_names
from penstock.batching.shapes.padding_rules import check_padding
from penstock.batching.spec import ModelSpec

from . import autofill
from .tensor_checks import TENSORFLOW, check_declared, check_row_axis, has_row_axis, model_dims

UNSET_ROWS_REASON = "max_batch_size is unset or 0"
"""The reason when only the configuration keeps a model from having rows."""


def complete(spec: ModelSpec, graph: Signature) -> ModelSpec:
    """Complete `spec` from `graph`: its `signature`, `binding_signature`, and `policy.max_batch_rows`.

    For a TensorFlow model, declared tensors are completed too.
    Shapes: those of the signature are complete, with -1 for rows in front when batched. A scalar becomes `[1]`. Inputs
    that the graph does not require are left out unless the configuration names them. Derived inputs and kept outputs
    are in `binding_signature` only.
    Raises: InferError (INVALID) if configuration and model contradict each other.
    Source: AutoCompleteConfig, ValidateInputs and ValidateOutputs of Triton's onnxruntime_backend.
    """
    rows = _allowed_rows(spec, _max_batch_rows(spec, graph))
    batched = rows > 0
    if any(size > rows for size in spec.policy.preferred_rows):
        raise _invalid(spec.preferred_size_error)
    spec = replace(spec, policy=replace(spec.policy, max_batch_rows=rows))
    if spec.backend == TENSORFLOW:
        spec = autofill.complete_tensors(spec, graph, batched=batched)
    if spec.sequence is not None:
        from penstock.batching.sequences.controls import check_sequence

        check_sequence(spec, graph)
    signature = Signature(_inputs(spec, graph, batched), _outputs(spec, graph, batched), batched)
    bound = bound_signature(spec, signature, graph)
    if spec.padding:
        signature = check_padding(spec, signature)
    return replace(spec, signature=signature, binding_signature=bound)


def _max_batch_rows(spec: ModelSpec, graph: Signature) -> int:
    if spec.backend == TENSORFLOW:
        return autofill.max_batch_rows(spec, graph, _rowless_names(spec))
    configured = spec.policy.max_batch_rows
    if configured == 0 or (spec.inputs and spec.outputs):
        return configured or 0
    rowless = _find_rowless_tensor(spec, graph)
    if rowless is not None:
        if configured is None:
            return 0
        text = f"autofill failed for model '{spec.name}': model does not support batching while non-zero max_batch_size"
        text += f" is specified: '{rowless.name}' is {rowless.datatype} {format_shape(rowless.shape)}"
        raise _invalid(text + _rank_note(rowless))
    if configured is not None:
        return configured
    if all(tensor.optional for tensor in graph.inputs):
        return 0  # no input that clients must send determines the number of rows
    return 0 if _declares_row_axis(spec, graph) else spec.policy.default_max_batch_rows


def unbatched_reason(spec: ModelSpec, graph: Signature) -> str:
    """Say why `complete` gives a model no rows: one of its tensors, its configuration, or the default; else ""."""
    rowless = _find_rowless_tensor(spec, graph)
    if rowless is not None:
        text = "the model has no batch axis"
        if spec.frees_rows and any(tensor.shape[:1] == (1,) for tensor in graph.inputs):
            return f"{text}, unless a trial run shows that its first axis of 1 is one"
        shape = list(rowless.shape) if rowless.is_tensor else rowless.datatype
        return f"{text}: '{rowless.name}' is {shape}{_rank_note(rowless)}"
    policy = spec.policy
    if policy.max_batch_rows == 0:
        return "max_batch_size is 0"
    if not spec.auto_complete if spec.backend == TENSORFLOW else spec.inputs and spec.outputs:
        return UNSET_ROWS_REASON
    with_default = replace(spec, policy=replace(policy, default_max_batch_rows=1))
    if _max_batch_rows(with_default, graph):
        return "default-max-batch-size is 0"
    return "the declared dims include every axis" if _declares_row_axis(spec, graph) else ""


def _find_rowless_tensor(spec: ModelSpec, graph: Signature) -> TensorSpec | None:
    """Find a tensor that cannot have rows."""
    rowless_names = _rowless_names(spec)
    tensors = (tensor for tensor in (*graph.inputs, *graph.outputs) if tensor.name not in rowless_names)
    return next((tensor for tensor in tensors if not has_row_axis(tensor)), None)


def _rank_note(tensor: TensorSpec) -> str:
    """Say what it means that a tensor has no axes: a runtime reports an unknown rank that way too."""
    return ", a scalar or of unknown rank" if tensor.is_tensor and not tensor.shape else ""


def _rowless_names(spec: ModelSpec) -> set[str]:
    """Return the names of the tensors whose first axis is unrelated to rows."""
    names = {configured.name for configured in (*spec.batch_inputs, *spec.batch_outputs)}
    return names | {configured.name for configured in spec.inputs if configured.ragged or configured.is_shape}


def _allowed_rows(spec: ModelSpec, rows: int) -> int:
    """Return the most rows of a batch: the largest allowed size, if only some sizes are allowed."""
    allowed = spec.policy.allowed_rows
    if not allowed:
        return rows
    name = f"model '{spec.name}', batching.allowed_sizes"
    if not rows:
        raise _invalid(f"{name}: the model has no batch axis")
    if allowed[0] < 1 or any(after <= before for before, after in pairwise(allowed)):
        raise _invalid(f"{name}: {format_shape(allowed)} must be positive and ascending")
    configured = spec.policy.max_batch_rows
    if configured is not None and allowed[-1] > configured:
        raise _invalid(f"{name}: {allowed[-1]} exceeds the max batch size of {configured}")
    return allowed[-1]


def _declares_row_axis(spec: ModelSpec, graph: Signature) -> bool:
    """Whether a configuration without max_batch_size has the row axis in its dims."""
    pairs = [(configured, graph.input.get(configured.name)) for configured in spec.inputs]
    pairs += [(configured, graph.output.get(configured.name)) for configured in spec.outputs]
    rowless_names = _rowless_names(spec)
    return any(
        tensor is not None and len(model_dims(configured)) == len(tensor.shape)
        for configured, tensor in pairs
        if configured.name not in rowless_names
    )


def _inputs(spec: ModelSpec, graph: Signature, batched: bool) -> tuple[TensorSpec, ...]:
    derived = derived_names(spec)
    required = [tensor for tensor in graph.inputs if not tensor.optional]
    optional = next((configured for configured in spec.inputs if configured.optional), None)
    if optional is not None and batched:
        text = f"unable to load model '{spec.name}', optional input '{optional.name}' is not supported for models"
        raise _invalid(f"{text} that support batching")
    if not spec.inputs and spec.auto_complete:
        return tuple(_undeclared_tensor(spec, tensor, batched) for tensor in required if tensor.name not in derived)
    expected = sum(not configured.optional for configured in spec.inputs) + len(derived)
    if expected != len(required):
        names = ", ".join(f"'{tensor.name}'" for tensor in required)
        text = f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides"
        raise _invalid(f"{text} {len(required)}: {names}")
    for configured in spec.inputs:
        if configured.name not in graph.input:
            allowed = ", ".join(sorted(graph.input))
            raise _invalid(f"unexpected inference input '{configured.name}', allowed inputs are: {allowed}")
    declared = {configured.name: configured for configured in spec.inputs if configured.name not in derived}
    return tuple(
        check_declared(spec, declared[tensor.name], tensor, batched, "input")
        for tensor in graph.inputs
        if tensor.name in declared
    )


def _outputs(spec: ModelSpec, graph: Signature, batched: bool) -> tuple[TensorSpec, ...]:
    declared = {configured.name: configured for configured in spec.outputs}
    for name in declared:
        if name not in graph.output:
            allowed = ", ".join(sorted(graph.output))
            raise _invalid(f"unexpected inference output '{name}', allowed outputs are: {allowed}")
    if not declared and not spec.auto_complete:
        names = ", ".join(f"'{tensor.name}'" for tensor in graph.outputs)
        text = f"unable to load model '{spec.name}', configuration expects 0 outputs, model provides"
        raise _invalid(f"{text} {len(graph.outputs)}: {names}")
    outputs: list[TensorSpec] = []
    stored = stored_names(spec)
    for tensor in graph.outputs:
        if tensor.name in declared:
            outputs.append(check_declared(spec, declared[tensor.name], tensor, batched, "output"))
        elif tensor.name not in stored and (not declared or not tensor.is_tensor):
            outputs.append(_undeclared_tensor(spec, tensor, batched))
    return tuple(outputs)


def _undeclared_tensor(spec: ModelSpec, tensor: TensorSpec, batched: bool) -> TensorSpec:
    """Return a tensor that the configuration does not mention."""
    if batched:
        check_row_axis(spec, tensor)
    return replace(tensor, shape=(1,)) if tensor.is_tensor and not tensor.shape else tensor


def _invalid(message: str) -> InferError:
    return InferError(Code.INVALID, message)
