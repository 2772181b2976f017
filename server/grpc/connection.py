"""The gRPC lane: GrpcShared, one per port, and GrpcConnection, the asyncio protocol of its connections.

Made by `listening.py` for the composition root. A unary call costs 5 us here, and 100 or more with grpc.aio
(docs/adr/0007-grpc-lane.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from penstock.server.http2.connection import Http2Connection
from penstock.server.http2.frames import END_STREAM
from penstock.server.http2.headers import Fields
from penstock.server.http2.shared import Http2Shared
from penstock.server.listening.rejection_pacer import EARLY_RETRY_S

from .call import GrpcCall
from .coded_call import CodedCall
from .deadlines import CallDeadlines
from .limits import GrpcLimits
from .method import Method
from .request import GrpcRequest, read

_TLS_HELLO = 0x16
_NOT_HTTP2 = b'{"error":"this port speaks gRPC, over HTTP/2"}'  # as a client of the HTTP port reads it
_TO_HTTP1 = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_NOT_HTTP2), _NOT_HTTP2)
)


class GrpcShared(Http2Shared):
    """The common state of a port's connections: methods by path, limits, deadlines.

    `calls` are the classes of calls, without and with compressed answers. `asking` are the paths of read-only methods,
    which are also answered on connections accepted while draining.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: GrpcLimits | None = None,
        *,
        asking: Collection[str] = (),
        loop: asyncio.AbstractEventLoop | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.grpc = limits or GrpcLimits()
        loop = loop or asyncio.get_running_loop()
        super().__init__(loop, self.grpc.http2, self.grpc.receive_bytes)
        self.methods = methods
        self.asking = asking
        self.deadlines = CallDeadlines(loop, clock)
        self.calls: tuple[type[GrpcCall], type[CodedCall]] = (GrpcCall, CodedCall)


class GrpcConnection(Http2Connection):
    """One connection of the gRPC lane."""

    __slots__ = ("_call", "_told_s", "compression", "most_bytes", "stream_window_low")

    shared: GrpcShared

    def __init__(self, shared: GrpcShared) -> None:
        self.compression = shared.grpc.compression
        self._told_s = 0.0
        self._call = shared.calls[bool(self.compression)]
        self.most_bytes = shared.grpc.max_message_bytes
        self.stream_window_low = shared.limits.stream_window_bytes // 2
        super().__init__(shared)

    def resolve(self, fields: Fields) -> GrpcRequest | None:
        """Convert a header list to a GrpcRequest."""
        request = read(fields, self.shared.methods)
        if self.drain.late and request is not None:
            request.turn_away(self.shared.asking)
            if self.drain.hurried:
                self.shared.loop.call_soon(self.shutdown)
        return request

    def open(self, stream_id: int, head: GrpcRequest, ended: int) -> None:
        """Open a call."""
        make = self._call  # as a direct call it would first be looked up as a method
        call = self.streams[stream_id] = make(self, stream_id, head)
        if head.quick and not ended:
            return
        call.remote_ended = bool(ended)
        call.begin()
        if ended and not call.ended:
            call.received(b"", END_STREAM)

    def is_early(self) -> bool:
        """Record a temporary rejection. Returns: whether it follows another so soon that the client did not wait."""
        now_s = self.shared.loop.time()
        early, self._told_s = now_s < self._told_s, now_s + EARLY_RETRY_S
        return early

    def greet(self, data: bytes) -> bytes:
        """Return an error for an HTTP/1 client; one that begins TLS would not understand it."""
        return b"" if data[0] == _TLS_HELLO else _TO_HTTP1
