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
from penstock.server.carrying.messages import pack_answer

from .content import ContentEncoder
from .errors import CallRefusedError

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
_TYPE = "Content-Type"
_CONTROLS = re.compile("[\0-\x08\n-\x1f\x7f]")
_MOST_KINDS = 256


class ResponseWriter:
    """Encodes the answers of one handler. `environ` has what identifies it. Threads: one."""

    def __init__(self, environ: Mapping[str, str], *, strict: bool) -> None:
        self._encoder = ContentEncoder(strict=strict)
        named = {header: environ.get(name, "") for header, name in _IDENTITIES.items()}
        named["X-Abeja-Model-Version"] = quote(named["X-Abeja-Model-Version"], safe="$&+=:@")
        self._first = {"X-Abeja-Sys-Meta-Proxy-Version": PROXY_VERSION}
        self._last = {name: _value(value) for name, value in named.items() if value}
        self._last["X-Abeja-Sys-Meta-Runtime-Version"] = RUNTIME_VERSION
        self._usual = _lines({**self._first, **self._last})
        self._kinds: dict[str, tuple[str, bytes]] = {}

    def pack(self, returned: Any) -> bytes:
        """Encode an answer.

        Raises: CallRefusedError; for an invalid result TypeError, ValueError, or the result's own exceptions.
        """
        if not isinstance(returned, dict):
            raise TypeError(f"a handler has to return a dict, and not {_kind_of(returned)}")
        content_type = returned.get("content_type", "text/plain")
        if not isinstance(content_type, str) or not content_type.strip():
            raise ValueError("content_type has to be a text that is not empty")
        media, header = self._kinds.get(content_type) or self._kind(content_type)
        body = self._encoder.encode(returned.get("content"), media)
        metadata = returned.get("metadata") or {}
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata has to be a dict, and not {_kind_of(metadata)}")
        status = _status(returned.get("status_code", 200))
        lines, refused = self._usual, not header
        if metadata:
            fields = {**self._first, **_fields(metadata), **self._last}
            header = fields.pop(_TYPE).encode() if _TYPE in fields else header
            lines = _lines(fields)
        if refused:
            raise CallRefusedError(501, f"Content-Type: [{content_type}] is not supported")
        return pack_answer(status, (b"" if status == 304 else header) + b"\r\n" + lines, body)

    def _kind(self, content_type: str) -> tuple[str, bytes]:
        """Return the media type that selects the encoding, and the header; b"" for one that cannot be sent."""
        said = parse_media(content_type.encode("utf-8", "replace").decode("latin-1"))
        header = b"" if said is None or said[0] == FORM else _value(content_type).encode()
        kind = content_type.partition(";")[0].strip().lower(), header
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[content_type] = kind
        return kind


def _status(status: Any) -> int:
    if status is None:
        return 200
    if isinstance(status, bool) or not 200 <= operator.index(status) <= 999:
        raise ValueError(f"status_code has to be a whole number from 200 to 999, and not {status!r}")
    return operator.index(status)


def _fields(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Return the headers that a handler sets, by canonical name. Invalid names are left out."""
    fields = {}
    for key, value in metadata.items():
        if not isinstance(value, str | None) or not isinstance(key, str | int | float | None):
            raise TypeError(f"metadata has to be texts by name, and not {_kind_of(value)} by {key!r}")
        name = key if isinstance(key, str) else json.dumps(key)
        canonical = "-".join(word.capitalize() for word in name.split("-"))
        if is_name(name) and canonical not in _FRAMING:
            fields[canonical] = _value(value or "")
    return fields


def _value(text: str) -> str:
    """Return a text as the value of a header: on one line, without lone surrogates."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _CONTROLS.sub(" ", text).strip(" \t")


def _lines(fields: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
