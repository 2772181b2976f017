"""Completion: what a configuration leaves out is read from the model, and what it says is held against the model.

The rules and texts are those of Triton's ONNX Runtime backend, so that a configuration which loads there loads here.
Called by the Engine for every version it loads, and by `penstock check`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec

from .padding_rules import check_padding
from .spec import ModelSpec

ROW_WISE = "seq(map("
"""How the type of ZipMap's output begins: a list of one dictionary per row, which can be cut into rows like a tensor.
No other type that is not a tensor can."""


def complete(spec: ModelSpec, graph: Signature) -> ModelSpec:
    """Complete `spec` with what `graph` tells: its `signature`, and `policy.max_batch_rows`.

    Shapes: the signature's are whole, with -1 for rows in front when batched. A scalar becomes `[1]`. Inputs that
    the graph can do without are left out unless the configuration names them.
    Raises: InferError (INVALID) where configuration and model contradict each other.
    Source: AutoCompleteConfig, ValidateInputs and ValidateOutputs of Triton's onnxruntime_backend.
    """
    rows = _allowed_rows(spec, _max_batch_rows(spec, graph))
    batched = rows > 0
    if any(size > rows for size in spec.policy.preferred_rows):
        raise _invalid(f"dynamic batching preferred size must be <= max batch size for {spec.name}")
    signature = Signature(_inputs(spec, graph, batched), _outputs(spec, graph, batched), batched)
    if spec.padding:
        signature = check_padding(spec, signature)
    return replace(spec, policy=replace(spec.policy, max_batch_rows=rows), signature=signature)


def _max_batch_rows(spec: ModelSpec, graph: Signature) -> int:
    said = spec.policy.max_batch_rows
    if said == 0 or (spec.inputs and spec.outputs):
        return said or 0
    obstacle = next((tensor for tensor in (*graph.inputs, *graph.outputs) if not _has_row_axis(tensor)), None)
    if obstacle is not None:
        if said is None:
            return 0
        text = f"autofill failed for model '{spec.name}': model does not support batching while non-zero max_batch_size"
        raise _invalid(f"{text} is specified: '{obstacle.name}' is {obstacle.datatype} {_shape(obstacle.shape)}")
    if said is not None:
        return said
    if all(tensor.optional for tensor in graph.inputs):
        return 0  # nothing a caller sends could say how many rows it wants
    return 0 if _declares_row_axis(spec, graph) else spec.policy.default_max_batch_rows


def _allowed_rows(spec: ModelSpec, rows: int) -> int:
    """Give the most rows of a batch: the largest of the sizes that are allowed, where only some are."""
    allowed = spec.policy.allowed_rows
    if not allowed:
        return rows
    name = f"model '{spec.name}', batching.allowed_sizes"
    if not rows:
        raise _invalid(f"{name}: the model has no axis for rows")
    if allowed[0] < 1 or any(after <= before for before, after in pairwise(allowed)):
        raise _invalid(f"{name}: {_shape(allowed)} must ascend from 1 or more")
    said = spec.policy.max_batch_rows
    if said is not None and allowed[-1] > said:
        raise _invalid(f"{name}: {allowed[-1]} is more than the max batch size, {said}")
    return allowed[-1]


def _has_row_axis(tensor: TensorSpec) -> bool:
    if tensor.optional:
        return True
    if not tensor.is_tensor:
        return tensor.datatype.startswith(ROW_WISE)
    return bool(tensor.shape) and tensor.shape[0] == -1


def _declares_row_axis(spec: ModelSpec, graph: Signature) -> bool:
    """Tell whether a configuration that is silent on max_batch_size wrote the row axis into its dims."""
    pairs = [(said, graph.input.get(said.name)) for said in spec.inputs]
    pairs += [(said, graph.output.get(said.name)) for said in spec.outputs]
    return any(tensor is not None and len(said.shape) == len(tensor.shape) for said, tensor in pairs)


def _inputs(spec: ModelSpec, graph: Signature, batched: bool) -> tuple[TensorSpec, ...]:
    required = [tensor for tensor in graph.inputs if not tensor.optional]
    if not spec.inputs:
        return tuple(_whole(spec, tensor, batched) for tensor in required)
    expected = sum(not said.optional for said in spec.inputs)
    if expected != len(required):
        names = ", ".join(f"'{tensor.name}'" for tensor in required)
        text = f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides"
        raise _invalid(f"{text} {len(required)}: {names}")
    for said in spec.inputs:
        if said.name not in graph.input:
            allowed = ", ".join(sorted(graph.input))
            raise _invalid(f"unexpected inference input '{said.name}', allowed inputs are: {allowed}")
        if said.optional and batched:
            text = f"unable to load model '{spec.name}', optional input '{said.name}' is not supported for models"
            raise _invalid(f"{text} that support batching")
    declared = {said.name: said for said in spec.inputs}
    return tuple(
        _agreed(spec, declared[tensor.name], tensor, batched, "input")
        for tensor in graph.inputs
        if tensor.name in declared
    )


def _outputs(spec: ModelSpec, graph: Signature, batched: bool) -> tuple[TensorSpec, ...]:
    declared = {said.name: said for said in spec.outputs}
    for name in declared:
        if name not in graph.output:
            allowed = ", ".join(sorted(graph.output))
            raise _invalid(f"unexpected inference output '{name}', allowed outputs are: {allowed}")
    outputs: list[TensorSpec] = []
    for tensor in graph.outputs:
        if tensor.name in declared:
            outputs.append(_agreed(spec, declared[tensor.name], tensor, batched, "output"))
        elif not declared or not tensor.is_tensor:
            outputs.append(_whole(spec, tensor, batched))
    return tuple(outputs)


def _whole(spec: ModelSpec, tensor: TensorSpec, batched: bool) -> TensorSpec:
    """Take a tensor that the configuration does not mention."""
    if batched:
        _check_row_axis(spec, tensor)
    return replace(tensor, shape=(1,)) if tensor.is_tensor and not tensor.shape else tensor


def _agreed(spec: ModelSpec, said: TensorSpec, tensor: TensorSpec, batched: bool, kind: str) -> TensorSpec:
    """Take a tensor as declared, once it fits the model's own."""
    if not tensor.is_tensor:
        text = f"model '{spec.name}': {kind} '{said.name}' is {tensor.datatype}, no tensor"
        raise _invalid(f"{text}; leave it out of the configuration, hooks get it all the same")
    if said.datatype != tensor.datatype:
        text = f"unable to load model '{spec.name}', configuration expects datatype {said.type.config_name} for {kind}"
        raise _invalid(f"{text} '{said.name}', model provides TYPE_{tensor.datatype}")
    if kind == "output" and not tensor.shape:
        # ONNX Runtime says () of a scalar and of an output whose rank it does not know: the configuration knows better
        return replace(said, shape=(-1, *said.shape) if batched else said.shape or (1,))
    if batched:
        _check_row_axis(spec, tensor)
    if not tensor.shape:
        if said.shape != (1,):
            text = f"unable to load model '{spec.name}', scalar tensor '{said.name}', should only provide 1 in the"
            raise _invalid(f"{text} model configuration. Model configuration provided: {_shape(said.shape)}.")
        return said
    whole = (-1, *said.shape) if batched else said.shape
    if not _compatible(tensor.shape, whole, exact=kind == "output"):
        raise _mismatch(spec, tensor, whole, batched)
    return replace(said, shape=whole, axes=tensor.axes)


def _compatible(model: tuple[int, ...], whole: tuple[int, ...], *, exact: bool) -> bool:
    """Tell whether declared dims fit: a free axis of an input may be declared fixed, an output's may not."""
    return len(model) == len(whole) and all(
        mine == theirs or (mine == -1 and not exact) for mine, theirs in zip(model, whole, strict=True)
    )


def _check_row_axis(spec: ModelSpec, tensor: TensorSpec) -> None:
    if _has_row_axis(tensor):
        return
    text = f"model '{spec.name}', tensor '{tensor.name}': for the model to support batching the shape should have at"
    text += " least 1 dimension and the first dimension must be -1; but shape expected by the model is"
    raise _invalid(f"{text} {_shape(tensor.shape)}")


def _mismatch(spec: ModelSpec, tensor: TensorSpec, whole: tuple[int, ...], batched: bool) -> InferError:
    text = f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(tensor.shape)} dimensions (shape"
    text += f" {_shape(tensor.shape)}) but the model configuration specifies {len(whole)} dimensions ("
    if batched:
        text += "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making"
        text += " complete "
    return _invalid(f"{text}shape {_shape(whole)})")


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _invalid(message: str) -> InferError:
    return InferError(Code.INVALID, message)
