"""The part of an answer that Cortex's tracker counts: its class, or its value.

Called by `conversions.py`, where the answer is still an object; `prediction_metrics.py` counts.
Source: Cortex 0.10, extract_prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tracked_value(tracker: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """Return what is counted: `class`, `value`, or a `warning` with the reason if nothing is; {} for an answer of None.

    Types must match exactly: a bool is not an int, and numpy's numbers are neither int nor float.
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
