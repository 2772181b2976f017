"""Decoding of a v2 infer request: JSON and binary tensors, in any mixture, into one InferRequest.

Called by the fast lane, on the event loop for small bodies and on a thread for large JSON. Every error a request can
have by itself is found here, so that no invalid request shares a batch. Error texts are Triton's (server,
`http_server.cc`, and core, `infer_request.cc`), which its clients and tests look for.
Source: KServe v2 and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import InferError
from penstock.batching.request import InferRequest
from penstock.batching.scheduling.request_checks import check_input_shape, check_shapes_cached

from . import call_parameters
from .call_parameters import (
    BINARY,
    DEFAULT_OPTIONS,
    NOT_UNSIGNED,
    Options,
    PerOutputPlan,
    invalid,
    prefix_with_id,
)
from .parsing import NOT_AN_OBJECT, parse
from .requested_outputs import parse_outputs
from .shared_tensors import copied_bytes, set_output_targets, shared_input
from .tensors import MANY_STRINGS, from_binary, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink

    from .layout import Layouts
    from .regions import Regions

_MAX_DIM = (1 << 63) - 1
MAX_RANK = 32


def _member_error(member: str, value: Any, kind: str) -> InferError:
    """Return the error for a member that is missing or of the wrong type."""
    reason = f"attempt to access JSON non-{kind} as {kind}"
    if value is None:
        reason = f"attempt to access non-existing object member '{member}'"
    return invalid(f"Unable to parse '{member}': {reason}")


def decode_and_cache(
    model: Model, body: bytes, header_bytes: int, max_depth: int, sink: Sink, layouts: Layouts
) -> tuple[InferRequest, Options]:
    """Decode a request that `layouts` did not find, and have them remember it. Raises: InferError; LargeRead."""
    decoded = decode(model, body, header_bytes, max_depth, sink, layouts.regions)
    layouts.add(*decoded, body, header_bytes)
    return decoded


def decode(
    model: Model, body: bytes, header_bytes: int, max_depth: int, sink: Sink, regions: Regions | None = None
) -> tuple[InferRequest, Options]:
    """Decode one body; `header_bytes` is the length of its JSON, -1 if it is all JSON. `regions` are those it may name.

    Ownership: binary tensors are views of `body`; shared memory is copied unless the model reads it in place.
    Raises: InferError; LargeRead.
    """
    json_bytes = len(body) if header_bytes < 0 else header_bytes
    document = parse(body if header_bytes < 0 else body[:header_bytes], max_depth)
    if type(document) is not dict:
        raise invalid(NOT_AN_OBJECT)
    request_id = document.get("id", "")
    if type(request_id) is not str:
        raise invalid(call_parameters.NO_ID)
    try:
        inputs, rows, key = _decode_inputs(model, document.get("inputs"), body, json_bytes, regions)
        parameters, outputs = document.get("parameters"), document.get("outputs")
        if parameters is None and outputs is None:
            wanted, options = model.all_outputs, DEFAULT_OPTIONS
        else:
            wanted, options = _parse_options(model, parameters, outputs, regions)
    except InferError as error:
        raise prefix_with_id(request_id, error) from None
    request = InferRequest(model, inputs, rows, key, wanted, sink)
    request.id = request_id
    request.nbytes = len(body)
    if model.in_place_devices and type(options.plan) is PerOutputPlan:
        set_output_targets(request, options.plan)
    if regions:
        request.nbytes += copied_bytes(request, _shared_input_names(document["inputs"]))
    return request, options


def decode_raw(model: Model, body: bytes, sink: Sink) -> tuple[InferRequest, Options]:
    """Decode a body that holds only the bytes of the single input, as one row; all outputs are returned as binary.

    Ownership: the input is a view of `body`. Source: Triton's raw binary request.
    Raises: InferError.
    """
    signature = model.signature
    if len(signature.inputs) != 1:
        raise invalid(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(signature.inputs)} inputs in "
            f"'{model.name}' model configuration"
        )
    spec = signature.inputs[0]
    dims = list(spec.shape[1:] if signature.batched else spec.shape)
    if spec.datatype == "BYTES":
        if dims != [1]:
            raise invalid(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        array: Array = np.array([body], np.object_)
    else:
        if dims.count(-1) > 1:
            text = "can not be deduced because there are more than one variable-sized dimension"
            raise invalid(f"The shape of the raw input '{spec.name}' {text}")
        if -1 in dims:
            others = math.prod(dim for dim in dims if dim != -1) * spec.type.size_bytes
            dims[dims.index(-1)] = len(body) // others if others else 0
        array = from_binary(model.name, spec, dims, math.prod(dims), memoryview(body))
    if signature.batched:
        array = array[np.newaxis]
    rows, key = check_shapes_cached(model, (array.shape,))
    request = InferRequest(model, [array], rows, key, model.all_outputs, sink)
    request.nbytes = len(body)
    return request, Options((BINARY,) * len(model.all_outputs))


def _decode_inputs(
    model: Model, entries: Any, body: bytes, position: int, regions: Regions | None
) -> tuple[list[Array | None], int, Key]:
    if type(entries) is not list:
        raise _member_error("inputs", entries, "array")
    signature = model.signature
    inputs: list[Array | None]
    shapes: tuple[tuple[int, ...] | None, ...]
    if len(entries) == 1 and len(signature.inputs) == 1:
        array, position = _decode_input(model, signature.inputs[0], entries[0], body, position, regions)
        inputs, shapes = [array], (array.shape,)
    else:
        inputs, position = _decode_multiple(model, entries, body, position, regions)
        shapes = tuple([None if array is None else array.shape for array in inputs])
    if position != len(body):
        raise invalid(f"unexpected additional input data for model '{model.name}'")
    rows, key = check_shapes_cached(model, shapes)
    return inputs, rows, key


def _parse_options(
    model: Model, parameters: Any, outputs: Any, regions: Regions | None
) -> tuple[tuple[int, ...], Options]:
    """Read the parameters and the requested outputs."""
    if parameters is not None and type(parameters) is not dict:
        raise invalid("Unable to parse 'parameters': attempt to access JSON non-object as object")
    options, binary = call_parameters.parse_parameters(parameters) if parameters else (DEFAULT_OPTIONS, False)
    plan: call_parameters.Plan
    if outputs is not None and type(outputs) is not list:
        raise invalid("Unable to parse 'outputs': attempt to access JSON non-array as array")
    if outputs:
        # as in Triton, `binary_data_output` applies only if no outputs are named
        entries = [(_parse_name(entry), _check_members(entry.get("parameters"), entry["name"])) for entry in outputs]
        wanted, plan = parse_outputs(model, entries, regions, hooks=options.hooks)
    else:
        wanted = model.all_outputs
        plan = (BINARY,) * len(wanted) if binary else None
    return wanted, options if plan is None else options.with_plan(plan)


def _decode_multiple(
    model: Model, entries: list[Any], body: bytes, position: int, regions: Regions | None
) -> tuple[list[Array | None], int]:
    by_name: dict[str, Array] = {}
    for entry in entries:
        name = _parse_name(entry)
        spec = model.signature.input.get(name)
        if spec is None:
            raise inputs_mismatch(model, [_parse_name(each) for each in entries])
        if name in by_name:
            raise invalid(f"input '{name}' already exists in request")
        by_name[name], position = _decode_input(model, spec, entry, body, position, regions)
    inputs: list[Array | None] = [by_name.get(spec.name) for spec in model.signature.inputs]
    for spec, array in zip(model.signature.inputs, inputs, strict=True):
        if array is None and not spec.optional:
            raise inputs_mismatch(model, list(by_name))
    return inputs, position


def _parse_name(entry: Any) -> str:
    name = entry.get("name") if type(entry) is dict else None
    if type(name) is not str:
        raise _member_error("name", name, "string")
    return name


def inputs_mismatch(model: Model, given: list[str]) -> InferError:
    """Return the error for wrong input names or a wrong number of inputs; the number is checked first, as in Triton.

    Called by gRPC's decoding too.
    """
    specs = model.signature.input
    required = sum(not spec.optional for spec in specs.values())
    if required <= len(given) <= len(specs):
        for name in given:
            if name not in specs:
                return invalid(f"unexpected inference input '{name}' for model '{model.name}'")
    missing = ",".join(f"'{name}'" for name, spec in specs.items() if not spec.optional and name not in given)
    names = ",".join(f"'{name}'" for name in given)
    expected = (
        f"{len(specs)} inputs" if required == len(specs) else f"number of inputs between {required} and {len(specs)}"
    )
    return invalid(
        f"expected {expected} but got {len(given)} inputs for model '{model.name}'. Got input(s) [{names}], "
        f"but missing required input(s) [{missing}]. Please provide all required input(s)."
    )


def _decode_input(
    model: Model, spec: TensorSpec, entry: Any, body: bytes, position: int, regions: Regions | None
) -> tuple[Array, int]:
    """Decode one entry of `inputs`; return its array and where the next binary tensor begins."""
    if type(entry) is not dict:
        raise invalid("Unable to parse 'inputs': attempt to access JSON non-object as object")
    if entry.get("name") != spec.name:
        raise inputs_mismatch(model, [_parse_name(entry)])
    datatype = entry.get("datatype")
    if datatype != spec.datatype:
        raise datatype_mismatch(model, spec, datatype)
    shape, count = _parse_shape(model, spec, entry)
    parameters = entry.get("parameters")
    decoded = None if parameters is None else _decode_binary_or_shared(model, spec, entry, body, position, regions)
    if decoded is not None:
        return decoded
    if "data" not in entry:
        raise _data_source_error(entry)
    return from_json(spec, shape, count, entry["data"]), position


def _parse_shape(model: Model, spec: TensorSpec, entry: dict[str, Any]) -> tuple[list[int], int]:
    """Return an entry's shape, checked by itself, and its number of elements."""
    shape = entry.get("shape")
    if type(shape) is not list:
        raise _member_error("shape", shape, "array")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= _MAX_DIM:
            raise invalid(f"Unable to parse 'shape': {NOT_UNSIGNED}")
    if len(shape) > MAX_RANK:
        # checked before the product, which takes forever for a million dims
        raise too_many_dims(model, spec, shape)
    count = math.prod(shape)
    if spec.datatype == "BYTES" and count >= MANY_STRINGS:
        check_input_shape(model, spec, tuple(shape))
    return shape, count


def _decode_binary_or_shared(
    model: Model, spec: TensorSpec, entry: dict[str, Any], body: bytes, position: int, regions: Regions | None
) -> tuple[Array, int] | None:
    """Decode a tensor whose parameters place it after the JSON or in shared memory; None if in neither."""
    parameters, shape = entry["parameters"], entry["shape"]
    if type(parameters) is not dict:
        raise _not_an_object(spec.name)
    if "shared_memory_region" in parameters:
        return _decode_shared(model, spec, entry, regions), position
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise invalid(f"Unable to parse 'binary_data_size': {NOT_UNSIGNED}")
    if "data" in entry:
        raise _data_source_error(entry)
    end = position + size
    if end > len(body):
        text = f"unexpected size for input '{spec.name}', expecting {end - len(body)} additional bytes"
        raise invalid(f"{text} for model '{model.name}'")
    return from_binary(model.name, spec, shape, math.prod(shape), memoryview(body)[position:end]), end


def _shared_input_names(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of decoded inputs that were in shared memory."""
    return (entry["name"] for entry in entries if "shared_memory_region" in (entry.get("parameters") or ()))


def _decode_shared(model: Model, spec: TensorSpec, entry: dict[str, Any], regions: Regions | None) -> Array:
    shape, items = entry["shape"], entry["parameters"]
    if "data" in entry or "binary_data_size" in items:
        raise _data_source_error(entry)
    return shared_input(model, spec, shape, items, regions)


def _data_source_error(entry: dict[str, Any]) -> InferError:
    """Return the error for an input with no data or several kinds of it. Source: Triton, ValidateInputContentType."""
    parameters = entry.get("parameters") or {}
    fields = (("data", entry), ("binary_data_size", parameters), ("shared_memory_region", parameters))
    present = "".join(f" '{key}'" for key, container in fields if key in container)
    return invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {f'set{present}' if present else 'no field is set'}"
    )


def too_many_dims(model: Model, spec: TensorSpec, shape: list[int]) -> InferError:
    """Return the error for an input with more dims than MAX_RANK. Called by gRPC's decoding too."""
    return invalid(f"unexpected shape for input '{spec.name}' for model '{model.name}': {len(shape)} dims")


def datatype_mismatch(model: Model, spec: TensorSpec, datatype: Any) -> InferError:
    """Return the error for an input whose datatype is not the model's. Called by gRPC's decoding too."""
    if type(datatype) is not str:
        return _member_error("datatype", datatype, "string")
    return invalid(
        f"inference input '{spec.name}' data-type is '{datatype}', but model '{model.name}' expects '{spec.datatype}'"
    )


def _check_members(parameters: Any, name: str) -> dict[str, Any] | None:
    if parameters is not None and type(parameters) is not dict:
        raise _not_an_object(name)
    return parameters


def _not_an_object(name: str) -> InferError:
    return invalid(f"Unable to parse 'parameters' of '{name}': attempt to access JSON non-object as object")
