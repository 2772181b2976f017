"""Asks a component in this process as its worker would be asked: no socket, no server."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from penstock.server.seldon.inside.service import SeldonInside
from penstock.server.seldon.messages import CALL, Endpoint, PayloadKind, read_answer


class Answer(NamedTuple):
    """What has come back, taken apart."""

    status: int
    body: str
    metrics: Any
    lines: str

    @property
    def said(self) -> Any:
        """The body, as JSON."""
        return json.loads(self.body)


def inside(user: Any, *, strict: bool = True) -> SeldonInside:
    """Open a component."""
    return SeldonInside(user, {"strict": strict})


def ask(user: Any, message: Any, endpoint: Endpoint = Endpoint.PREDICT, *, strict: bool = True) -> Answer:
    """Open a component, and ask it once; a message that is no bytes is written as JSON."""
    service = inside(user, strict=strict)
    try:
        return asked(service, message, endpoint)
    finally:
        service.close()


def asked(service: SeldonInside, message: Any, endpoint: Endpoint = Endpoint.PREDICT) -> Answer:
    """Ask a component with a body of JSON."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return answer_of(service.call(CALL, 1, bytes((endpoint, PayloadKind.JSON)) + body, [])[0])


def posted(user: Any, body: bytes, content_type: str, query: str = "") -> Answer:
    """Open a component, and ask its predict with a body of any type."""
    head = json.dumps({"method": "POST", "type": content_type, "query": query}).encode()
    return answer_of(
        inside(user).call(CALL, 1, bytes((Endpoint.PREDICT, PayloadKind.HTTP)) + head + b"\n" + body, [])[0]
    )


def answer_of(reply: bytes) -> Answer:
    """Take the answer to a CALL apart."""
    status, metrics, lines, body = read_answer(reply)
    return Answer(status, body.decode(), json.loads(metrics or b"[]"), lines.decode())


def failed(text: str, reason: str = "MICROSERVICE_INTERNAL_ERROR") -> str:
    """Give the body of an error."""
    said = {"status": {"code": -1, "info": text, "reason": reason, "status": 1}}
    return json.dumps(said, separators=(",", ":"), sort_keys=True) + "\n"
