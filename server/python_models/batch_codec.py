"""BatchCodec: encodes a Batch as a message for a worker, and decodes the answers to outputs. Called by host.py.

Source of the texts: python_backend and Triton's core, where they have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from penstock.backends.datatypes import BY_DTYPE
from penstock.backends.errors import Code, InferError
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.shapes.forms import Forms, forms_of, row_spans

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.spec import ModelSpec

START, END = 1, 2
_MAX_VALID_OUTPUTS = 256
_NO_PARAMETERS: Mapping[str, Any] = {}


class BatchCodec:
    """Encodes and decodes the messages of one version, by its tensors' names. It caches the shapes of valid outputs.

    `context_for` is as in ServerSide.
    """

    def __init__(self, spec: ModelSpec, context_for: Callable[[InferRequest], tuple[str, str]] | None) -> None:
        signature = spec.signature
        if signature is None:
            raise ValueError("the spec must be completed first")
        bound = spec.binding_signature or signature
        self.model = spec.name
        self.batched = signature.batched
        self.inputs = [each.name for each in signature.inputs]
        self.outputs = [each.name for each in signature.outputs]
        self._output_specs = {each.name: each for each in bound.outputs}
        self._positions = {name: position for position, name in enumerate(self.outputs)}
        self._forms = forms_of(spec)
        self._context_for = context_for
        self._valid_outputs: set[Any] = set()
        self._default_outputs = (tuple(range(len(self.outputs))), tuple(self.outputs))

    # -- to the worker -----------------------------------------------------------------------------------------

    def encode_batch(self, batch: Batch, numbers: Sequence[int]) -> tuple[bytes, list[Array | None]]:
        """Encode a Batch: the body of EXECUTE and its tensors, in the order of the requests.

        Ownership: the tensors are views of the requests' own arrays.
        """
        arrays: list[Array | None] = []
        derived = self._make_derived(self._forms, batch) if self._forms is not None and self._forms.derived else {}
        spans = list(row_spans(batch)) if derived else []
        rows = []
        for index, (request, number) in enumerate(zip(batch.requests, numbers, strict=True)):
            inputs = request.inputs if self._forms is None else self._forms.to_model(request.inputs)
            names = []
            for name, array in zip(self.inputs, inputs, strict=True):
                if array is not None:
                    names.append(name)
                    arrays.append(array)
            for name, full_array in derived.items():
                names.append(name)
                arrays.append(full_array[spans[index][0] : spans[index][1]] if self.batched else full_array)
            rows.append(self._encode_request(request, number, names))
        return orjson.dumps({"requests": rows}), arrays

    def _encode_request(self, request: InferRequest, number: int, names: list[str]) -> dict[str, Any]:
        positions, outputs = self._default_outputs
        if request.output_positions != positions:
            outputs = tuple([self.outputs[position] for position in request.output_positions])
        sequence = request.sequence
        encoded = {
            "id": request.id,
            "number": number,
            "inputs": names,
            "outputs": outputs,
            "correlation": 0 if sequence is None else sequence.id,
            "flags": 0 if sequence is None else START * sequence.start | END * sequence.end,
            "timeout_us": getattr(request, "timeout_us", 0),
            "priority": request.priority,
            "parameters": dict(getattr(request, "parameters", _NO_PARAMETERS)),
        }
        if self._context_for is not None and (context := self._context_for(request))[0]:
            encoded["context"] = context
        return encoded

    @staticmethod
    def _make_derived(forms: Forms, batch: Batch) -> dict[str, Array]:
        """Make the sequence inputs that the server derives, for all rows of the Batch."""
        rows = batch.rows
        if batch.row_positions is not None:
            rows = max(batch.span_rows, batch.row_positions[-1] + batch.requests[-1].rows)
        arrays = {}
        for form in forms.derived:
            buffer = np.empty(form.shape(batch, rows), form.spec.type.dtype)
            form.fill(buffer, batch)
            arrays[form.spec.name] = buffer
        return arrays

    # -- from the worker ---------------------------------------------------------------------------------------

    def decode_outputs(self, names: Sequence[str], arrays: Iterable[Array | None]) -> tuple[dict[str, Array], str]:
        """Map an answer's tensors by name; those that are not outputs of the model are dropped.

        Returns: the outputs, and how one of them contradicts the configuration. Raises: InferError (INTERNAL) if one is
        missing.
        """
        outputs: dict[str, Array] = {}
        contradiction = ""
        for name, array in zip(names, arrays, strict=True):
            if array is None:
                raise self._internal_error(f"output '{name}' has no tensor")
            if name not in self._positions:
                continue
            difference = self._contradiction(name, array)
            contradiction = contradiction or difference
            if self._forms is not None and not difference:
                (array,) = self._forms.to_client(self.model, (self._positions[name],), (array,))
            outputs[name] = array
        return outputs, contradiction

    def select_outputs(
        self,
        request: InferRequest,
        outputs_by_name: Mapping[str, Array],
        parameters: Mapping[str, Any],
        contradiction: str,
    ) -> Any:
        """Return the outputs that a request wants, in its order.

        `parameters` are the parameters of the answer, `contradiction` is how it contradicts the configuration.
        """
        outputs, is_missing = [], False
        for position in request.output_positions:
            array = outputs_by_name.get(self.outputs[position])
            outputs.append(array)
            if array is None and not contradiction:
                contradiction, is_missing = f"the answer lacks the requested output '{self.outputs[position]}'", True
        if not contradiction and not parameters:
            return outputs
        return CustomOutputs(
            outputs, parameters, contradiction and f"model '{self.model}': {contradiction}", incomplete=is_missing
        )

    def _contradiction(self, name: str, array: Array) -> str:
        """Describe how an output contradicts the configuration; "" if it does not."""
        seen_key = name, array.dtype, array.shape
        if seen_key in self._valid_outputs:
            return ""
        spec = self._output_specs[name]
        if array.dtype != spec.type.dtype:
            text = f"unexpected datatype {_type_name(array)} for inference output '{name}', expecting"
            return f"{text} {spec.type.config_name}"
        matches = len(array.shape) == len(spec.shape) and all(
            expected in (-1, dim) for expected, dim in zip(spec.shape, array.shape, strict=True)
        )
        if not matches and not spec.ragged:
            text = f"unexpected shape for inference output '{name}'. Expected {format_shape(spec.shape)}, got"
            return f"{text} {format_shape(array.shape)}"
        if len(self._valid_outputs) >= _MAX_VALID_OUTPUTS:
            self._valid_outputs.clear()
        self._valid_outputs.add(seen_key)
        return ""

    def _internal_error(self, text: str) -> InferError:
        return InferError(Code.INTERNAL, f"model '{self.model}': {text}")


def _type_name(array: Array) -> str:
    row = BY_DTYPE.get(array.dtype)
    return str(array.dtype) if row is None else row.config_name


def decode_error(encoded: Mapping[str, Any]) -> InferError:
    """Decode an answer's error."""
    return InferError(Code[encoded["code"]], encoded["message"])


def encode_error(error: InferError) -> dict[str, str]:
    """Encode an error."""
    return {"code": error.code.name, "message": error.message}
