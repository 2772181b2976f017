"""Service, which answers the requests that it claims, and Shared, what the connections of one server have in common.

One of each for a port; called by the connections.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.errors import error_body
from penstock.server.listening.landing import SCRATCH_BYTES
from penstock.server.listening.pace import Pace
from penstock.server.listening.tally import Heard, Tally
from penstock.server.listening.untaken import Untaken

from .answers import ResponseHeads

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection
    from .fastlane import FastLane
    from .head import Head, HttpError
    from .limits import Limits

logger = logging.getLogger("penstock.server")

_KEPT_HEADS = 1024
_KEPT_HEAD_BYTES = 2048


class Service(Protocol):
    """What answers the requests that it claims. One object per server."""

    def claim(self, head: Head) -> Any:
        """Give the route of a head, or None to leave the request to uvicorn. Kept with the head's bytes."""

    def turn_away(self, head: Head) -> Any:
        """Give the error of a request that would be refused now, before its body; None to let it come."""

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Answer a request that was turned away, its body read and dropped."""

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer a whole request, now or later, by one call of `connection.answer`."""

    def abandon(self, connection: Connection) -> None:
        """Forget the request under way: its client has gone."""


def refused(error: HttpError) -> tuple[int, bytes, bytes]:
    """Give the status, the content type and the body of the answer to what is refused as no request."""
    return error.status, b"application/json", error_body(error.text)


class Shared:
    """What all connections of one server share. `refusal` writes the answer to what is refused as no request.

    `scratch` is written and read within one call of the transport's, whoever's it is. `untaken` is that of all ports
    together.
    """

    def __init__(self, service: Service, limits: Limits, *, loud: bool = False) -> None:
        self.service = service
        self.limits = limits
        self.heads: dict[bytes, Head] = {}
        self.answers = ResponseHeads(loud=loud)
        self.connections: set[Connection] = set()
        self.draining = False
        self.untaken = Untaken()
        self.pace = Pace()
        self.tally = Tally("http")
        self.heard = Heard(self.tally)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.refusal: Callable[[HttpError], tuple[int, bytes, bytes]] = refused

    def remember(self, raw: bytes, head: Head) -> None:
        """Keep a parsed head by its bytes, without the empty line that ends it."""
        if len(raw) <= _KEPT_HEAD_BYTES:
            if len(self.heads) >= _KEPT_HEADS:
                self.heads.clear()
            self.heads[raw] = head

    def sweep(self, elapsed_s: float) -> None:
        """Close connections that are idle, slow to send or slow to read. Called every second or so.

        One pass over all connections instead of a timer for each request.
        """
        for connection in list(self.connections):
            try:
                connection.tick(elapsed_s)
            except Exception:  # the others have limits, too
                logger.exception("an HTTP connection failed")
                with suppress(Exception):
                    connection.give_up()
