"""Answers: turns the results of user code into messages, and messages into bytes.

Source: seldon-core 1.17.1, utils.py, and Flask 2.2, which wrote the JSON: sorted, compact, ASCII, and a line feed.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import email.utils
import json
import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from penstock.server.seldon.environ import read_boolean
from penstock.server.seldon.messages import ANSWER

from .component import DEFAULT_NAMES, Component, is_inherited
from .payloads import NUMERIC, tftensor
from .seldon_core_classes import SeldonMicroserviceException

logger = logging.getLogger("seldon_core")

_METRICS_ENCODER = json.JSONEncoder(default=float)
_CACHED_COUNT = len(DEFAULT_NAMES)
_DEFAULT_NAMES_JSON = [json.dumps(names, separators=(",", ":")) for names in DEFAULT_NAMES]
_MIN_CHECKED = 64
"""The count of numbers from which it pays to examine them all first."""
_NO_DATA = {"tensor": None}
_UNKNOWN_TYPE = "Unknown data type returned as payload (must be list or np array):"


def make_message(component: Component, request: Any, result: Any, meta: Any, metrics: list[Any], tags: Any) -> Any:
    """Make the message of an answer.

    `request` is the message that is answered: its `data` determines how arrays are encoded. `meta` is the request's
    meta or its substitute; `metrics` and `tags` are the call's. Raises: SeldonMicroserviceException for a result of an
    unsupported type, and the exceptions of user code in class_names() and tags().
    """
    response: dict[str, Any] = {}
    if isinstance(result, np.ndarray):
        response["data"] = _encode_array(component, request, result, None)
    elif isinstance(result, dict):
        response["jsonData"] = result
    elif isinstance(result, (bytes, bytearray)):
        response["binData"] = base64.b64encode(result).decode()
    elif isinstance(result, str):
        response["strData"] = result
    elif isinstance(result, list):
        response["data"] = _encode_array(component, request, np.array(result), result)
    elif not component.strict and (isinstance(result, np.generic) or hasattr(result, "to_numpy")):
        response["data"] = data = _encode_array(component, request, _to_array(result), None)
        if hasattr(result, "columns") and is_inherited("class_names", component.user):
            data["names"] = [str(each) for each in result.columns]
    else:
        raise SeldonMicroserviceException(_UNKNOWN_TYPE + str(result))
    response["meta"] = answer_meta = component.meta(meta, metrics, tags)
    puid = request.get("meta", {}).get("puid", None)
    if puid:
        request_path = answer_meta.pop("requestPath", None)
        answer_meta["puid"] = puid
        if request_path:  # after puid, as the original has it if keys are not sorted
            answer_meta["requestPath"] = request_path
    return response


def encode_reply(component: Component, status: int, body: bytes, lines: bytes = b"") -> bytes:
    """Encode the answer to a CALL, with the metrics recorded for it, and clear these."""
    metrics = take_metrics(component) if component.recorded else b""
    return ANSWER.pack(status, len(lines), len(metrics)) + metrics + lines + body


def take_metrics(component: Component) -> bytes:
    """Encode the recorded metrics for an ANSWER, and clear them."""
    recorded, component.recorded = component.recorded, []
    try:
        return _METRICS_ENCODER.encode(recorded).encode() if recorded else b""
    except (TypeError, ValueError):
        logger.exception("Metrics that are not numbers are not counted")
        return b""


class JsonWriter:
    """Encodes JSON as Flask did; its settings come from the environment.

    Unless `strict`, values that JSON lacks are encoded too: numpy's scalars and arrays, pandas' frames.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, strict: bool = True) -> None:
        self._strict = strict
        pretty = read_boolean(environ, "FLASK_JSONIFY_PRETTYPRINT_REGULAR")
        debug = read_boolean(environ, "FLASK_DEBUG")
        if debug is None:
            debug = environ.get("FLASK_ENV") == "development"
        self._ascii = read_boolean(environ, "FLASK_JSON_AS_ASCII") is not False
        self._sort_keys = read_boolean(environ, "FLASK_JSON_SORT_KEYS") is not False
        self._indent = debug if pretty is None else pretty
        self._markers: dict[int, Any] = {}
        can_split = self._ascii and self._sort_keys and not self._indent
        self._encode_parts: Any = _make_part_encoder(self._markers) if can_split else None
        self._encode = json.JSONEncoder(
            ensure_ascii=self._ascii,
            sort_keys=self._sort_keys,
            indent=2 if self._indent else None,
            separators=None if self._indent else (",", ":"),
            default=_default,
        ).encode

    def write(self, value: Any) -> bytes:
        """Encode a value, and a line feed. Raises: json's exceptions for a value it cannot encode."""
        if value.__class__ is dict and len(value) == 2 and self._encode_parts is not None:
            body = self._encode_array_message(value)
            if body:
                return body
        try:
            return (self._encode(value) + "\n").encode()
        except TypeError:
            if self._strict:
                raise
        return (self._encode(_to_plain_python(value)) + "\n").encode()

    def _encode_array_message(self, message: dict[str, Any]) -> bytes:
        """Encode a message of `data` and `meta` in parts; b"" for any other message, or on failure.

        This takes half the time of encoding a dict of dicts, each of which the encoder sorts, and far less if there are
        many numbers.
        """
        data, meta = message.get("data"), message.get("meta")
        if data.__class__ is not dict or meta is None or len(data) != 2 or "names" not in data:
            return b""
        names = data["names"]
        count = len(names) if names.__class__ is list else _CACHED_COUNT
        try:
            names_json = (
                _DEFAULT_NAMES_JSON[count]
                if count < _CACHED_COUNT and names is DEFAULT_NAMES[count]
                else self._encode_part(names)
            )
            meta_json = self._encode_part(meta) if meta else "{}"
            if "ndarray" in data:
                array = f'"ndarray":{self._encode_numbers(data["ndarray"])}'
            else:
                tensor = data["tensor"]
                shape, values = tensor["shape"], self._encode_numbers(tensor["values"])
                array = f'"tensor":{{"shape":{self._encode_part(shape)},"values":{values}}}' if len(tensor) == 2 else ""
        except Exception:  # noqa: BLE001 - a message of another kind, or one that the encoder can report on
            self._markers.clear()
            return b""
        return f'{{"data":{{"names":{names_json},{array}}},"meta":{meta_json}}}\n'.encode() if array else b""

    def _encode_part(self, value: Any) -> str:
        return "".join(self._encode_parts(value, 0))

    def _encode_numbers(self, rows: Any) -> str:
        """Encode lists. Many numbers are left to orjson if it writes them as json does: 10 times as fast."""
        if rows.__class__ is list and rows:
            first = rows[0]
            if len(rows) * (len(first) if first.__class__ is list else 1) >= _MIN_CHECKED:
                array = np.asarray(rows)
                if array.dtype.kind == "i" or (array.dtype.kind == "f" and _need_no_exponent(array)):
                    try:
                        return orjson.dumps(rows).decode()
                    except TypeError:  # integers of more than 64 bits, and values that neither can encode
                        pass
        return self._encode_part(rows)

    def configure(self, provider: Any) -> None:
        """Configure a JSON provider of Flask's to write the same way."""
        provider.ensure_ascii, provider.sort_keys, provider.compact = self._ascii, self._sort_keys, not self._indent


def _make_part_encoder(markers: dict[int, Any]) -> Any:
    """Return what json's encoder creates for each call, created once; None if this Python creates it differently."""
    encoder: Any = json.encoder
    try:
        return encoder.c_make_encoder(
            markers, _default, encoder.encode_basestring_ascii, None, ":", ",", True, False, True
        )  # fmt: skip
    except (AttributeError, TypeError):
        return None


def _need_no_exponent(array: Any) -> bool:
    """Return whether all numbers are written without an exponent, which json and orjson write differently."""
    sizes = np.abs(array)
    return bool((((sizes >= 1e-4) & (sizes < 1e16)) | (sizes == 0)).all())


def _encode_array(component: Component, request: Any, array: Any, source_list: list[Any] | None) -> dict[str, Any]:
    """Encode an array as the request's was; `source_list` is the list it was made of."""
    request_data: Any = request.get("data", _NO_DATA)
    data: dict[str, Any] = {}
    if array.dtype.kind not in NUMERIC or not ("tensor" in request_data or "tftensor" in request_data):
        data["ndarray"] = array.tolist() if source_list is None else source_list
    elif "tensor" in request_data:
        data["tensor"] = {"values": array.ravel().tolist(), "shape": array.shape}
    else:
        data["tftensor"] = tftensor(array)
    data["names"] = component.class_names(array)
    return data


def _to_array(result: Any) -> Any:
    return np.asarray(result) if isinstance(result, np.generic) else result.to_numpy()


def _default(value: Any) -> Any:
    """Return a substitute for a value that JSON lacks. Source: Flask 2.2, flask/json/provider.py."""
    if isinstance(value, dt.date):
        if not isinstance(value, dt.datetime):
            value = dt.datetime.combine(value, dt.time(), tzinfo=dt.UTC)
        elif value.tzinfo is None:
            value = value.replace(tzinfo=dt.UTC)
        elif value.tzinfo != dt.UTC:
            value = value.astimezone(dt.UTC)
        return email.utils.format_datetime(value, usegmt=True)
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)  # type: ignore[arg-type]
    if hasattr(value, "__html__"):
        return str(value.__html__())
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _to_plain_python(value: Any) -> Any:
    """Return a value with numpy and pandas objects replaced by plain Python."""
    if isinstance(value, dict):
        return {_to_plain_python(key): _to_plain_python(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain_python(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _to_plain_python(value.tolist())
    if hasattr(value, "to_dict"):
        orient = {"orient": "records"} if hasattr(value, "columns") else {}
        return _to_plain_python(value.to_dict(**orient))
    return value
