"""Requests to a component, and what tests/seldon/scenarios/*.py define them with. Runs on Python 3.8 too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"


@dataclass(frozen=True)
class RecordedRequest:
    """One request of either protocol."""

    name: str


@dataclass(frozen=True)
class Rest(RecordedRequest):
    """One HTTP request. `unread`: the body of its answer is not compared."""

    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    port: str = "http"
    unread: bool = False


@dataclass(frozen=True)
class Rpc(RecordedRequest):
    """One gRPC call: a message in JSON form, or its bytes."""

    method: str
    message: dict[str, Any] | bytes


@dataclass(frozen=True)
class Group:
    """The requests to one server, in order."""

    name: str
    component: str
    requests: Sequence[RecordedRequest]
    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


def rest(name: str, path: str, value: Any = None, **options: Any) -> Rest:
    """Post a value as JSON, or bytes and texts unchanged; `type` is their content type, by default JSON."""
    body = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else _dumped(value)
    kind = options.pop("type", JSON)
    headers = dict(options.pop("headers", {}))
    if kind:
        headers["Content-Type"] = kind
    return Rest(name, path, body, headers=headers, **options)


def get(name: str, path: str, **options: Any) -> Rest:
    """Send a request without a body."""
    return Rest(name, path, method=options.pop("method", "GET"), headers=dict(options.pop("headers", {})), **options)


def predict(name: str, value: Any, **options: Any) -> Rest:
    """Post to /predict."""
    return rest(name, "/predict", value, **options)


def rpc(name: str, method: str, message: Any, **options: Any) -> Rpc:
    """Call `Service/Method` of seldon.protos."""
    return Rpc(name, "/seldon.protos." + method, message, **options)


def words(text: str) -> list[str]:
    """Return a text as a list of words."""
    return text.split()


def giving(what: str, **more: Any) -> dict[str, Any]:
    """Return a message that requests a certain result from a test component."""
    return dict({"data": {"ndarray": [[1, 2]]}, "meta": {"tags": {"give": what}}}, **more)


def multipart(*parts: Any) -> bytes:
    """Write a form: (name, content) is a field, (name, content, file name) a file."""
    lines = []
    for name, content, *file in parts:
        filename = f'; filename="{file[0]}"' if file else ""
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'
        lines.append(head.encode() + (content if isinstance(content, bytes) else content.encode()) + b"\r\n")
    return b"".join([*lines, b"--edge--\r\n"])


FORM = "multipart/form-data; boundary=edge"
URLENCODED = "application/x-www-form-urlencoded"


def _dumped(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value).encode()
