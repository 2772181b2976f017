"""Request checks: checks a request's shapes against the Signature before it is queued.

Called by every dialect and by `Engine.infer`. The texts are Triton's (core, `InferenceRequest::Normalize`), since its
clients and tests look for them; a dialect adds its own prefix, such as the request id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import DEFAULT_REQUEST_OPTIONS, InferRequest, Key, RequestOptions, input_bytes
from penstock.batching.shapes.ragged import RAGGED
from penstock.batching.sinks import FutureSink

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.shapes.padding import Padding

Shape = tuple[int, ...]

_MAX_CACHED_SHAPES = 256
_NO_SINK = FutureSink()
MAX_EMPTY_DIM = 1 << 20
"""The largest dim allowed beside a zero: the request carries no bytes for it, yet a model may allocate an output of
that size."""

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_shapes(
    name: str, signature: Signature, max_rows: int, shapes: Sequence[Shape | None], padding: Padding | None = None
) -> tuple[int, Key]:
    """Check one request's input shapes and return its rows and its Key.

    Shapes: `shapes` follow `signature.inputs`, rows included; None for an absent input. The caller rejects requests
    that lack a required input. With `padding`, the Key has the padded lengths. A shape tensor of a batched model has no
    rows; the Key holds its shape until `values_key` replaces that by its values.
    Raises: InferError (INVALID).
    """
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        if shape and 0 in shape and max(shape) > MAX_EMPTY_DIM:
            raise _shape_error(name, spec, shape, batched=signature.batched)
    if not signature.batched:
        for spec, shape in zip(signature.inputs, shapes, strict=True):
            if shape is not None and not _matches(shape, spec.shape):
                raise _shape_error(name, spec, shape, batched=False)
        return 1, tuple(shapes)
    rows = _common_rows(name, signature, shapes)
    key: list[Shape | None] = []
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        if shape is not None and not (
            _has_declared_length(spec, shape) if spec.is_shape else _matches(shape[1:], spec.shape[1:])
        ):
            raise _shape_error(name, spec, shape, batched=True)
        key.append(None if shape is None else RAGGED if spec.ragged else shape if spec.is_shape else shape[1:])
    if rows > max_rows:
        raise _too_many_rows(name, max_rows)
    return rows, tuple(key) if padding is None else padding.key(name, key)


def check_input_shape(model: Model, spec: TensorSpec, shape: Shape) -> None:
    """Check the shape of a single input before reading it, since it may be large. `check_shapes` checks all of them.

    Raises: InferError (INVALID).
    """
    batched = model.signature.batched and not spec.is_shape
    if not (_matches(shape[1:], spec.shape[1:]) if batched else spec.is_shape or _matches(shape, spec.shape)):
        raise _shape_error(model.name, spec, shape, batched=batched)
    if batched and shape and shape[0] > model.max_request_rows:
        raise _too_many_rows(model.name, model.max_request_rows)


def check_shapes_cached(model: Model, shapes: tuple[Shape | None, ...]) -> tuple[int, Key]:
    """Check a request's shapes, as `check_shapes` does; caches shapes that passed. Raises: InferError (INVALID)."""
    checked = model.admitted_shapes.get(shapes)
    if checked is None:
        checked = check_shapes(model.name, model.signature, model.max_request_rows, shapes, model.padding)
        if len(model.admitted_shapes) >= _MAX_CACHED_SHAPES:
            model.admitted_shapes.clear()
        model.admitted_shapes[shapes] = checked
    return checked


def make_request(
    model: Model, inputs: list[Array | None], requested_outputs: tuple[int, ...] | None = None,
    terms: RequestOptions = DEFAULT_REQUEST_OPTIONS, parameters: Mapping[str, Any] | None = None,
) -> InferRequest:  # fmt: skip
    """Make a checked request that no dialect has decoded; the caller sets its sink.

    `requested_outputs` None: all outputs, including those that are not tensors. Raises: InferError (INVALID).
    """
    rows, key = check_shapes_cached(model, tuple([None if array is None else array.shape for array in inputs]))
    positions = tuple(range(len(model.signature.outputs))) if requested_outputs is None else requested_outputs
    request = InferRequest(model, inputs, rows, key, positions, _NO_SINK)
    if terms is not DEFAULT_REQUEST_OPTIONS:
        request.deadline_ns, request.priority, request.sequence, caller, timeout_us = terms
        if caller is not None:
            request.caller = caller
        if timeout_us:
            request.timeout_us = timeout_us
    request.nbytes = input_bytes(inputs)
    if parameters:
        request.parameters = parameters
    return request


def _common_rows(name: str, signature: Signature, shapes: Sequence[Shape | None]) -> int:
    rows = None
    for spec, shape in zip(signature.inputs, shapes, strict=True):
        if shape is None or spec.is_shape:
            continue
        if not shape:
            text = f"input '{spec.name}' has no shape but model requires batch dimension for '{name}'"
            raise InferError(Code.INVALID, text)
        if rows is None:
            rows = shape[0]
        elif shape[0] != rows:
            text = f"input '{spec.name}' batch size does not match other inputs for '{name}'"
            raise InferError(Code.INVALID, text)
    return rows or 0


def _has_declared_length(spec: TensorSpec, shape: Shape) -> bool:
    """Whether a shape tensor has the right length: the declared dims omit its first value, the request's rows."""
    return len(shape) == 1 and (shape[0] == spec.shape[1] + 1 or (spec.shape[1] < 0 < shape[0]))


def values_key(request: InferRequest) -> Key:
    """Return the request's Key with the values of its shape tensors, which must be equal across a batch.

    Raises: InferError (INVALID) if a first value is not the request's rows.
    Source: Shape Tensors in Triton's model configuration; Triton compares their bytes only up to the first zero.
    """
    key, model = list(request.key), request.model
    for position, (spec, array) in enumerate(zip(model.signature.inputs, request.inputs, strict=True)):
        if spec.is_shape and array is not None:
            first, *others = array.tolist()
            if first != request.rows:
                text = f"shape tensor '{spec.name}' for model '{model.name}' begins with {first}, expected the"
                raise InferError(Code.INVALID, f"{text} request's batch size, {request.rows}")
            key[position] = tuple(others)
    return tuple(key)


def _matches(shape: Shape, expected: Shape) -> bool:
    return len(shape) == len(expected) and all(w in (-1, s) for s, w in zip(shape, expected, strict=True))


def _too_many_rows(name: str, max_rows: int) -> InferError:
    return InferError(Code.INVALID, f"inference request batch-size must be <= {max_rows} for '{name}'")


def _shape_error(name: str, spec: TensorSpec, shape: Shape, *, batched: bool) -> InferError:
    text = (
        f"unexpected shape for input '{spec.name}' for model '{name}'. Expected {format_shape(spec.shape)}, "
        f"got {format_shape(shape)}. {_BATCH_NOTE if batched else ''}"
    )
    return InferError(Code.INVALID, text)


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape as Triton does: `[-1,4]`."""
    return "[" + ",".join(map(str, shape)) + "]"
