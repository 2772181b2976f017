"""AbejaService: the Service that sends every request to the handler. Made by dialect.py.

Source: abeja-platform-model-proxy 2.6.5, as it answers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.server.carrying.service import CarryingService, Found
from penstock.server.errors import HTTP_STATUS, retry_after_line

from .folder import NAME

if TYPE_CHECKING:
    from penstock.backends.errors import InferError
    from penstock.server.engines import Serves
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service
    from penstock.server.settings import Settings

JSON = b"application/json"
HEALTH = b"/health_check"


class Claim:
    """What a head says. Kept with the head's bytes. `described` is what stands before the body of its call."""

    __slots__ = ("described", "found")

    def __init__(self, head: Head, found: Found | None) -> None:
        self.found = found
        said = {"method": head.method.decode(), "type": head.header.get(b"content-type", b"").decode("latin-1")}
        self.described = json.dumps(said).encode() + b"\n"


class AbejaService(CarryingService):
    """Answers for the handler of one server. Threads: the event loop's."""

    claims = Claim

    def __init__(self, engine: Serves, others: Service, settings: Settings) -> None:
        super().__init__(engine, others)
        self._settings = settings
        self._found = Found(engine, NAME)

    def claim(self, head: Head) -> Any:
        """Claim every path."""
        return Claim(head, None if head.path == HEALTH else self._found)

    def answer(self, connection: FastLane, claim: Any, body: bytes) -> None:
        """Send a request to the handler."""
        if claim.found is None:
            connection.answer(200, b'{"status":"ok"}', JSON)
        else:
            self.ask(connection, claim.found, claim.described + body)

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own."""
        status = HTTP_STATUS[error.code]
        lines = retry_after_line(error) if status == 503 else b""
        connection.answer(status, json.dumps({"status": error.message}).encode(), JSON, lines)
