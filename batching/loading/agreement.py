"""Agreement: checks one declared tensor against the model's own. Used by completion.py.

The rules and texts are those of Triton's ONNX Runtime backend (ValidateInputs, ValidateOutputs, CompareDimsSupported).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.scheduling.admission import format_shape
from penstock.batching.shapes.reshape import check_reshape
from penstock.batching.spec import ModelSpec

ROW_WISE = "seq(map("
"""The prefix of the type of ZipMap's output: a list of one dictionary per row, which can be divided into rows like a
tensor. No other non-tensor type can."""
TENSORFLOW = "tensorflow"
"""The backend whose models may leave the number of axes of an input open; a scalar looks the same."""


def agreed(spec: ModelSpec, said: TensorSpec, tensor: TensorSpec, batched: bool, kind: str) -> TensorSpec:
    """Return a tensor as declared, after checking that it fits the model's own. `kind` is "input" or "output".

    Shapes: the declared dims omit the rows; the result includes them. Raises: InferError (INVALID).
    """
    if not tensor.is_tensor:
        text = f"model '{spec.name}': {kind} '{said.name}' is {tensor.datatype}, which is not a tensor"
        raise _invalid(f"{text}; remove it from the configuration, hooks receive it in any case")
    if said.datatype != tensor.datatype:
        text = f"unable to load model '{spec.name}', configuration expects datatype {said.type.config_name} for {kind}"
        raise _invalid(f"{text} '{said.name}', model provides TYPE_{tensor.datatype}")
    check_reshape(said, kind, spec.name, batched=batched)
    if said.is_shape and batched:
        return _values(spec, said, tensor)
    if said.ragged:
        return _ragged(spec, said, tensor, batched)
    declared = replace(said, shape=(-1, *said.shape) if batched else said.shape)
    if kind == "output" and any(said.name == each.name for each in spec.batch_outputs):
        return declared  # its shape in the model is unrelated
    if not tensor.shape and (kind == "output" or not batched or spec.backend == TENSORFLOW):
        return _rankless(spec, said, declared, batched, kind)
    if batched:
        check_row_axis(spec, tensor)
    whole = (-1, *model_dims(said)) if batched else model_dims(said)
    if not _compatible(tensor.shape, whole, exact=kind == "output"):
        raise _mismatch(spec, tensor, whole, batched)
    return replace(declared, axes=tensor.axes if said.reshape is None else ())


def _rankless(spec: ModelSpec, said: TensorSpec, declared: TensorSpec, batched: bool, kind: str) -> TensorSpec:
    """Accept a tensor without a shape in the model, a scalar or an output of any rank, as configured.

    A Binding has a scalar as `[1]`, whatever dims of 1 are declared.
    """
    if batched:
        return declared
    if any(dim != 1 for dim in model_dims(said)):
        if kind == "output" or spec.backend == TENSORFLOW:
            return declared
        text = f"unable to load model '{spec.name}', scalar tensor '{said.name}', should only provide 1 in the"
        text += " model configuration when the model doesn't support batching. Model configuration provided:"
        raise _invalid(f"{text} {format_shape(model_dims(said))}.")
    dims = said.shape or (1,)
    return replace(said, shape=dims, reshape=None if dims == (1,) else (1,))


def _ragged(spec: ModelSpec, said: TensorSpec, tensor: TensorSpec, batched: bool) -> TensorSpec:
    text = f"unable to load model '{spec.name}', configuration expects model provides input with shape [-1]  for ragged"
    text += f" input '{said.name}'"
    if said.optional:
        raise _invalid(f"{text}, which is not supported for optional input")
    if not batched:
        raise _invalid(f"model '{spec.name}', ragged input '{said.name}': max_batch_size must be > 0")
    if tensor.shape != (-1,):
        raise _invalid(f"{text}, model provides {format_shape(tensor.shape)}")
    return replace(said, shape=(-1, *said.shape))


def _values(spec: ModelSpec, said: TensorSpec, tensor: TensorSpec) -> TensorSpec:
    """Accept a shape tensor of a model with rows: its dims omit the first value, the number of rows."""
    place = f"model '{spec.name}', shape tensor '{said.name}'"
    if said.datatype not in ("INT32", "INT64") or said.reshape is not None or said.ragged:
        raise _invalid(f"{place}: it must be TYPE_INT32 or TYPE_INT64, and neither ragged nor with a reshape")
    if len(said.shape) != 1 or len(tensor.shape) != 1:
        text = f"must be a list of values, but the model has {format_shape(tensor.shape)} and the configuration"
        raise _invalid(f"{place}: it {text} {format_shape(said.shape)}")
    if tensor.shape[0] not in (-1, said.shape[0] + 1) or (said.shape[0] == -1 and tensor.shape[0] != -1):
        text = (
            f"the model takes {tensor.shape[0]} values, one of them for the batch size, but the configuration expects"
        )
        raise _invalid(f"{place}: {text} {said.shape[0]} plus one for the batch size")
    return replace(said, shape=(-1, *said.shape))


def _compatible(model: tuple[int, ...], whole: tuple[int, ...], *, exact: bool) -> bool:
    """Whether declared dims fit: a free axis of an input may be declared fixed, an output's may not."""
    return len(model) == len(whole) and all(
        mine == theirs or (mine == -1 and not exact) for mine, theirs in zip(model, whole, strict=True)
    )


def check_row_axis(spec: ModelSpec, tensor: TensorSpec) -> None:
    """Check that a tensor of a batched model has an axis for rows. Raises: InferError (INVALID)."""
    if has_row_axis(tensor):
        return
    text = f"model '{spec.name}', tensor '{tensor.name}': for the model to support batching the shape should have at"
    text += " least 1 dimension and the first dimension must be -1; but shape expected by the model is"
    raise _invalid(f"{text} {format_shape(tensor.shape)}")


def _mismatch(spec: ModelSpec, tensor: TensorSpec, whole: tuple[int, ...], batched: bool) -> InferError:
    text = f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(tensor.shape)} dimensions (shape"
    text += f" {format_shape(tensor.shape)}) but the model configuration specifies {len(whole)} dimensions ("
    if batched:
        text += "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making"
        text += " complete "
    return _invalid(f"{text}shape {format_shape(whole)})")


def model_dims(said: TensorSpec) -> tuple[int, ...]:
    """Return declared dims as the model has them."""
    return said.shape if said.reshape is None else said.reshape


def has_row_axis(tensor: TensorSpec) -> bool:
    """Whether a tensor of the model can have rows."""
    if tensor.optional:
        return True
    if not tensor.is_tensor:
        return tensor.datatype.startswith(ROW_WISE)
    return bool(tensor.shape) and tensor.shape[0] == -1


def _invalid(message: str) -> InferError:
    return InferError(Code.INVALID, message)
