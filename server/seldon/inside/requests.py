"""Requests: locates and decodes the message in an HTTP request.

In this order: the fields and files of a multipart form, the field `json` of a form, the query's `json`, the body.
Source: seldon-core 1.17.1, flask_utils.py, with Flask 2.2 and Werkzeug 2.2, whose rules these are.
"""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import unquote_to_bytes

from .payloads import loads
from .seldon_core_classes import SeldonMicroserviceException

_URL_ENCODED = ("application/x-www-form-urlencoded", "application/x-url-encoded")
_NO_JSON = "Can't find JSON in data"


def read_json_message(body: bytes) -> Any:
    """Decode the message in a body of JSON. Raises: SeldonMicroserviceException."""
    try:
        message = loads(body)
    except ValueError:
        message = None
    if message is None:
        raise SeldonMicroserviceException(_NO_JSON)
    return message


def read_http_message(payload: bytes, *, decode: bool) -> Any:
    """Return the message of a request of PayloadKind.HTTP; unless `decode`, its raw text or bytes, except for a form's.

    Raises: SeldonMicroserviceException; json's exceptions for a form or a query.
    """
    line, _, body = payload.partition(b"\n")
    head = json.loads(line)
    content_type: str = head["type"]
    media_type = _media_type(content_type)
    if "multipart/form-data" in content_type:
        return _read_form(body, content_type if media_type == "multipart/form-data" else "")
    text = ""
    if media_type in _URL_ENCODED:
        text, body = _json_field(body), b""
    elif media_type == "multipart/form-data":  # in capitals, which the original handles differently
        from .multipart import parse_form

        text, body = parse_form(body, content_type)[0].get("json", ""), b""
    text = text or _json_field(head["query"].encode("latin-1"))
    if text:
        return json.loads(text) if decode else text
    if not decode:
        return body
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise SeldonMicroserviceException(_NO_JSON)
    return read_json_message(body)


def _read_form(body: bytes, content_type: str) -> dict[Any, Any]:
    from .multipart import parse_form

    fields, files = parse_form(body, content_type)
    found = {name: text if name == "strData" else json.loads(text) for name, text in fields.items()}
    for name, content in files.items():
        found[name] = base64.b64encode(content) if name == "binData" else content.decode()
    return found


def _media_type(content_type: str) -> str:
    """Return the media type of a Content-Type, in lower case."""
    words = content_type.replace("\n", ",").replace(",", ";").partition(";")[0].split()
    return words[0].lower() if words else ""


def _json_field(encoded: bytes) -> str:
    """Return the first `json` among URL-encoded fields, "" if there is none."""
    for pair in encoded.split(b"&"):
        name, _, value = pair.partition(b"=")
        if _unquote(name) == "json":
            return _unquote(value)
    return ""


def _unquote(word: bytes) -> str:
    return unquote_to_bytes(word.replace(b"+", b" ")).decode("utf-8", "replace")
