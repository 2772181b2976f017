"""The access log of the fast lane, in the form and under the name of uvicorn's own, for --access-log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.utils import get_remote_addr

from .fastlane import FastLane

if TYPE_CHECKING:
    from penstock.server.listening.mapped import Body

logger = logging.getLogger("uvicorn.access")


class QuietFastLane(FastLane):
    """A connection that logs nothing, also not what uvicorn answers, although others do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False


class LoggedFastLane(FastLane):
    """A connection that logs each request as it is answered: one that uvicorn answers is logged by uvicorn."""

    def answer_ok(self, body: Body, json_bytes: int = 0) -> None:
        """Answer 200 by the way that logs."""
        self._answer_ok(body, json_bytes)

    def answer(self, status: int, body: Body, content_type: bytes, extra: bytes = b"") -> None:
        """Log and answer."""
        head = self.head
        if head is not None and self.busy:
            address = get_remote_addr(self.transport)
            client = f"{address[0]}:{address[1]}" if address else ""
            version = "1.0" if head.old else "1.1"
            path, method = head.path.decode("latin-1"), head.method.decode("latin-1")
            logger.info('%s - "%s %s HTTP/%s" %d', client, method, path, version, status)
        super().answer(status, body, content_type, extra)
