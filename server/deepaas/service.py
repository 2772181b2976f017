"""DeepaasService: the Service that answers DEEPaaS's URLs on the fast lane. Made by dialect.py.

Predictions go to their workers as they came. Everything else takes a task: metadata and trainings ask the desk.
Source: deepaas 2.6.0 on aiohttp, as it answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.answering import internal, off_task
from penstock.server.carrying.service import CarryingService, Found
from penstock.server.errors import HTTP_STATUS, retry_after_line

from .messages import METADATA

if TYPE_CHECKING:
    from penstock.server.dialects import Parts
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.settings import Settings

    from .loading import DeepaasModels

TEXT = b"text/plain; charset=utf-8"


class Claim:
    """What a head says. Kept with the head's bytes. `described` is what stands before the body of a call."""

    __slots__ = ("described", "found", "name")

    def __init__(self, head: Head, found: Found | None, name: str) -> None:
        self.found, self.name = found, name
        headers = [[key.decode("latin-1"), value.decode("latin-1")] for key, value in head.header.items()]
        said = {"method": head.method.decode(), "query": head.query.decode("latin-1"), "headers": headers}
        self.described = json.dumps(said).encode() + b"\n"


class DeepaasService(CarryingService):
    """Answers for the models of one server. Threads: the event loop's."""

    claims = Claim

    def __init__(self, parts: Parts, models: DeepaasModels, settings: Settings) -> None:
        super().__init__(parts.engine, parts.inference)
        self._models = models
        self._settings = settings
        self._founds = {name: Found(parts.engine, name) for name in parts.repository.names()}

    def claim(self, head: Head) -> Any:
        """Claim the original's paths."""
        parts = head.path.decode("latin-1").split("/")
        if parts[:3] == ["", "v2", "models"] and len(parts) > 3 and parts[3] in self._founds:
            if parts[4:] == ["predict", ""]:
                return Claim(head, self._founds[parts[3]], parts[3])
            if parts[4:] == [""]:
                return Claim(head, None, parts[3])
        return self.others.claim(head)

    def answer(self, connection: FastLane, claim: Any, body: bytes) -> None:
        """Answer a request, or send it on."""
        if claim.found is not None:
            self.ask(connection, claim.found, claim.described + body)
        else:
            connection.task = asyncio.get_running_loop().create_task(self._answer_metadata(connection, claim))

    async def _answer_metadata(self, connection: FastLane, claim: Any) -> None:
        try:
            self.answer_reply(connection, claim, await self._models.desks[claim.name].ask(METADATA))
        except InferError as error:
            self.answer_failure(connection, claim, error)
        except Exception as error:  # noqa: BLE001 - logged under an id
            self.answer_failure(connection, claim, internal(error, claim.name, ""))
        finally:
            off_task(connection)

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own."""
        status = HTTP_STATUS[error.code]
        lines = retry_after_line(error) if status == 503 else b""
        connection.answer(status, f"{status}: {error.message}".encode(), TEXT, lines)
