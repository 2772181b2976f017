"""Tensor checks: checks one declared tensor against the model's own. Used by completion.py.

The rules and texts are those of Triton's ONNX Runtime backend (ValidateInputs, ValidateOutputs, CompareDimsSupported).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.shapes.reshape import check_reshape
from penstock.batching.spec import ModelSpec

ROW_WISE_PREFIX = "seq(map("
"""The prefix of the type of ZipMap's output: a list of one dictionary per row, which can be divided into rows like a
tensor. No other non-tensor type can."""
TENSORFLOW = "tensorflow"
"""The backend whose models may leave the number of axes of an input open; a scalar looks the same."""


def check_declared(spec: ModelSpec, configured: TensorSpec, tensor: TensorSpec, batched: bool, kind: str) -> TensorSpec:
    """Return a tensor as declared, after checking that it fits the model's own. `kind` is "input" or "output".

    Shapes: the declared dims omit the rows; the result includes them. Raises: InferError (INVALID).
    """
    if not tensor.is_tensor:
        text = f"model '{spec.name}': {kind} '{configured.name}' is {tensor.datatype}, which is not a tensor"
        raise _invalid(f"{text}; remove it from the configuration, hooks receive it in any case")
    if configured.datatype != tensor.datatype:
        text = f"unable to load model '{spec.name}', configuration expects datatype {configured.type.config_name}"
        raise _invalid(f"{text} for {kind} '{configured.name}', model provides TYPE_{tensor.datatype}")
    check_reshape(configured, kind, spec.name, batched=batched)
    if configured.is_shape and batched:
        return _check_shape_tensor(spec, configured, tensor)
    if configured.ragged:
        return _check_ragged(spec, configured, tensor, batched)
    declared = replace(configured, shape=(-1, *configured.shape) if batched else configured.shape)
    if kind == "output" and any(configured.name == each.name for each in spec.batch_outputs):
        return declared  # its shape in the model is unrelated
    if not tensor.shape and (kind == "output" or not batched or spec.backend == TENSORFLOW):
        return _check_rankless(spec, configured, declared, batched, kind)
    if batched:
        check_row_axis(spec, tensor)
    full_shape = (-1, *model_dims(configured)) if batched else model_dims(configured)
    if not _is_compatible(tensor.shape, full_shape, exact=kind == "output"):
        raise _mismatch(spec, tensor, full_shape, batched)
    return replace(declared, axes=tensor.axes if configured.reshape is None else ())


def _check_rankless(
    spec: ModelSpec, configured: TensorSpec, declared: TensorSpec, batched: bool, kind: str
) -> TensorSpec:
    """Accept a tensor without a shape in the model, a scalar or an output of any rank, as configured.

    A Binding has a scalar as `[1]`, whatever dims of 1 are declared.
    """
    if batched:
        return declared
    if any(dim != 1 for dim in model_dims(configured)):
        if kind == "output" or spec.backend == TENSORFLOW:
            return declared
        text = f"unable to load model '{spec.name}', scalar tensor '{configured.name}', should only provide 1 in the"
        text += " model configuration when the model doesn't support batching. Model configuration provided:"
        raise _invalid(f"{text} {format_shape(model_dims(configured))}.")
    dims = configured.shape or (1,)
    return replace(configured, shape=dims, reshape=None if dims == (1,) else (1,))


def _check_ragged(spec: ModelSpec, configured: TensorSpec, tensor: TensorSpec, batched: bool) -> TensorSpec:
    text = f"unable to load model '{spec.name}', configuration expects model provides input with shape [-1]  for ragged"
    text += f" input '{configured.name}'"
    if configured.optional:
        raise _invalid(f"{text}, which is not supported for optional input")
    if not batched:
        raise _invalid(f"model '{spec.name}', ragged input '{configured.name}': max_batch_size must be > 0")
    if tensor.shape != (-1,):
        raise _invalid(f"{text}, model provides {format_shape(tensor.shape)}")
    return replace(configured, shape=(-1, *configured.shape))


def _check_shape_tensor(spec: ModelSpec, configured: TensorSpec, tensor: TensorSpec) -> TensorSpec:
    """Accept a shape tensor of a model with rows: its dims omit the first value, the number of rows."""
    prefix = f"model '{spec.name}', shape tensor '{configured.name}'"
    if configured.datatype not in ("INT32", "INT64") or configured.reshape is not None or configured.ragged:
        raise _invalid(f"{prefix}: it must be TYPE_INT32 or TYPE_INT64, and neither ragged nor with a reshape")
    if len(configured.shape) != 1 or len(tensor.shape) != 1:
        text = f"must be a list of values, but the model has {format_shape(tensor.shape)} and the configuration"
        raise _invalid(f"{prefix}: it {text} {format_shape(configured.shape)}")
    if tensor.shape[0] not in (-1, configured.shape[0] + 1) or (configured.shape[0] == -1 and tensor.shape[0] != -1):
        text = (
            f"the model takes {tensor.shape[0]} values, one of them for the batch size, but the configuration expects"
        )
        raise _invalid(f"{prefix}: {text} {configured.shape[0]} plus one for the batch size")
    return replace(configured, shape=(-1, *configured.shape))


def _is_compatible(model: tuple[int, ...], full_shape: tuple[int, ...], *, exact: bool) -> bool:
    """Whether declared dims fit: a free axis of an input may be declared fixed, an output's may not."""
    return len(model) == len(full_shape) and all(
        mine == theirs or (mine == -1 and not exact) for mine, theirs in zip(model, full_shape, strict=True)
    )


def check_row_axis(spec: ModelSpec, tensor: TensorSpec) -> None:
    """Check that a tensor of a batched model has an axis for rows. Raises: InferError (INVALID)."""
    if has_row_axis(tensor):
        return
    text = f"model '{spec.name}', tensor '{tensor.name}': for the model to support batching the shape should have at"
    text += " least 1 dimension and the first dimension must be -1; but shape expected by the model is"
    raise _invalid(f"{text} {format_shape(tensor.shape)}")


def _mismatch(spec: ModelSpec, tensor: TensorSpec, full_shape: tuple[int, ...], batched: bool) -> InferError:
    text = f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(tensor.shape)} dimensions (shape"
    text += f" {format_shape(tensor.shape)}) but the model configuration specifies {len(full_shape)} dimensions ("
    if batched:
        text += "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making"
        text += " complete "
    return _invalid(f"{text}shape {format_shape(full_shape)})")


def model_dims(configured: TensorSpec) -> tuple[int, ...]:
    """Return declared dims as the model has them."""
    return configured.shape if configured.reshape is None else configured.reshape


def has_row_axis(tensor: TensorSpec) -> bool:
    """Whether a tensor of the model can have rows."""
    if tensor.optional:
        return True
    if not tensor.is_tensor:
        return tensor.datatype.startswith(ROW_WISE_PREFIX)
    return bool(tensor.shape) and tensor.shape[0] == -1


def _invalid(message: str) -> InferError:
    return InferError(Code.INVALID, message)
