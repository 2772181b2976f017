"""Pages: the answers of a Cortex API other than predictions, and the bodies of its errors. Pure.

Called by `service.py`. Source: Cortex 0.9 and 0.10 (`/signature`), 0.11 (the summary), Werkzeug 0.16 (texts).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backends.errors import Code, InferError

from .onnx_values import TYPES

HTML, JSON = b"text/html; charset=utf-8", b"application/json"
NOT_FOUND = (
    "404 Not Found: The requested URL was not found on the server. If you entered the URL manually please check your "
    "spelling and try again."
)
NOT_ALLOWED = "405 Method Not Allowed: The method is not allowed for the requested URL."
MALFORMED = {"onnx": b"malformed json", "tensorflow": b"Malformed JSON"}
READY, NOT_READY = b'{"ok":true}\n', b'{"ok":false}\n'
_MESSAGE = "make a prediction by sending a post request to this endpoint with a json sample"

_TENSORFLOW = {"DT_FLOAT": "float32", "DT_DOUBLE": "float64", "DT_HALF": "float16"}
"""The name of any other type is the part after `DT_`, in lower case."""
_TEMPORARY_CODES = frozenset((Code.NOT_FOUND, Code.NOT_READY, Code.OVERLOADED, Code.EXPIRED))
Document = dict[str, dict[str, Any]]


def onnx_signature(inputs: Sequence[Any]) -> Document:
    """Describe the inputs of an ONNX model, as reported by its runtime: numpy's names, null for a free axis."""
    return {node.name: {"shape": list(node.shape), "type": TYPES.get(node.type, node.type)} for node in inputs}


def tensorflow_signature(described: Mapping[str, Any]) -> Document:
    """Describe the inputs of the selected signature of a TensorFlow model, -1 for a free axis.

    The original failed for an input without a shape or of unknown rank: here they are [] and null.
    """
    inputs = described["signature_def"][described["signature_key"]].get("inputs", {})
    return {name: {"shape": _shape(tensor), "type": _type(tensor)} for name, tensor in inputs.items()}


def _shape(tensor: Mapping[str, Any]) -> list[int] | None:
    shape = tensor.get("tensorShape", {})
    return None if shape.get("unknownRank") else [int(dim.get("size", 0)) for dim in shape.get("dim", ())]


def _type(tensor: Mapping[str, Any]) -> str:
    dtype = tensor.get("dtype", "DT_INVALID")
    return _TENSORFLOW.get(dtype) or dtype.removeprefix("DT_").lower()


def signature_page(signature: Document) -> bytes:
    """Encode the signature document of 0.9 and 0.10."""
    return encode_json({"signature": signature})


def summary_page(signature: Document) -> bytes:
    """Encode the answer of 0.11 to GET on the endpoint."""
    return encode_json({"message": _MESSAGE, "model_signature": signature})


def error_page(text: str) -> bytes:
    """Encode the body of an error other than a failed prediction."""
    return encode_json({"error": text})


def encode_json(value: Any) -> bytes:
    """Encode JSON as Flask does: compact, sorted keys, ASCII, a final line end."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def error_response(error: InferError) -> tuple[int, bytes, bytes]:
    """Return the status, body and content type that answer an error."""
    if error.code is Code.UNKNOWN:
        return 500, error_page(error.message), JSON
    text = f"prediction failed: {error.message}"
    return 503 if error.code in _TEMPORARY_CODES else 406, text.encode("utf-8", "replace"), HTML
