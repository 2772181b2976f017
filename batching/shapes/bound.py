"""Bound: what a model's Bindings take and return, if that differs from what clients send and get.

Made by completion.py from a spec whose `signature` is known. Rejects incompatible settings at load.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.spec import BatchTensor, ModelSpec

from .derived import derived_names, stored_names
from .reshape import check_reshape


def bound_signature(
    spec: ModelSpec, signature: Signature, graph: Signature, *, ungathered: bool = False
) -> Signature | None:
    """Return what the Bindings take and return; None if it is the signature itself.

    `ungathered`: nothing is gathered; each request's tensors go to the model as they are.
    Shapes: the model's own, with -1 for rows in front when batched. Derived inputs follow the clients'; kept outputs
    follow theirs, unless clients get them too. A scalar is `[1]`.
    Raises: InferError (INVALID).
    """
    _check_compatibility(spec, signature, ungathered=ungathered)
    _check_batch_tensors(spec, signature)
    scattered = {each.name for each in spec.batch_outputs}
    inputs = [_model_tensor(each, batched=signature.batched) for each in signature.inputs]
    outputs = [
        replace(each, shape=graph.output[each.name].shape, reshape=None, ragged=True)
        if each.name in scattered
        else _model_tensor(each, batched=signature.batched)
        for each in signature.outputs
    ]
    derived = [_find_derived(spec, signature, graph, name) for name in derived_names(spec)]
    client_outputs = {each.name for each in outputs}
    stored_outputs = [graph.output[name] for name in stored_names(spec) if name not in client_outputs]
    bound = Signature((*inputs, *derived), (*outputs, *stored_outputs), signature.batched)
    is_same = not scattered and not derived and not stored_names(spec)
    if is_same and _shapes(bound) == _shapes(signature):
        return None
    return bound


def configured_signature(spec: ModelSpec) -> Signature:
    """Return the clients' view of a model known only from its configuration. Raises: InferError (INVALID)."""
    batched = bool(spec.policy.max_batch_rows)
    for kind, side in (("input", spec.inputs), ("output", spec.outputs)):
        for tensor in side:
            check_reshape(tensor, kind, spec.name, batched=batched)
    inputs, outputs = (
        tuple([replace(each, shape=(-1, *each.shape)) if batched else each for each in side])
        for side in (spec.inputs, spec.outputs)
    )
    return Signature(inputs, outputs, batched)


def reshaped_signature(signature: Signature) -> Signature | None:
    """Return the inner signature of an ensemble in which some tensors have a reshape; None if none has."""
    batched = signature.batched
    inputs, outputs = (
        tuple([_model_tensor(each, batched=batched) for each in side]) for side in (signature.inputs, signature.outputs)
    )
    bound = Signature(inputs, outputs, batched)
    return None if _shapes(bound) == _shapes(signature) else bound


def _model_tensor(spec: TensorSpec, *, batched: bool) -> TensorSpec:
    """Return a client's tensor as the model has it."""
    if spec.ragged:
        return replace(spec, shape=(-1,), reshape=None)
    if spec.is_shape and batched:
        (values,) = spec.shape[1:]
        return replace(spec, shape=(values + 1 if values > 0 else -1,))
    if spec.reshape is None:
        return spec
    return replace(spec, shape=(-1, *spec.reshape) if batched else spec.reshape, reshape=None)


def _shapes(signature: Signature) -> list[tuple[int, ...]]:
    return [spec.shape for spec in (*signature.inputs, *signature.outputs)]


def _find_derived(spec: ModelSpec, signature: Signature, graph: Signature, name: str) -> TensorSpec:
    """Find a derived input in the model. Sequence settings have been checked by then (controls.py)."""
    tensor = graph.input.get(name)
    batch_tensor = next((each for each in spec.batch_inputs if each.name == name), None)
    if batch_tensor is None:
        return graph.input[name]
    prefix = f"unable to load model '{spec.name}', batch input '{name}'"
    if tensor is None:
        allowed = ", ".join(sorted(graph.input))
        raise _invalid(f"unexpected inference input '{name}', allowed inputs are: {allowed}")
    if tensor.datatype != batch_tensor.datatype:
        text = f"configuration expects datatype TYPE_{batch_tensor.datatype}, model provides TYPE_{tensor.datatype}"
        raise _invalid(f"{prefix}: {text}")
    expected_shape = _batch_input_shape(batch_tensor, signature)
    pairs = zip(tensor.shape, expected_shape, strict=False)
    if len(tensor.shape) != len(expected_shape) or any(mine not in (-1, dim) for mine, dim in pairs):
        text = f"{batch_tensor.kind} has shape {format_shape(expected_shape)}"
        raise _invalid(f"{prefix}: {text}, model provides {format_shape(tensor.shape)}")
    return tensor


def _batch_input_shape(batch_tensor: BatchTensor, signature: Signature) -> tuple[int, ...]:
    if batch_tensor.kind != "BATCH_ITEM_SHAPE":
        return (-1,)
    source = signature.input[batch_tensor.sources[0]]
    return (-1, len(source.shape[1:] if source.reshape is None else source.reshape))


def _check_batch_tensors(spec: ModelSpec, signature: Signature) -> None:
    """Check the settings for ragged batches against the tensors that clients send and get.

    Raises: InferError (INVALID). Source: ValidateBatchIO of Triton's core, and ValidateInputs of its ONNX backend.
    """
    for each in (*spec.batch_inputs, *spec.batch_outputs):
        for name in each.sources:
            if name not in signature.input:
                raise _invalid(f"unknown source input name '{name}'")
            if not signature.batched:
                raise _invalid(f"model '{spec.name}', {each.kind} of '{name}': max_batch_size must be > 0")
    seen: set[str] = set()
    for each in spec.batch_outputs:
        output, source = signature.output.get(each.name), signature.input[each.sources[0]]
        if output is None:
            raise _invalid(f"unknown target output name '{each.name}'")
        if each.name in seen:
            raise _invalid(f"target output name '{each.name}' can only be specified once")
        seen.add(each.name)
        prefix = f"model '{spec.name}', batch output '{each.name}'"
        if output.reshape is not None:
            raise _invalid(f"{prefix}: it cannot have a reshape, since it takes its shape from '{source.name}'")
        rank = 1 + len(source.shape[1:] if source.reshape is None else source.reshape)
        if any(dim < 0 and axis >= rank for axis, dim in enumerate(output.shape)):
            text = f"{format_shape(output.shape)} has a variable-size dimension where '{source.name}' has none"
            raise _invalid(f"{prefix}: {text}")


def flattening_fields(spec: ModelSpec, signature: Signature) -> dict[str, bool]:
    """Return, by configuration field, whether it makes tensors flat rather than concatenated rows."""
    return {
        "allow_ragged_batch": any(each.ragged for each in (*signature.inputs, *signature.outputs)),
        "batch_input": bool(spec.batch_inputs),
        "batch_output": bool(spec.batch_outputs),
    }


def _check_compatibility(spec: ModelSpec, signature: Signature, *, ungathered: bool) -> None:
    """Reject incompatible settings; controls.py has already rejected what never works with sequences."""
    tensors, flat = (*signature.inputs, *signature.outputs), flattening_fields(spec, signature)
    has_no_rows = all(each.is_shape for each in signature.inputs) and (signature.inputs or derived_names(spec))
    if signature.batched and has_no_rows:
        raise _invalid(f"model '{spec.name}': max_batch_size is not 0, and no input has rows")
    values = {"is_shape_tensor": signature.batched and any(each.is_shape for each in tensors)}
    reshape = {"reshape": any(each.reshape is not None for each in tensors)}
    for field, is_set, conflicts in (
        ("padding", bool(spec.padding), flat | values | reshape),
        ("batching.allowed_sizes", bool(spec.policy.allowed_rows), flat),
        ("batching.split", spec.policy.split, flat | values),
        ("hooks", spec.hooks is not None, values),
        # where rows are gathered, a row without a request has no place among flat elements
        ("sequence_batching.direct", spec.sequence is not None and spec.sequence.direct and not ungathered, flat),
    ):
        other = next((name for name, other_set in conflicts.items() if other_set), None)
        if is_set and other is not None:
            raise _invalid(f"model '{spec.name}', {field}: cannot be combined with {other}")


def _invalid(message: str) -> InferError:
    return InferError(Code.INVALID, message)
