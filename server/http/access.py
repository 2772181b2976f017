"""The access log of the fast lane, for --access-log: one line per answer, once it is sent."""

from __future__ import annotations

import re
import time
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from penstock.server.listening.access_log import log_answer

from .connection import HEAD
from .fastlane import FastLane
from .uvicorn_answers import TransportWrapper

if TYPE_CHECKING:
    import asyncio

    from penstock.server.listening.mapped_buffer import Body

    from .head import Head

_MODEL = re.compile(rb"/v2/(?:repository/)?models/([^/]+)")


class LoggedFastLane(FastLane):
    """A connection that logs each answer: its own when they are written, uvicorn's when they are complete.

    `request` records the id of what a Service submits, because the id is in a body that only the Service reads.
    """

    __slots__ = ("_logged_transport", "_request", "_request_id", "_started_s")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._started_s = time.perf_counter()
        self._request_id = ""
        self._logged_transport: _CountingTransport | None = None
        super().__init__(*args, **kwargs)
        self.access_logger = weakref.proxy(self)

    @property
    def request(self) -> Any:
        """The request that the Service has submitted."""
        return self._request

    @request.setter
    def request(self, request: Any) -> None:
        self._request = request
        self._request_id = getattr(request, "id", "") or self._request_id

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and record when a request begins."""
        if self._state == HEAD and not self._buffer:
            self._started_s = time.perf_counter()
        super().data_received(data)

    def answer_ok(self, body: Body, json_bytes: int = 0) -> None:
        """Answer 200 on the path that logs."""
        self._answer_ok(body, json_bytes)

    def _write(self, head: bytes, body: Body) -> None:
        super()._write(head, body)
        self._log(int(head[9:12]), len(body), self.head if self._state != HEAD else None)

    def info(self, text: str, *args: Any) -> None:
        """Stand in for uvicorn's access logger, which it calls as an answer begins; the status is the last argument."""
        self.shared.access_logger.info(text, *args)
        if self.cycle is not None:
            self._logged_transport = _CountingTransport(self.cycle.transport, args[-1])
            self.cycle.transport = self._logged_transport  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """Log an answer of uvicorn's."""
        self._log_uvicorn_answer()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Log what was sent of an incomplete answer."""
        self._log_uvicorn_answer()
        super().connection_lost(exc)

    def _log_uvicorn_answer(self) -> None:
        sent, self._logged_transport = self._logged_transport, None
        if sent is not None:
            self._log(sent.status, sent.size, self.head)

    def _log(self, status: int, size: int, head: Head | None) -> None:
        request_line, model, request_id = "-", "", self._request_id
        if head is not None:
            target = b"%b %b%b HTTP/%b" % (
                head.method, head.path, b"?" + head.query if head.query else b"", b"1.0" if head.is_http10 else b"1.1"
            )  # fmt: skip
            request_line, match = target.decode("latin-1"), _MODEL.search(head.path)
            model = unquote_to_bytes(match[1]).decode("utf-8", "replace") if match else ""
            request_id = request_id or head.header.get(b"x-request-id", b"").decode("latin-1")
        log_answer(self.client, request_line, status, self._started_s, size, {"model": model, "request_id": request_id})
        self._started_s, self._request_id = time.perf_counter(), ""


class _CountingTransport(TransportWrapper):
    """Counts the bytes written of an answer, excluding its head, which comes first."""

    def __init__(self, transport: asyncio.WriteTransport, status: int) -> None:
        super().__init__(transport)
        self.status = status
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write and count."""
        self.size += len(data) if self._head_sent else 0
        self._head_sent = True
        self._transport.write(data)
