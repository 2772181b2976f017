"""Padding rules: checks the padding configuration against the model. Used by completion.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.spec import ModelSpec, PaddedAxis

from .padding import axis_name, tied_axes, typed_fill

MASK_DATATYPES = ("INT64", "INT32", "BOOL", "FP32", "FP16")


def check_padding(spec: ModelSpec, signature: Signature) -> Signature:
    """Check all padding; return the signature with masks optional, since the server makes those not sent.

    Raises: InferError (INVALID): the field, and what is wrong with it.
    """
    seen: set[tuple[str, int]] = set()
    for padded in spec.padding:
        _check_axis(spec, signature, padded)
        if (padded.input, padded.axis) in seen:
            raise _padding_error(spec, padded, "axis", f"axis {padded.axis} is declared twice")
        seen.add((padded.input, padded.axis))
        if padded.mask:
            _check_mask(spec, signature, padded)
        _check_outputs(spec, signature, padded)
    for padded in spec.padding:
        _check_tied_axes(spec, signature, padded)
    masks = {padded.mask for padded in spec.padding}
    inputs = tuple(replace(each, optional=True) if each.name in masks else each for each in signature.inputs)
    return replace(signature, inputs=inputs)


def _check_axis(spec: ModelSpec, signature: Signature, padded: PaddedAxis) -> None:
    tensor = signature.input.get(padded.input)
    if tensor is None:
        raise _padding_error(spec, padded, "", f"the model has no such input, its inputs are {_names(signature.input)}")
    if not signature.batched:
        raise _padding_error(spec, padded, "", "the model has no batch axis, so requests never share a batch")
    dims = tensor.shape[1:]
    if not 0 <= padded.axis < len(dims):
        raise _padding_error(
            spec, padded, "axis", f"there is no axis {padded.axis}, the dims after the rows are {list(dims)}"
        )
    if dims[padded.axis] != -1:
        text = f"axis {padded.axis} is fixed at {dims[padded.axis]}, and only a free axis can be padded"
        raise _padding_error(spec, padded, "axis", text)
    if any(size < 1 for size in padded.buckets) or any(b <= a for a, b in pairwise(padded.buckets)):
        raise _padding_error(spec, padded, "buckets", f"{list(padded.buckets)} must be positive and ascending")
    try:
        typed_fill(tensor, padded.value)
    except (ValueError, OverflowError) as error:
        raise _padding_error(spec, padded, "value", str(error)) from error


def _check_mask(spec: ModelSpec, signature: Signature, padded: PaddedAxis) -> None:
    mask = signature.input.get(padded.mask)
    if mask is None:
        raise _padding_error(
            spec, padded, "mask", f"the model has no input '{padded.mask}', its inputs are {_names(signature.input)}"
        )
    if padded.mask == padded.input:
        raise _padding_error(spec, padded, "mask", "an input cannot be its own mask")
    if mask.datatype not in MASK_DATATYPES:
        known = ", ".join(MASK_DATATYPES)
        raise _padding_error(spec, padded, "mask", f"'{padded.mask}' is {mask.datatype}, expected one of {known}")
    if mask.shape[1:].count(-1) != 1:
        text = f"'{padded.mask}' has shape {list(mask.shape)}, expected one free axis after the rows"
        raise _padding_error(spec, padded, "mask", text)
    name = axis_name(signature.input[padded.input], padded.axis)
    for other in spec.padding:
        if other is not padded and other.mask == padded.mask:
            named = name and axis_name(signature.input[other.input], other.axis) == name
            if not named:
                text = f"'{padded.mask}' is also the mask of '{other.input}', whose axis does not have the same name"
                raise _padding_error(spec, padded, "mask", text)


def _check_outputs(spec: ModelSpec, signature: Signature, padded: PaddedAxis) -> None:
    if padded.outputs is None:
        named = axis_name(signature.input[padded.input], padded.axis)
        free = [output.name for output in signature.outputs if -1 in output.shape[1:]]
        if free and not named:
            text = f"the model does not name this axis; set which axis of {', '.join(free)} is as long as it, or {{}}"
            raise _padding_error(spec, padded, "outputs", text)
        unnamed = _outputs_with_unnamed_axis(signature)
        if unnamed and all(other.outputs is None for other in spec.padding):
            text = f"{', '.join(unnamed)}: has a free axis of no input; name it if it is as long as a padded axis"
            text += ", or set {}"
            raise _padding_error(spec, padded, "outputs", text)
        return
    for name, axis in padded.outputs.items():
        output = signature.output.get(name)
        if output is None or not output.is_tensor:
            raise _padding_error(
                spec, padded, "outputs", f"the model has no output '{name}', its outputs are {_names(signature.output)}"
            )
        dims = output.shape[1:]
        if not 0 <= axis < len(dims) or dims[axis] != -1:
            text = f"axis {axis} of '{name}' is not free, the dims after the rows are {list(dims)}"
            raise _padding_error(spec, padded, "outputs", text)


def _outputs_with_unnamed_axis(signature: Signature) -> list[str]:
    """List outputs with a free axis that no input names, as exporters invent: nothing says what its length equals."""
    known = {name for spec in signature.inputs for name in spec.axes[1:]} - {""}
    return [
        output.name
        for output in signature.outputs
        if any(size < 0 and axis_name(output, axis) not in known for axis, size in enumerate(output.shape[1:]))
    ]


def _check_tied_axes(spec: ModelSpec, signature: Signature, padded: PaddedAxis) -> None:
    """Check that axes that must be as long as a padded axis are padded too, to the same lengths."""
    others = {(other.input, other.axis): other for other in spec.padding}
    masks = {other.mask for other in spec.padding}
    for tensor, axis in tied_axes(signature, padded):
        other = others.get((tensor.name, axis))
        if other is None and tensor.name not in masks:
            text = f"axis {padded.axis} must be as long as axis {axis} of '{tensor.name}', which is not padded"
            fix = f"add [padding.{tensor.name}]"
            if tensor.name == padded.input:
                fix = "only one axis of an input can be padded"
            raise _padding_error(spec, padded, "axis", f"{text}: {fix}")
        if other is not None and other.buckets != padded.buckets:
            text = f"{list(padded.buckets)} must equal those of '{tensor.name}', which must have the same length"
            raise _padding_error(spec, padded, "buckets", text)


def _names(tensors: dict[str, TensorSpec]) -> str:
    return ", ".join(sorted(tensors))


def _padding_error(spec: ModelSpec, padded: PaddedAxis, field: str, text: str) -> InferError:
    field_path = f"padding.{padded.input}.{field}" if field else f"padding.{padded.input}"
    return InferError(Code.INVALID, f"model '{spec.name}', {field_path}: {text}")
