"""Service, which answers the requests that it claims, and HttpShared, the common state of a server's connections.

One of each per port; used by the connections.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.errors import json_error
from penstock.server.listening.body_buffer import SCRATCH_BYTES
from penstock.server.listening.rejection_pacer import RejectionPacer
from penstock.server.listening.tally import CountingAccessLogger, Tally
from penstock.server.listening.unread_answers import UnreadAnswers

from .response_heads import ResponseHeads

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection
    from .fastlane import FastLane
    from .head import Head, HttpError
    from .limits import Limits

logger = logging.getLogger("penstock.server")

_MAX_CACHED_HEADS = 1024
_MAX_CACHED_HEAD_BYTES = 2048


class Service(Protocol):
    """Answers the requests that it claims. One object per server."""

    def claim(self, head: Head) -> Any:
        """Return the route of a head, or None to leave the request to uvicorn. Cached with the head's bytes."""

    def early_rejection(self, head: Head) -> Any:
        """Return the error of a request that would be rejected now, before its body is read; None to accept it."""

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer a request that was rejected early, after its body has been read and dropped."""

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer a complete request, now or later, by one call of `connection.answer`."""

    def abandon(self, connection: Connection) -> None:
        """Drop the current request, because its client has disconnected."""


class HttpShared:
    """The common state of a server's connections.

    `format_error` makes the answer to input that is rejected before it is a request. `scratch` is written and read
    within one call from the transport, for any connection. `unread` is shared by all ports.
    """

    def __init__(
        self, service: Service, limits: Limits, *, uppercase: bool = False,
        format_error: Callable[[HttpError], tuple[int, bytes, bytes]] = json_error,
    ) -> None:  # fmt: skip
        self.service = service
        self.limits = limits
        self.heads: dict[bytes, Head] = {}
        self.answers = ResponseHeads(uppercase=uppercase)
        self.connections: set[Connection] = set()
        self.draining = False
        self.unread = UnreadAnswers()
        self.pacer = RejectionPacer()
        self.tally = Tally("http")
        self.access_logger = CountingAccessLogger(self.tally)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.format_error = format_error

    def cache_head(self, raw: bytes, head: Head) -> None:
        """Cache a parsed head by its bytes, without the empty line that ends it."""
        if len(raw) <= _MAX_CACHED_HEAD_BYTES:
            if len(self.heads) >= _MAX_CACHED_HEADS:
                self.heads.clear()
            self.heads[raw] = head

    def sweep(self, elapsed_s: float) -> None:
        """Close connections that are idle, slow to send or slow to read. Called about every second.

        One pass over all connections replaces a timer per request.
        """
        for connection in list(self.connections):
            try:
                connection.tick(elapsed_s)
            except Exception:  # the other connections must still be checked
                logger.exception("an HTTP connection failed")
                with suppress(Exception):
                    connection.shed()
        self._limit_incomplete_requests()

    def _limit_incomplete_requests(self) -> None:
        """Reject the largest of the requests that are still arriving, until the others hold no more than they may."""
        sizes = {connection: size for connection in self.connections if (size := connection.incomplete_bytes)}
        excess = sum(sizes.values()) - max(self.limits.max_receive_bytes, self.limits.max_body_bytes)
        if excess <= 0:
            return
        rejected = 0
        for connection in sorted(sizes, key=sizes.__getitem__, reverse=True):
            if excess <= 0:
                break
            excess -= sizes[connection]
            rejected += 1
            connection.reject_incomplete()
        text = "incomplete requests exceed the %d bytes of --http-receive-memory-bytes: rejected %d of them"
        logger.warning(text, self.limits.max_receive_bytes, rejected)
