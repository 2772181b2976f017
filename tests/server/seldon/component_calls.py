"""Calls a component in this process as its worker would be called, without a socket or server."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from penstock.server.seldon.inside.service import SeldonInside
from penstock.server.seldon.messages import CALL, Endpoint, PayloadKind, read_answer


class Answer(NamedTuple):
    """A decoded reply."""

    status: int
    body: str
    metrics: Any
    lines: str

    @property
    def decoded(self) -> Any:
        """The body, as JSON."""
        return json.loads(self.body)


def inside(user: Any, *, strict: bool = True) -> SeldonInside:
    """Open a component."""
    return SeldonInside(user, {"strict": strict})


def ask(user: Any, message: Any, endpoint: Endpoint = Endpoint.PREDICT, *, strict: bool = True) -> Answer:
    """Open a component, and call it once; a message other than bytes is sent as JSON."""
    service = inside(user, strict=strict)
    try:
        return ask_service(service, message, endpoint)
    finally:
        service.close()


def ask_service(service: SeldonInside, message: Any, endpoint: Endpoint = Endpoint.PREDICT) -> Answer:
    """Call a component with a JSON body."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return answer_of(service.call(CALL, 1, bytes((endpoint, PayloadKind.JSON)) + body, [])[0])


def posted(user: Any, body: bytes, content_type: str, query: str = "") -> Answer:
    """Open a component, and call its predict with a body of any content type."""
    head = json.dumps({"method": "POST", "type": content_type, "query": query}).encode()
    return answer_of(
        inside(user).call(CALL, 1, bytes((Endpoint.PREDICT, PayloadKind.HTTP)) + head + b"\n" + body, [])[0]
    )


def answer_of(reply: bytes) -> Answer:
    """Decode the reply to a CALL."""
    status, metrics, lines, body = read_answer(reply)
    return Answer(status, body.decode(), json.loads(metrics or b"[]"), lines.decode())


def failed(text: str, reason: str = "MICROSERVICE_INTERNAL_ERROR") -> str:
    """Return the body of an error."""
    error = {"status": {"code": -1, "info": text, "reason": reason, "status": 1}}
    return json.dumps(error, separators=(",", ":"), sort_keys=True) + "\n"
