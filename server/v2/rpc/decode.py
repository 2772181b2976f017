"""Decoding of a ModelInferRequest into one InferRequest.

Called by `inference.py`. Every error a request can have by itself is found here. The rules shared with HTTP are in
`call_parameters.py` and `decode.py` above; texts are Triton's (server, `infer_handler.cc`).
Source: Triton's grpc_service.proto.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.datatypes import bytes_tensor
from penstock.backends.errors import InferError
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.request_checks import check_input_shape, check_shapes_cached
from penstock.server.v2 import call_parameters
from penstock.server.v2.call_parameters import DEFAULT_OPTIONS, Options, PerOutputPlan, invalid, prefix_with_id
from penstock.server.v2.decode import MAX_RANK, datatype_mismatch, inputs_mismatch, too_many_dims
from penstock.server.v2.requested_outputs import parse_outputs
from penstock.server.v2.shared_tensors import copied_bytes, set_output_targets, shared_input
from penstock.server.v2.tensors import MANY_STRINGS, from_binary, overflow, size_mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink
    from penstock.server.v2.regions import Regions

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_PARAMETERS = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    call_parameters.EMPTY_FINAL: ("bool_param",),
}
_CUSTOM = ("int64_param", "bool_param", "string_param", "double_param")
_TENSOR = {
    "shared_memory_region": "string_param", "shared_memory_offset": "int64_param",
    "shared_memory_byte_size": "int64_param", "classification": "int64_param",
}  # fmt: skip


def decode(model: Model, message: Any, sink: Sink, regions: Regions | None) -> tuple[InferRequest, Options]:
    """Decode one ModelInferRequest for its model.

    Ownership: raw tensors are views of the message's. The request's `nbytes` do not include the message itself.
    Raises: InferError; LargeRead if `regions` raises it.
    """
    options = _parse_parameters(message.parameters) if message.parameters else DEFAULT_OPTIONS
    try:
        inputs, rows, key = _decode_inputs(model, message, regions)
        wanted, plan = model.all_outputs, None
        if message.outputs:
            entries = [(each.name, tensor_parameters(each) if each.parameters else None) for each in message.outputs]
            wanted, plan = parse_outputs(model, entries, regions, hooks=options.hooks)
    except InferError as error:
        raise prefix_with_id(message.id, error) from None
    if plan is not None:
        options = options.with_plan(plan)
    request = InferRequest(model, inputs, rows, key, wanted, sink)
    request.id = message.id
    if model.in_place_devices and type(options.plan) is PerOutputPlan:
        set_output_targets(request, options.plan)
    if regions:
        shared_names = (tensor.name for tensor in message.inputs if "shared_memory_region" in tensor.parameters)
        request.nbytes = copied_bytes(request, shared_names)
    return request, options


def _parse_parameters(parameters: Mapping[str, Any]) -> Options:
    """Parse a request's parameters, checking that each key has an allowed type."""
    items: dict[str, Any] = {}
    for key, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        allowed = _PARAMETERS.get(key, _CUSTOM)
        if choice not in allowed:
            expected = f"{', '.join(allowed[:-1])}, or {allowed[-1]}" if len(allowed) > 2 else " or ".join(allowed)
            raise invalid(f"invalid value type for '{key}' parameter, expected {expected}.")
        items[key] = getattr(value, choice)
    if "binary_data_output" in items:
        raise invalid("parameter 'binary_data_output' is reserved for Triton usage and should not be specified.")
    identity = items.get("sequence_id")
    if type(identity) is int and identity < 0:
        # an id is unsigned but its field is signed: C++ clients send the upper half as negative numbers
        items["sequence_id"] = identity + (1 << 64)
    if items.get("priority", 0) < 0:
        raise invalid("invalid value for 'priority', expected value >= 0.")
    return call_parameters.parse_parameters(items, (call_parameters.EMPTY_FINAL,))[0]


def tensor_parameters(tensor: Any) -> dict[str, Any]:
    """Parse the parameters of an input or an output."""
    items: dict[str, Any] = {}
    for key, value in tensor.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        wanted = _TENSOR.get(key, choice)
        if choice is None or choice != wanted:
            text = f"invalid value type for '{key}' parameter for tensor '{tensor.name}', expected"
            raise invalid(f"{text} {wanted or 'a value'}.")
        items[key] = getattr(value, choice)
    if "shared_memory_region" not in items:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in items:
                text = f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor"
                raise invalid(f"{text} '{tensor.name}'")
    return items


def _decode_inputs(model: Model, message: Any, regions: Regions | None) -> tuple[list[Array | None], int, Key]:
    tensors, raws = message.inputs, message.raw_input_contents
    specs = model.signature.input
    by_name: dict[str, Array] = {}
    raw_index = 0
    for tensor in tensors:
        name = tensor.name
        spec = specs.get(name)
        if spec is None:
            raise inputs_mismatch(model, [each.name for each in tensors])
        if name in by_name:
            raise invalid(f"input '{name}' already exists in request")
        shape, count = _parse_shape(model, spec, tensor)
        array = _decode_shared_or_contents(model, spec, tensor, (shape, count, bool(raws)), regions)
        if array is None:
            if raw_index == len(raws):
                raise invalid(f"unable to find data for input tensor '{name}' for model '{model.name}' in request.")
            array = from_binary(model.name, spec, shape, count, memoryview(raws[raw_index]))
            raw_index += 1
        by_name[name] = array
    if raw_index != len(raws):
        text = f"got {len(raws)} raw_input_contents, but only {raw_index} of the inputs use them"
        raise invalid(f"unexpected additional input data for model '{model.name}': {text}")
    inputs: list[Array | None] = [by_name.get(spec.name) for spec in model.signature.inputs]
    if any(array is None and not spec.optional for spec, array in zip(model.signature.inputs, inputs, strict=True)):
        raise inputs_mismatch(model, list(by_name))
    rows, key = check_shapes_cached(model, tuple([None if array is None else array.shape for array in inputs]))
    return inputs, rows, key


def _parse_shape(model: Model, spec: TensorSpec, tensor: Any) -> tuple[list[int], int]:
    """Return an input's shape and its number of elements."""
    if tensor.datatype != spec.datatype:
        raise datatype_mismatch(model, spec, tensor.datatype)
    shape = list(tensor.shape)
    if len(shape) > MAX_RANK:
        raise too_many_dims(model, spec, shape)
    if shape and min(shape) < 0:
        text = f"tensor '{spec.name}' of model '{model.name}' has dimension {min(shape)}, its dimensions must be >= 0"
        raise invalid(f"shape of input {text}")
    count = math.prod(shape)
    error = overflow(spec, shape, count)
    if error is not None:
        raise error
    if spec.datatype == "BYTES" and count >= MANY_STRINGS:
        check_input_shape(model, spec, tuple(shape))
    return shape, count


def _decode_shared_or_contents(
    model: Model, spec: TensorSpec, tensor: Any, shape_count_raw: tuple[list[int], int, bool], regions: Regions | None
) -> Array | None:
    """Make an input's array from shared memory or its contents; None if its data is raw.

    `shape_count_raw` are its shape, its element count, and whether the request has any raw data.
    """
    shape, count, has_raw = shape_count_raw
    items = tensor_parameters(tensor) if tensor.parameters else None
    has_contents = tensor.HasField("contents")
    if items and "shared_memory_region" in items:
        if has_contents:
            text = f"unexpected 'content' provided when using shared memory for input tensor '{spec.name}'"
            raise invalid(f"{text} for model '{model.name}'")
        return shared_input(model, spec, shape, items, regions)
    if not has_contents:
        return None
    if has_raw:
        text = f"contents field must not be specified when using raw_input_contents for '{spec.name}'"
        raise invalid(f"{text} for model '{model.name}'")
    return _decode_contents(model, spec, tensor.contents, shape, count)


def _decode_contents(model: Model, spec: TensorSpec, contents: Any, shape: list[int], count: int) -> Array:
    """Make an array from typed contents, which FP16 and BF16 do not have."""
    field = _CONTENTS.get(spec.datatype)
    for field_descriptor, _ in contents.ListFields():
        if field_descriptor.name != field:
            text = f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model.name}'"
            raise invalid(f"{text} in '{field_descriptor.name}', expected datatype '{spec.datatype}'")
    values = () if field is None else getattr(contents, field)
    size_bytes = spec.type.size_bytes
    if len(values) != count:
        if not size_bytes:
            text = f"expected {count} strings for inference input '{spec.name}' for model '{model.name}'"
            raise invalid(f"{text}, got {len(values)}")
        raise size_mismatch(model.name, spec, shape, count, len(values) * size_bytes)
    if not size_bytes:
        array: Array = bytes_tensor(list(values))
    elif spec.type.dtype.kind in "iu" and values:
        # the values have 32 bits: converting one that is too large for the datatype would drop its upper bits
        array = np.array(values, np.uint64 if spec.type.dtype.kind == "u" else np.int64)
        bounds = np.iinfo(spec.type.dtype.str)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise invalid(f"a value of input '{spec.name}' is out of range for {spec.datatype}")
        array = array.astype(spec.type.dtype)
    else:
        array = np.array(values, spec.type.dtype)
    try:
        return array.reshape(shape)
    except (ValueError, OverflowError):
        raise invalid(f"unexpected shape for input '{spec.name}' for model '{model.name}': {shape}") from None
