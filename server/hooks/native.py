"""Penstock's own Conversions.

Called on a replica's thread or in its process, and on the event loop if a model lacks the hook or the hook runs inline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import InferError

from .conversions import Conversions, ModelDescription
from .convert import to_inputs, to_prediction
from .encode import to_json


class Native:
    """The rules of models that name no dialect. `signatures` are lists of Nodes, one for each side."""

    def __init__(self, description: ModelDescription) -> None:
        self._signature = description.signature
        # if there are Nodes there are hooks, and the value comes from pre_inference; otherwise it comes from a client
        self._error_prefix = "pre_inference returned a value that the model cannot take: " if description.inputs else ""
        self.signatures: tuple[Any, Any] = (list(description.inputs), list(description.outputs))

    def to_inputs(self, value: Any, _: Mapping[str, Any]) -> list[Array | None]:
        """Convert a value; see `Conversions`, also for the other methods."""
        try:
            return to_inputs(value, self._signature)
        except InferError as error:
            raise InferError(error.code, f"{self._error_prefix}{error.message}") from error

    def to_prediction(self, outputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
        """Return a list of arrays and dicts."""
        return to_prediction(outputs, self._signature)

    def encode_answer(self, result: Any, _: Mapping[str, Any]) -> bytes:
        """Return JSON."""
        return to_json(result)

    def error_for(self, hook: str, error: BaseException) -> InferError | None:
        """Leave the error to `call.py`."""


def conversions(description: ModelDescription) -> Conversions:
    """Return Penstock's own rules for a model."""
    return Native(description)
