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

from penstock.server.seldon.environ import truth
from penstock.server.seldon.messages import ANSWER

from .component import KEPT_NAMES, Component, inherited
from .originals import SeldonMicroserviceException
from .payloads import NUMERIC, tftensor

logger = logging.getLogger("seldon_core")

_OF_METRICS = json.JSONEncoder(default=float)
_MANY = len(KEPT_NAMES)
_WRITTEN_NAMES = [json.dumps(names, separators=(",", ":")) for names in KEPT_NAMES]
_WORTH = 64
"""The count of numbers from which it pays to examine them all first."""
_NO_DATA = {"tensor": None}
_UNKNOWN = "Unknown data type returned as payload (must be list or np array):"


def construct(component: Component, request: Any, result: Any, meta: Any, metrics: list[Any], tags: Any) -> Any:
    """Make the message of an answer.

    `request` is the message that is answered: its `data` determines how arrays are encoded. `meta` is the request's
    meta or its substitute; `metrics` and `tags` are the call's. Raises: SeldonMicroserviceException for a result of an
    unsupported type, and the exceptions of user code in class_names() and tags().
    """
    response: dict[str, Any] = {}
    if isinstance(result, np.ndarray):
        response["data"] = _of_array(component, request, result, None)
    elif isinstance(result, dict):
        response["jsonData"] = result
    elif isinstance(result, (bytes, bytearray)):
        response["binData"] = base64.b64encode(result).decode()
    elif isinstance(result, str):
        response["strData"] = result
    elif isinstance(result, list):
        response["data"] = _of_array(component, request, np.array(result), result)
    elif not component.strict and (isinstance(result, np.generic) or hasattr(result, "to_numpy")):
        response["data"] = made = _of_array(component, request, _array_of(result), None)
        if hasattr(result, "columns") and inherited("class_names", component.user):
            made["names"] = [str(each) for each in result.columns]
    else:
        raise SeldonMicroserviceException(_UNKNOWN + str(result))
    response["meta"] = said = component.meta(meta, metrics, tags)
    puid = request.get("meta", {}).get("puid", None)
    if puid:
        path = said.pop("requestPath", None)
        said["puid"] = puid
        if path:  # after puid, as the original has it if keys are not sorted
            said["requestPath"] = path
    return response


def reply(component: Component, status: int, body: bytes, lines: bytes = b"") -> bytes:
    """Encode the answer to a CALL, with the metrics recorded for it, and clear these."""
    metrics = recorded_of(component) if component.recorded else b""
    return ANSWER.pack(status, len(lines), len(metrics)) + metrics + lines + body


def recorded_of(component: Component) -> bytes:
    """Encode the recorded metrics for an ANSWER, and clear them."""
    recorded, component.recorded = component.recorded, []
    try:
        return _OF_METRICS.encode(recorded).encode() if recorded else b""
    except (TypeError, ValueError):
        logger.exception("Metrics that are no numbers are not counted")
        return b""


class Writer:
    """Encodes JSON as Flask did; its settings come from the environment.

    Unless `strict`, values that JSON lacks are encoded too: numpy's scalars and arrays, pandas' frames.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, strict: bool = True) -> None:
        self._strict = strict
        pretty = truth(environ, "FLASK_JSONIFY_PRETTYPRINT_REGULAR")
        debug = truth(environ, "FLASK_DEBUG")
        if debug is None:
            debug = environ.get("FLASK_ENV") == "development"
        self._ascii = truth(environ, "FLASK_JSON_AS_ASCII") is not False
        self._sorts = truth(environ, "FLASK_JSON_SORT_KEYS") is not False
        self._indents = debug if pretty is None else pretty
        self._seen: dict[int, Any] = {}
        fits = self._ascii and self._sorts and not self._indents
        self._pieces: Any = _encoder_of_parts(self._seen) if fits else None
        self._encode = json.JSONEncoder(
            ensure_ascii=self._ascii,
            sort_keys=self._sorts,
            indent=2 if self._indents else None,
            separators=None if self._indents else (",", ":"),
            default=_default,
        ).encode

    def write(self, value: Any) -> bytes:
        """Encode a value, and a line feed. Raises: json's exceptions for a value it cannot encode."""
        if value.__class__ is dict and len(value) == 2 and self._pieces is not None:
            body = self._of_array(value)
            if body:
                return body
        try:
            return (self._encode(value) + "\n").encode()
        except TypeError:
            if self._strict:
                raise
        return (self._encode(_plain(value)) + "\n").encode()

    def _of_array(self, message: dict[str, Any]) -> bytes:
        """Encode a message of `data` and `meta` in parts; b"" for any other message, or on failure.

        This takes half the time of encoding a dict of dicts, each of which the encoder sorts, and far less if there are
        many numbers.
        """
        found, meta = message.get("data"), message.get("meta")
        if found.__class__ is not dict or meta is None or len(found) != 2 or "names" not in found:
            return b""
        names = found["names"]
        count = len(names) if names.__class__ is list else _MANY
        try:
            named = _WRITTEN_NAMES[count] if count < _MANY and names is KEPT_NAMES[count] else self._piece(names)
            said = self._piece(meta) if meta else "{}"
            if "ndarray" in found:
                array = f'"ndarray":{self._numbers(found["ndarray"])}'
            else:
                tensor = found["tensor"]
                shape, values = tensor["shape"], self._numbers(tensor["values"])
                array = f'"tensor":{{"shape":{self._piece(shape)},"values":{values}}}' if len(tensor) == 2 else ""
        except Exception:  # noqa: BLE001 - a message of another kind, or one that the encoder can report on
            self._seen.clear()
            return b""
        return f'{{"data":{{"names":{named},{array}}},"meta":{said}}}\n'.encode() if array else b""

    def _piece(self, value: Any) -> str:
        return "".join(self._pieces(value, 0))

    def _numbers(self, rows: Any) -> str:
        """Encode lists. Many numbers are left to orjson if it writes them as json does: 10 times as fast."""
        if rows.__class__ is list and rows:
            first = rows[0]
            if len(rows) * (len(first) if first.__class__ is list else 1) >= _WORTH:
                array = np.asarray(rows)
                if array.dtype.kind == "i" or (array.dtype.kind == "f" and _are_plain(array)):
                    try:
                        return orjson.dumps(rows).decode()
                    except TypeError:  # integers of more than 64 bits, and values that neither can encode
                        pass
        return self._piece(rows)

    def configure(self, provider: Any) -> None:
        """Configure a JSON provider of Flask's to write the same way."""
        provider.ensure_ascii, provider.sort_keys, provider.compact = self._ascii, self._sorts, not self._indents


def _encoder_of_parts(seen: dict[int, Any]) -> Any:
    """Return what json's encoder creates for each call, created once; None if this Python creates it differently."""
    encoder: Any = json.encoder
    try:
        return encoder.c_make_encoder(
            seen, _default, encoder.encode_basestring_ascii, None, ":", ",", True, False, True
        )  # fmt: skip
    except (AttributeError, TypeError):
        return None


def _are_plain(array: Any) -> bool:
    """Return whether all numbers are written without an exponent, which json and orjson write differently."""
    sizes = np.abs(array)
    return bool((((sizes >= 1e-4) & (sizes < 1e16)) | (sizes == 0)).all())


def _of_array(component: Component, request: Any, array: Any, given: list[Any] | None) -> dict[str, Any]:
    """Encode an array as the request's was; `given` is the list it was made of."""
    asked: Any = request.get("data", _NO_DATA)
    made: dict[str, Any] = {}
    if array.dtype.kind not in NUMERIC or not ("tensor" in asked or "tftensor" in asked):
        made["ndarray"] = array.tolist() if given is None else given
    elif "tensor" in asked:
        made["tensor"] = {"values": array.ravel().tolist(), "shape": array.shape}
    else:
        made["tftensor"] = tftensor(array)
    made["names"] = component.class_names(array)
    return made


def _array_of(result: Any) -> Any:
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


def _plain(value: Any) -> Any:
    """Return a value with numpy and pandas objects replaced by plain Python."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if hasattr(value, "to_dict"):
        orient = {"orient": "records"} if hasattr(value, "columns") else {}
        return _plain(value.to_dict(**orient))
    return value
