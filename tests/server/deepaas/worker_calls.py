"""Calls to the service inside a worker, with requests as the server would pass them on."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import urlencode

import pytest

from penstock.server.carrying.messages import CALL, read_answer
from penstock.server.deepaas.inside.requests import Request
from penstock.server.deepaas.inside.service import DeepaasInside, open_service

FORM = "multipart/form-data; boundary=edge"
NAME = "a_model_of_the_tests"
Answer = tuple[int, str, str, bytes]
"""Status, content type, other header lines, and the body."""


class FakeChannel:
    """A Channel that records the messages it would send."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        """Keep a message."""
        self.sent.append(message)


def call_of(
    body: bytes = b"", content_type: str = "", query: Any = "", headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """Write a call: the line, and the body. query: text, or what urlencode takes."""
    fields = [*headers, *([("content-type", content_type)] if content_type else [])]
    head = {"method": "POST", "query": query if isinstance(query, str) else urlencode(query), "headers": fields}
    return json.dumps(head).encode() + b"\n" + body


def request_of(*arguments: Any, **more: Any) -> Request:
    """Make the Request of a call."""
    return Request(call_of(*arguments, **more))


def sent_json(value: Any, **more: Any) -> bytes:
    """Write a call with a JSON body."""
    return call_of(json.dumps(value).encode(), "application/json", **more)


def parts(*items: tuple[str, bytes] | tuple[str, bytes, str] | tuple[str, bytes, str, str]) -> bytes:
    """Write a FORM: name, content, and optionally a file's name and content type."""
    written = b""
    for name, content, *more in items:
        file = f'; filename="{more[0]}"' if more else ""
        kind = f"\r\nContent-Type: {more[1]}" if len(more) > 1 else ""
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"{file}{kind}\r\n\r\n'
        written += head.encode() + content + b"\r\n"
    return written + b"--edge--\r\n"


def opened(monkeypatch: pytest.MonkeyPatch, model: Any, role: str = "predict", **settings: Any) -> DeepaasInside:
    """Open the service of a model: an object in place of its module."""
    monkeypatch.setitem(sys.modules, NAME, model)
    order = {"model": "m", "target": NAME, "role": role, "warm": True, "accept_header": False, "show_errors": False}
    return open_service(order | settings, FakeChannel())  # type: ignore[arg-type]


def answered(service: DeepaasInside, call: bytes = b"", kind: int = CALL) -> Answer:
    """Call a service. Returns: its answer, taken apart."""
    status, content_type, lines, body = read_answer(service.call(kind, 1, call or call_of(), [])[0])
    return status, content_type.decode(), lines.decode(), body


def predicted(service: DeepaasInside, call: bytes = b"") -> Any:
    """Call a service. Returns: its predictions."""
    status, _, _, body = answered(service, call)
    assert status == 200, body
    return json.loads(body)["predictions"]
