"""Decoding a v2 infer request: JSON and binary tensors, in any mixture, into one InferRequest.

Called by the fast lane, on the event loop for small bodies and on a thread for large JSON. Everything that can be
wrong with a request on its own stops here, so that nothing wrong shares a batch. Texts are Triton's
(server, `http_server.cc`, and core, `infer_request.cc`), which its clients and tests look for.
Source: KServe v2 and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.admission import admit
from penstock.batching.request import InferRequest

from .parsing import parse
from .tensors import from_binary, from_json

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink

    from .layout import Layouts

JSON, BINARY = False, True
Plan = tuple[bool, ...] | None
"""How each wanted output travels, BINARY or JSON; None when all travel as JSON."""

_MAX_TIMEOUT_US = 1 << 53
_MAX_DIM = (1 << 63) - 1
_MAX_RANK = 32
_KEPT_SHAPES = 256
_NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
_RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."


@dataclass(frozen=True, slots=True)
class Options:
    """What a call says beside its tensors. Units: `timeout_us` in the queue, 0 for no limit of its own."""

    plan: Plan = None
    timeout_us: int = 0
    hooks: bool = True


PLAIN = Options()


def invalid(text: str) -> InferError:
    """Make the refusal of a request that is wrong in itself."""
    return InferError(Code.INVALID, text)


def _no(member: str, value: Any, kind: str) -> InferError:
    """Refuse a member that is not there, or not of its kind."""
    reason = f"attempt to access JSON non-{kind} as {kind}"
    if value is None:
        reason = f"attempt to access non-existing object member '{member}'"
    return invalid(f"Unable to parse '{member}': {reason}")


def decode_remembered(
    model: Model, body: bytes, header_bytes: int, max_depth: int, sink: Sink, layouts: Layouts
) -> tuple[InferRequest, Options]:
    """Decode as `decode` does; JSON that `layouts` remembers is not decoded again.

    Raises: InferError.
    """
    found = layouts.find(model, body, header_bytes, sink)
    if found is not None:
        return found
    found = decode(model, body, header_bytes, max_depth, sink)
    layouts.remember(*found, body, header_bytes)
    return found


def decode(model: Model, body: bytes, header_bytes: int, max_depth: int, sink: Sink) -> tuple[InferRequest, Options]:
    """Decode one body; `header_bytes` is how much of it is JSON, -1 for all.

    Ownership: binary tensors are views of `body`.
    Raises: InferError.
    """
    json_bytes = len(body) if header_bytes < 0 else header_bytes
    document = parse(body if header_bytes < 0 else body[:header_bytes], max_depth)
    if type(document) is not dict:
        raise invalid("failed to parse the request JSON buffer: the request must be a JSON object")
    request_id = document.get("id", "")
    if type(request_id) is not str:
        raise invalid("Unable to parse 'id': attempt to access JSON non-string as string")
    try:
        inputs, rows, key = _inputs(model, document.get("inputs"), body, json_bytes)
        parameters, outputs = document.get("parameters"), document.get("outputs")
        if parameters is None and outputs is None:
            wanted, options = model.all_outputs, PLAIN
        else:
            wanted, options = _said(model, parameters, outputs)
    except InferError as error:
        if error.code is Code.INVALID and not error.message.startswith("Unable to parse"):
            raise invalid(f"[request id: {request_id or '<id_unknown>'}] {error.message}") from None
        raise
    request = InferRequest(model, inputs, rows, key, wanted, sink)
    request.id = request_id
    request.nbytes = len(body)
    return request, options


def _inputs(model: Model, entries: Any, body: bytes, position: int) -> tuple[list[Array | None], int, Key]:
    if type(entries) is not list:
        raise _no("inputs", entries, "array")
    signature = model.signature
    inputs: list[Array | None]
    shapes: tuple[tuple[int, ...] | None, ...]
    if len(entries) == 1 and len(signature.inputs) == 1:
        array, position = _tensor(model, signature.inputs[0], entries[0], body, position)
        inputs, shapes = [array], (array.shape,)
    else:
        inputs, position = _several(model, entries, body, position)
        shapes = tuple([None if array is None else array.shape for array in inputs])
    if position != len(body):
        raise invalid(f"unexpected additional input data for model '{model.name}'")
    known = model.admitted.get(shapes)
    if known is None:
        known = admit(model.name, signature, model.max_rows, shapes)
        if len(model.admitted) >= _KEPT_SHAPES:
            model.admitted.clear()
        model.admitted[shapes] = known
    return inputs, known[0], known[1]


def _said(model: Model, parameters: Any, outputs: Any) -> tuple[tuple[int, ...], Options]:
    """Read the parameters and the outputs asked for."""
    binary, timeout_us, hooks = (False, 0, True) if parameters is None else _parameters(parameters)
    if outputs:
        # as Triton: `binary_data_output` is about outputs that are not named
        wanted, plan = _outputs(model, outputs)
    else:
        if outputs is not None and type(outputs) is not list:
            raise invalid("Unable to parse 'outputs': attempt to access JSON non-array as array")
        wanted = model.all_outputs
        plan = (BINARY,) * len(wanted) if binary else None
    return wanted, Options(plan, timeout_us, hooks)


def _several(model: Model, entries: list[Any], body: bytes, position: int) -> tuple[list[Array | None], int]:
    by_name: dict[str, Array] = {}
    for entry in entries:
        name = _name(entry)
        spec = model.signature.input.get(name)
        if spec is None:
            raise _wrong_inputs(model, [_name(each) for each in entries])
        if name in by_name:
            raise invalid(f"input '{name}' already exists in request")
        by_name[name], position = _tensor(model, spec, entry, body, position)
    inputs: list[Array | None] = [by_name.get(spec.name) for spec in model.signature.inputs]
    for spec, array in zip(model.signature.inputs, inputs, strict=True):
        if array is None and not spec.optional:
            raise _wrong_inputs(model, list(by_name))
    return inputs, position


def _name(entry: Any) -> str:
    name = entry.get("name") if type(entry) is dict else None
    if type(name) is not str:
        raise _no("name", name, "string")
    return name


def _wrong_inputs(model: Model, got: list[str]) -> InferError:
    known = model.signature.input
    for name in got:
        if name not in known:
            return invalid(f"unexpected inference input '{name}' for model '{model.name}'")
    missing = ",".join(f"'{name}'" for name, spec in known.items() if not spec.optional and name not in got)
    names = ",".join(f"'{name}'" for name in got)
    required = sum(not spec.optional for spec in known.values())
    expected = (
        f"{len(known)} inputs" if required == len(known) else f"number of inputs between {required} and {len(known)}"
    )
    return invalid(
        f"expected {expected} but got {len(got)} inputs for model '{model.name}'. Got input(s) [{names}], "
        f"but missing required input(s) [{missing}]. Please provide all required input(s)."
    )


def _tensor(model: Model, spec: TensorSpec, entry: Any, body: bytes, position: int) -> tuple[Array, int]:
    """Decode one entry of `inputs`; give its array and where the next binary tensor begins."""
    if type(entry) is not dict:
        raise invalid("Unable to parse 'inputs': attempt to access JSON non-object as object")
    if entry.get("name") != spec.name:
        raise _wrong_inputs(model, [_name(entry)])
    datatype = entry.get("datatype")
    if datatype != spec.datatype:
        raise _wrong_datatype(model, spec, datatype)
    shape = entry.get("shape")
    if type(shape) is not list:
        raise _no("shape", shape, "array")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= _MAX_DIM:
            raise invalid(f"Unable to parse 'shape': {_NOT_UNSIGNED}")
    if len(shape) > _MAX_RANK:
        # before the product is taken, which of a million dims takes for ever
        raise invalid(f"unexpected shape for input '{spec.name}' for model '{model.name}': {len(shape)} dims")
    parameters = entry.get("parameters")
    size = None if parameters is None else _binary_size(parameters, spec.name)
    if size is not None:
        return _binary(model, spec, entry, body, position, size)
    if "data" not in entry:
        raise invalid(f"must specify 'data' field in request input: '{spec.name}'")
    return from_json(spec, shape, math.prod(shape), entry["data"]), position


def _binary(
    model: Model, spec: TensorSpec, entry: dict[str, Any], body: bytes, position: int, size: int
) -> tuple[Array, int]:
    if "data" in entry:
        raise invalid(f"must not specify both 'data' and 'binary_data_size' for input '{spec.name}'")
    end = position + size
    if end > len(body):
        text = f"unexpected size for input '{spec.name}', expecting {end - len(body)} additional bytes"
        raise invalid(f"{text} for model '{model.name}'")
    shape = entry["shape"]
    return from_binary(model.name, spec, shape, math.prod(shape), memoryview(body)[position:end]), end


def _wrong_datatype(model: Model, spec: TensorSpec, datatype: Any) -> InferError:
    if type(datatype) is not str:
        return _no("datatype", datatype, "string")
    return invalid(
        f"inference input '{spec.name}' data-type is '{datatype}', but model '{model.name}' expects '{spec.datatype}'"
    )


def _binary_size(parameters: Any, name: str) -> int | None:
    if type(parameters) is not dict:
        raise invalid(f"Unable to parse 'parameters' of '{name}': attempt to access JSON non-object as object")
    if "shared_memory_region" in parameters:
        raise InferError(Code.UNSUPPORTED, f"'{name}': shared memory is not supported")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise invalid(f"Unable to parse 'binary_data_size': {_NOT_UNSIGNED}")
    return size


def _parameters(parameters: Any) -> tuple[bool, int, bool]:
    """Read the request's parameters: whether outputs travel as binary, the timeout, whether hooks run."""
    if type(parameters) is not dict:
        raise invalid("Unable to parse 'parameters': attempt to access JSON non-object as object")
    for key, value in parameters.items():
        if key.startswith("triton_"):
            raise invalid(_RESERVED)
        if type(value) not in (str, int, float, bool):
            text = f"parameter '{key}' has invalid type. It should be either 'int', 'bool', 'string' or 'double'."
            raise invalid(text)
    _sequence(parameters)
    for key in ("timeout", "priority"):
        value = parameters.get(key, 0)
        if type(value) is not int or value < 0:
            raise invalid(f"Unable to parse '{key}': {_NOT_UNSIGNED}")
    return (
        _flag(parameters, "binary_data_output", default=False),
        min(parameters.get("timeout", 0), _MAX_TIMEOUT_US),
        _flag(parameters, "hooks", default=True),
    )


def _flag(parameters: dict[str, Any], key: str, *, default: bool) -> bool:
    value = parameters.get(key, default)
    if type(value) is not bool:
        raise invalid(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean")
    return value


def _sequence(parameters: dict[str, Any]) -> None:
    _flag(parameters, "sequence_start", default=False)
    _flag(parameters, "sequence_end", default=False)
    if type(parameters.get("sequence_id", 0)) not in (int, str):
        raise invalid("Unable to parse 'sequence_id': attempt to access JSON non-string as string")


def _outputs(model: Model, outputs: Any) -> tuple[tuple[int, ...], Plan]:
    if type(outputs) is not list:
        raise invalid("Unable to parse 'outputs': attempt to access JSON non-array as array")
    known = model.signature.output
    wanted: dict[int, bool] = {}
    for entry in outputs:
        name = _name(entry)
        spec = known.get(name)
        if spec is None:
            raise invalid(f"unexpected inference output '{name}' for model '{model.name}'")
        position = model.signature.outputs.index(spec)
        if position in wanted:
            raise invalid(f"output '{name}' already exists in request")
        if position not in model.all_outputs:
            raise InferError(
                Code.UNSUPPORTED, f"output '{name}' of model '{model.name}' is no tensor; only hooks see it"
            )
        wanted[position] = _output_is_binary(entry.get("parameters"), name)
    return tuple(wanted), tuple(wanted.values()) if any(wanted.values()) else None


def _output_is_binary(parameters: Any, name: str) -> bool:
    if parameters is None:
        return JSON
    if type(parameters) is not dict:
        raise invalid(f"Unable to parse 'parameters' of '{name}': attempt to access JSON non-object as object")
    if "shared_memory_region" in parameters:
        raise InferError(Code.UNSUPPORTED, f"'{name}': shared memory is not supported")
    if parameters.get("classification", 0) != 0:
        raise InferError(Code.UNSUPPORTED, f"'{name}': classification is not supported")
    return _flag(parameters, "binary_data", default=JSON)
