"""Payloads: decodes the payload of a request's message, and encodes arrays. JSON only: protobuf.py is for RPCs.

Importable without a component, and without seldon_core until a request is rejected. Source: seldon-core 1.17.1,
utils.py.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import orjson

from penstock.server.json_text import may_have_long_integers

NUMERIC = frozenset("iufcm")
"""The kinds of dtypes that numpy counts as numbers; bool is not one."""


def loads(body: bytes) -> Any:
    """Parse JSON as Python's json does, with NaN, and integers of any size. Raises: ValueError, RecursionError."""
    if not may_have_long_integers(body):
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
    return json.loads(body)


def split_message(request: Any) -> tuple[Any, Any, Any, str]:
    """Split a message: data before jsonData before strData before binData.

    Returns: the payload for user code; the meta and the `data`, None if missing; and which of the four it is. Raises:
    SeldonMicroserviceException, and Python's and numpy's exceptions for wrong values.
    """
    if not isinstance(request, dict):
        raise _invalid(request)
    meta = request.get("meta")
    if "data" in request:
        datadef = request["data"]
        if "tensor" in datadef:
            tensor = datadef["tensor"]
            return np.array(tensor["values"]).reshape(tensor["shape"]), meta, datadef, "data"
        if "ndarray" in datadef:
            return np.array(datadef["ndarray"]), meta, datadef, "data"
        if "tftensor" in datadef:
            return _read_tftensor(datadef["tftensor"]), meta, datadef, "data"
        return np.array([]), meta, datadef, "data"
    if "jsonData" in request:
        return request["jsonData"], meta, None, "jsonData"
    if "strData" in request:
        return request["strData"], meta, None, "strData"
    if "binData" in request:
        return base64.b64decode(request["binData"]), meta, None, "binData"
    raise _invalid(request)


def names_of(datadef: Any) -> Any:
    """Return the names that user code receives with a payload."""
    return datadef["names"] if datadef and "names" in datadef else []


def datadef(data_type: str, array: Any, names: Any = ()) -> dict[str, Any]:
    """Encode an array as the `data` of a message: a tensor, a tftensor, or else an ndarray."""
    encoded: dict[str, Any] = {"names": list(names) if names == () else names}
    if data_type == "tensor":
        encoded["tensor"] = {"shape": array.shape, "values": array.ravel().tolist()}
    elif data_type == "tftensor":
        encoded["tftensor"] = tftensor(array)
    else:
        encoded["ndarray"] = array.tolist()
    return encoded


def tftensor(array: Any) -> Any:
    """Encode an array as protobuf's JSON of a TensorProto."""
    from google.protobuf import json_format

    from .tftensors import tftensor_of_array

    return json.loads(json_format.MessageToJson(tftensor_of_array(array)))


def _read_tftensor(document: Any) -> Any:
    from google.protobuf import json_format

    from penstock.server.seldon.protos import message_class

    from .tftensors import array_of_tftensor

    message = message_class("DefaultData")().tftensor
    json_format.ParseDict(document, message)
    return array_of_tftensor(message)


def _invalid(request: Any) -> Exception:
    from .seldon_core_classes import SeldonMicroserviceException

    error: Exception = SeldonMicroserviceException(f"Invalid request data type: {request}")
    return error
