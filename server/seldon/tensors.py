"""Tensors: a component as a model of the v2 protocol: its Signature, and its requests in messages to a worker.

Called by loading.py and crew.py. inside/rows.py is the worker's side.

A message of kind TENSORS: JSON, {"inputs": [[name, datatype]], "outputs": [[name, datatype or ""]], "rows": [of each
request]}, and the requests' tensors, request by request. Several requests share a batch. Its answer: one byte,
TOGETHER, APART or NEVER. After TOGETHER follows JSON, for each request an error, {"code", "message"}, or its outputs,
{"outputs": [positions], "parameters", "metrics"}; their tensors are in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.running.custom_outputs import CustomOutputs

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest

DEFAULT = {"input": TensorSpec("input", "FP64", (-1, -1)), "output": TensorSpec("output", "FP64", (-1, -1))}
"""The inputs, or outputs, of a component whose metadata does not declare them as tensors."""


def signature_of(metadata: Mapping[str, Any] | None, *, batched: bool) -> Signature:
    """Read a component's Signature from its metadata, if that has tensors of the v2 protocol.

    A side with any tensor of another kind becomes DEFAULT. Shapes: the first declared axis counts rows, and is free. A
    missing shape is one free axis after the rows; an empty one is rows alone.
    """
    declared = metadata or {}
    return Signature(_tensor_specs(declared, "input"), _tensor_specs(declared, "output"), batched=batched)


def _tensor_specs(metadata: Mapping[str, Any], side: str) -> tuple[TensorSpec, ...]:
    entries = metadata.get(f"{side}s") or []
    found = []
    for number, entry in enumerate(entries):
        datatype = entry.get("datatype") if isinstance(entry, dict) and "messagetype" not in entry else None
        if datatype not in DATATYPES:
            return (DEFAULT[side],)
        name = entry.get("name") or (side if len(entries) == 1 else f"{side}_{number}")
        dims = entry.get("shape")
        shape = (-1, -1) if dims is None else (-1, *(int(dim) if dim >= 0 else -1 for dim in dims[1:]))
        found.append(TensorSpec(name, datatype, shape))
    if len({spec.name for spec in found}) < len(found):
        return (DEFAULT[side],)
    return tuple(found) or (DEFAULT[side],)


class TensorCodec:
    """Encodes and decodes the messages of one component."""

    def __init__(self, model: str, signature: Signature) -> None:
        self._model = model
        self._outputs = signature.outputs
        inputs = [(spec.name, spec.datatype) for spec in signature.inputs]
        # an undeclared output keeps its own datatype
        outputs = [(spec.name, "" if spec is DEFAULT["output"] else spec.datatype) for spec in signature.outputs]
        self._message_start = orjson.dumps({"inputs": inputs, "outputs": outputs})[:-1]

    def pack(self, requests: Sequence[InferRequest]) -> tuple[bytes, list[Array | None]]:
        """Encode requests. Ownership: the tensors are the requests' own."""
        rows = orjson.dumps([request.rows for request in requests])
        arrays = [array for request in requests for array in request.inputs]
        return self._message_start + b',"rows":' + rows + b"}", arrays

    def distribute(self, requests: Sequence[InferRequest], body: bytes, arrays: Sequence[Array | None]) -> list[Any]:
        """Give each request its outputs, or its error, from the bytes after TOGETHER.

        Returns: the metrics of each, None for none.
        """
        offset = 0
        metrics = []
        for request, result in zip(requests, orjson.loads(body), strict=True):
            metrics.append(result.get("metrics"))
            if "code" in result:
                request.error = InferError(Code[result["code"]], result["message"])
                continue
            positions = result["outputs"]
            arrays_by_position = dict(zip(positions, arrays[offset : offset + len(positions)], strict=True))
            offset += len(positions)
            request.outputs = self._wanted_outputs(request, arrays_by_position, result.get("parameters"))
        return metrics

    def _wanted_outputs(self, request: InferRequest, found: Mapping[int, Any], parameters: Any) -> list[Any]:
        """Return a request's wanted outputs; as CustomOutputs if something differs from what was declared."""
        outputs, problem = [], ""
        for position in request.output_positions:
            array, spec = found.get(position), self._outputs[position]
            outputs.append(array)
            if array is None:
                problem = problem or f"the answer lacks the requested output '{spec.name}'"
            elif array.dtype != spec.type.dtype:
                problem = problem or f"output '{spec.name}' has {array.dtype} values, not {spec.datatype}"
        if problem or parameters:
            return CustomOutputs(outputs, parameters or {}, problem and f"model '{self._model}': {problem}")
        return outputs
