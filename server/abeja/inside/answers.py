"""ResponseWriter: turns a handler's result into an HTTP answer.

Source: abejaruntime 1.1.1 and abeja-platform-model-proxy 2.6.5, by observed behavior.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from penstock.server.abeja.media import FORM, is_name, parse_media
from penstock.server.abeja.messages import CallRefusedError
from penstock.server.carrying.messages import pack_answer

from .content import ContentEncoder

PROXY_VERSION, RUNTIME_VERSION = "2.6.5", "1.1.1"
"""The versions whose answers these are."""
_IDENTITIES = {
    "X-Abeja-Model-Id": "ABEJA_MODEL_ID",
    "X-Abeja-Model-Version": "ABEJA_MODEL_VERSION",
    "X-Abeja-Deployment-Id": "ABEJA_DEPLOYMENT_ID",
    "X-Abeja-Service-Id": "ABEJA_SERVICE_ID",
}
_FRAMING = frozenset(("Connection", "Content-Length", "Date", "Keep-Alive", "Transfer-Encoding", "Upgrade"))
"""Headers that the server sets."""
_CONTENT_TYPE = "Content-Type"
_CONTROL_CHARACTERS = re.compile("[\0-\x08\n-\x1f\x7f]")
_MAX_CACHED_TYPES = 256


class ResponseWriter:
    """Encodes the answers of one handler. `environ` has what identifies it. Threads: one."""

    def __init__(self, environ: Mapping[str, str], *, strict: bool) -> None:
        self._encoder = ContentEncoder(strict=strict)
        identity = {header: environ.get(name, "") for header, name in _IDENTITIES.items()}
        identity["X-Abeja-Model-Version"] = quote(identity["X-Abeja-Model-Version"], safe="$&+=:@")
        self._leading_headers = {"X-Abeja-Sys-Meta-Proxy-Version": PROXY_VERSION}
        self._trailing_headers = {name: _header_value(value) for name, value in identity.items() if value}
        self._trailing_headers["X-Abeja-Sys-Meta-Runtime-Version"] = RUNTIME_VERSION
        self._default_lines = _header_lines({**self._leading_headers, **self._trailing_headers})
        self._content_types: dict[str, tuple[str, bytes]] = {}

    def pack(self, returned: Any) -> bytes:
        """Encode an answer.

        Raises: CallRefusedError; for an invalid result TypeError, ValueError, or the result's own exceptions.
        """
        if not isinstance(returned, dict):
            raise TypeError(f"a handler must return a dict, not {_type_name(returned)}")
        content_type = returned.get("content_type", "text/plain")
        if not isinstance(content_type, str) or not content_type.strip():
            raise ValueError("content_type must be a non-empty string")
        media, header = self._content_types.get(content_type) or self._parse_content_type(content_type)
        body = self._encoder.encode(returned.get("content"), media)
        metadata = returned.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata must be a dict, not {_type_name(metadata)}")
        status = _check_status(returned.get("status_code", 200))
        lines, is_unsupported = self._default_lines, not header
        if metadata:
            fields = {**self._leading_headers, **_metadata_headers(metadata), **self._trailing_headers}
            header = fields.pop(_CONTENT_TYPE).encode() if _CONTENT_TYPE in fields else header
            lines = _header_lines(fields)
        if is_unsupported:
            raise CallRefusedError(501, f"Content-Type: [{content_type}] is not supported")
        return pack_answer(status, (b"" if status == 304 else header) + b"\r\n" + lines, body)

    def _parse_content_type(self, content_type: str) -> tuple[str, bytes]:
        """Return the media type that selects the encoding, and the header; b"" for one that cannot be sent."""
        parsed = parse_media(content_type.encode("utf-8", "replace").decode("latin-1"))
        header = b"" if parsed is None or parsed[0] == FORM else _header_value(content_type).encode()
        media_and_header = content_type.partition(";")[0].strip().lower(), header
        if len(self._content_types) >= _MAX_CACHED_TYPES:
            self._content_types.clear()
        self._content_types[content_type] = media_and_header
        return media_and_header


def _check_status(status: Any) -> int:
    if status is None:
        return 200
    if isinstance(status, bool) or not 200 <= operator.index(status) <= 999:
        raise ValueError(f"status_code must be an integer from 200 to 999, not {status!r}")
    return operator.index(status)


def _metadata_headers(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Return the headers that a handler sets, by canonical name. Invalid names are left out."""
    fields = {}
    for key, value in metadata.items():
        if not isinstance(value, str | None) or not isinstance(key, str | int | float | None):
            raise TypeError(f"metadata must map names to strings, not {_type_name(value)} by {key!r}")
        name = key if isinstance(key, str) else json.dumps(key)
        canonical = "-".join(word.capitalize() for word in name.split("-"))
        if is_name(name) and canonical not in _FRAMING:
            fields[canonical] = _header_value(value or "")
    return fields


def _header_value(text: str) -> str:
    """Return a text as the value of a header: on one line, without lone surrogates."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _CONTROL_CHARACTERS.sub(" ", text).strip(" \t")


def _header_lines(fields: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
