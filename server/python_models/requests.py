"""Requests: converts a Batch to messages for a worker, and the answers to outputs. Called by host.py.

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
_KEPT = 256
_NONE: Mapping[str, Any] = {}


class Names:
    """The names of a version's tensors in messages. It remembers the shapes of correct answers.

    `context_for` is as in ServerSide.
    """

    def __init__(
        self, spec: ModelSpec, context_for: Callable[[InferRequest], tuple[str, str]] | None = None
    ) -> None:  # fmt: skip
        signature = spec.signature
        if signature is None:
            raise ValueError("the spec must be completed first")
        bound = spec.binding_signature or signature
        self.model = spec.name
        self.batched = signature.batched
        self.inputs = [each.name for each in signature.inputs]
        self.outputs = [each.name for each in signature.outputs]
        self._bound = {each.name: each for each in bound.outputs}
        self._positions = {name: position for position, name in enumerate(self.outputs)}
        self._forms = forms_of(spec)
        self._context_for = context_for
        self._passed: set[Any] = set()
        self._all = (tuple(range(len(self.outputs))), tuple(self.outputs))

    # -- to the worker -----------------------------------------------------------------------------------------

    def packed(self, batch: Batch, numbers: Sequence[int]) -> tuple[bytes, list[Array | None]]:
        """Encode a Batch: the body of EXECUTE and its tensors, in the order of the requests.

        Ownership: the tensors are views of the requests' own arrays.
        """
        arrays: list[Array | None] = []
        derived = self._derived(self._forms, batch) if self._forms is not None and self._forms.derived else {}
        places = list(row_spans(batch)) if derived else []
        rows = []
        for at, (request, number) in enumerate(zip(batch.requests, numbers, strict=True)):
            inputs = request.inputs if self._forms is None else self._forms.to_model(request.inputs)
            names = []
            for name, array in zip(self.inputs, inputs, strict=True):
                if array is not None:
                    names.append(name)
                    arrays.append(array)
            for name, whole in derived.items():
                names.append(name)
                arrays.append(whole[places[at][0] : places[at][1]] if self.batched else whole)
            rows.append(self._request(request, number, names))
        return orjson.dumps({"requests": rows}), arrays

    def _request(self, request: InferRequest, number: int, names: list[str]) -> dict[str, Any]:
        positions, outputs = self._all
        if request.output_positions != positions:
            outputs = tuple([self.outputs[position] for position in request.output_positions])
        sequence = request.sequence
        said = {
            "id": request.id,
            "number": number,
            "inputs": names,
            "outputs": outputs,
            "correlation": 0 if sequence is None else sequence.id,
            "flags": 0 if sequence is None else START * sequence.start | END * sequence.end,
            "timeout_us": getattr(request, "timeout_us", 0),
            "priority": request.priority,
            "parameters": dict(getattr(request, "parameters", _NONE)),
        }
        if self._context_for is not None and (context := self._context_for(request))[0]:
            said["context"] = context
        return said

    @staticmethod
    def _derived(forms: Forms, batch: Batch) -> dict[str, Array]:
        """Make the sequence inputs that the server derives, for all rows of the Batch."""
        rows = batch.rows
        if batch.row_positions is not None:
            rows = max(batch.span_rows, batch.row_positions[-1] + batch.requests[-1].rows)
        made = {}
        for each in forms.derived:
            buffer = np.empty(each.shape(batch, rows), each.spec.type.dtype)
            each.fill(buffer, batch)
            made[each.spec.name] = buffer
        return made

    # -- from the worker ---------------------------------------------------------------------------------------

    def outputs_of(self, names: Sequence[str], arrays: Iterable[Array | None]) -> tuple[dict[str, Array], str]:
        """Map an answer's tensors by name; those that are not outputs of the model are dropped.

        Returns: the outputs, and how one of them contradicts the configuration. Raises: InferError (INTERNAL) if one is
        missing.
        """
        found: dict[str, Array] = {}
        wrong = ""
        for name, array in zip(names, arrays, strict=True):
            if array is None:
                raise self._wrong(f"output '{name}' has no tensor")
            if name not in self._positions:
                continue
            differs = self._differs(name, array)
            wrong = wrong or differs
            if self._forms is not None and not differs:
                (array,) = self._forms.to_client(self.model, (self._positions[name],), (array,))
            found[name] = array
        return found, wrong

    def in_order(self, request: InferRequest, found: Mapping[str, Array], said: Mapping[str, Any], wrong: str) -> Any:
        """Return the outputs that a request wants, in its order.

        `said` are the parameters of the answer, `wrong` is how it contradicts the configuration.
        """
        outputs, lacking = [], False
        for position in request.output_positions:
            array = found.get(self.outputs[position])
            outputs.append(array)
            if array is None and not wrong:
                wrong, lacking = f"the answer lacks the requested output '{self.outputs[position]}'", True
        if not wrong and not said:
            return outputs
        return CustomOutputs(outputs, said, wrong and f"model '{self.model}': {wrong}", incomplete=lacking)

    def _differs(self, name: str, array: Array) -> str:
        """Describe how an output contradicts the configuration; "" if it does not."""
        seen = name, array.dtype, array.shape
        if seen in self._passed:
            return ""
        spec = self._bound[name]
        if array.dtype != spec.type.dtype:
            text = f"unexpected datatype {_type_of(array)} for inference output '{name}', expecting"
            return f"{text} {spec.type.config_name}"
        fits = len(array.shape) == len(spec.shape) and all(
            want in (-1, dim) for want, dim in zip(spec.shape, array.shape, strict=True)
        )
        if not fits and not spec.ragged:
            text = f"unexpected shape for inference output '{name}'. Expected {format_shape(spec.shape)}, got"
            return f"{text} {format_shape(array.shape)}"
        if len(self._passed) >= _KEPT:
            self._passed.clear()
        self._passed.add(seen)
        return ""

    def _wrong(self, text: str) -> InferError:
        return InferError(Code.INTERNAL, f"model '{self.model}': {text}")


def _type_of(array: Array) -> str:
    row = BY_DTYPE.get(array.dtype)
    return str(array.dtype) if row is None else row.config_name


def error_of(said: Mapping[str, Any]) -> InferError:
    """Decode an answer's error."""
    return InferError(Code[said["code"]], said["message"])


def error_said(error: InferError) -> dict[str, str]:
    """Encode an error."""
    return {"code": error.code.name, "message": error.message}
