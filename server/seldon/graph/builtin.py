"""Built-in nodes, which need no user code. Called by walk.py.

Source: Seldon Core 1.17.1, the executor (RANDOM_ABTEST), and the Java engine before it (the other three), which the
executor no longer had.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from .message_codecs import GraphError
from .nodes import ABTEST, GraphNode

Dict = dict[str, Any]
CLASSES, VALUES = ("class0", "class1", "class2"), (0.1, 0.9, 0.5)
METRICS = (("mymetric_counter", "COUNTER", 1), ("mymetric_gauge", "GAUGE", 100), ("mymetric_timer", "TIMER", 22.1))


def route(node: GraphNode, rng: random.Random) -> int:
    """Choose a child: for an A/B test by `ratioA`, the share of the first child, one half by default."""
    if node.implementation != ABTEST:
        return 0
    ratios = [each["value"] for each in node.parameters if each["name"] == "ratioA"]
    return 0 if rng.random() < (float(ratios[0]) if ratios else 0.5) else 1


def predict(message: Dict) -> Dict:
    """Answer like the original's constant model: texts and bytes are echoed, all else gets three numbers."""
    answer: Dict = {key: message[key] for key in ("strData", "binData") if key in message}
    if not answer or "data" in message:
        answer = {"data": {"names": [*CLASSES], "tensor": {"shape": [1, len(VALUES)], "values": [*VALUES]}}}
    meta = _merge_meta([message])
    meta["metrics"] = [*meta.get("metrics", ()), *({"key": k, "type": t, "value": v} for k, t, v in METRICS)]
    return {**answer, "meta": meta}


def average(messages: Sequence[Dict]) -> Dict:
    """Return the mean of arrays of one shape, encoded like the first. Raises: GraphError."""
    arrays = [_array(message) for message in messages]
    first = arrays[0]
    for array in arrays[1:]:
        if array.shape != first.shape:
            raise GraphError(f"an average needs arrays of the same shape, not {first.shape} and {array.shape}")
    mean = sum(arrays[1:], first) / len(arrays)
    data: Dict = messages[0]["data"]
    content = (
        {"tensor": {"shape": [*first.shape], "values": mean.ravel().tolist()}}
        if "tensor" in data
        else {"ndarray": mean.tolist()}
    )
    names = {"names": data["names"]} if "names" in data else {}
    return {"data": {**names, **content}, "meta": _merge_meta(messages)}


def _array(message: Dict) -> Any:
    content = message.get("data")
    try:
        if "tensor" in content:  # type: ignore[operator]
            tensor = content["tensor"]  # type: ignore[index]
            array = np.array(tensor["values"], np.float64).reshape([int(length) for length in tensor["shape"]])
        else:
            array = np.array(content["ndarray"], np.float64)  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise GraphError("an average needs arrays of numbers, as tensor or ndarray") from None
    if array.ndim != 2:
        raise GraphError(f"an average needs arrays of two dimensions, not {array.ndim}")
    return array


def _merge_meta(messages: Sequence[Dict]) -> Dict:
    """Merge the `meta` of messages, as a component's `aggregate` does."""
    metas: list[Dict] = [message["meta"] for message in messages if isinstance(message.get("meta"), dict)]
    merged: Dict = {}
    for meta in metas:
        for key in ("tags", "requestPath"):
            if isinstance(meta.get(key), dict) and meta[key]:
                merged[key] = merged.get(key, {}) | meta[key]
        if isinstance(meta.get("metrics"), list):
            merged["metrics"] = [*merged.get("metrics", ()), *meta["metrics"]]
    if metas and metas[0].get("puid"):
        merged["puid"] = metas[0]["puid"]
    return merged
