"""Cortex's Conversions: its rules for the values of one model, and its error texts.

Called on a Replica's thread or in its process, and on the event loop if a model lacks the hook or the hook runs inline.
The code of an InferError selects the answer of `service.py`: INVALID is `prediction failed: ` and its message, UNKNOWN
an answer that cannot be encoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.hooks.conversions import Conversions, ModelDescription

from . import debugging
from .encode import to_json
from .errors import cortex_error, unexpected_error
from .onnx_values import OnnxValues
from .tensor_values import TensorValues


class ValueRules(Protocol):
    """The rules for one kind of model."""

    signatures: tuple[Any, Any]

    def to_inputs(self, value: Any) -> list[Array | None]:
        """Make the model's inputs, in its order. Raises: InferError."""

    def to_prediction(self, outputs: Sequence[Any]) -> Any:
        """Make the argument of post_inference. Raises: InferError."""


class CortexConversions:
    """The rules for one API's model. `parameters`: `debug` logs values, `tracked` adds what is counted to answers."""

    def __init__(self, values: ValueRules, settings: Mapping[str, Any]) -> None:
        self.signatures = values.signatures
        self._values = values
        self._handler = str(settings.get("handler") or "")
        self._tracker: Mapping[str, Any] | None = settings.get("tracker")

    def to_inputs(self, value: Any, parameters: Mapping[str, Any]) -> list[Array | None]:
        """See `Conversions`, as for the others."""
        if parameters.get("debug") is True and self._handler:
            debugging.log_value("pre_inference", value)
        return self._values.to_inputs(value)

    def to_prediction(self, outputs: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
        """Return a list of all outputs, or a dict of flat lists for TensorFlow."""
        prediction = self._values.to_prediction(outputs)
        if parameters.get("debug") is True:
            debugging.log_value("inference", prediction)
        return prediction

    def encode_answer(self, result: Any, parameters: Mapping[str, Any]) -> bytes:
        """Return JSON and a newline; if requested in `parameters`, after a line of JSON with what is tracked."""
        if parameters.get("debug") is True and self._handler:
            debugging.log_value("post_inference", result)
        body = to_json(result)
        if parameters.get("tracked") is not True:
            return body
        tracked = {} if self._tracker is None else tracked_value(self._tracker, result)
        return _encode_line(tracked) + b"\n" + body

    def error_for(self, hook: str, error: BaseException) -> InferError | None:
        """Return an error that names the file, the hook, and any exception raised."""
        try:
            text = str(error)
        except Exception as other:  # noqa: BLE001 - of a user's class, whose failure was reported instead
            return unexpected_error(_error_text(other))
        return cortex_error(self._handler, f"{hook} request handler", text, "runtime exception")


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - as above
        return type(error).__name__


def _encode_line(tracked: Mapping[str, Any]) -> bytes:
    """Encode what is tracked in one line of JSON."""
    if "class" in tracked:
        try:
            return orjson.dumps(tracked)  # 0.3 us, where json takes 3
        except TypeError:  # a lone surrogate
            pass
    return json.dumps(tracked).encode()


def tracked_value(tracker: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """Return what is counted: `class`, `value`, or a `warning` with the reason if nothing is; {} for an answer of None.

    Types must match exactly: a bool is not an int, and numpy's numbers are neither int nor float.
    Source: Cortex 0.10, extract_prediction.
    """
    if answer is None:
        return {}
    key = tracker.get("key")
    if key:
        if type(answer) is not dict:
            text = f"expected prediction to be of type dict but found '{type(answer)}'"
            return {"warning": f"failed to track key '{key}': {text}"}
        answer = answer.get(key)
        if answer is None:
            return {"warning": f"failed to track key '{key}': not found in prediction"}
    if tracker["model_type"] == "classification":
        if type(answer) is not str and type(answer) is not int:
            return _type_warning("classification", "str", answer)
        return {"class": str(answer)}
    if type(answer) is not float and type(answer) is not int:
        return _type_warning("regression", "float", answer)
    try:
        return {"value": float(answer)}
    except OverflowError as error:
        return {"warning": str(error)}


def _type_warning(model_type: str, wanted: str, answer: Any) -> dict[str, Any]:
    found = f"expected type '{wanted}' or 'int' but encountered '{type(answer)}'"
    return {"warning": f"failed to track {model_type} prediction: {found}"}


def conversions(description: ModelDescription) -> Conversions:
    """Return Cortex's rules for a model.

    Raises: InferError (UNSUPPORTED) for another kind of model, or a TensorFlow input of an unsupported type.
    """
    kind = description.settings.get("kind")
    if kind == "onnx":
        return CortexConversions(OnnxValues(description), description.settings)
    if kind == "tensorflow":
        return CortexConversions(TensorValues(description), description.settings)
    raise InferError(Code.UNSUPPORTED, f"Cortex serves ONNX and TensorFlow models, not {kind!r}")
