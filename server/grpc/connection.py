"""The gRPC lane: GrpcShared, one for a port, and GrpcConnection, the asyncio protocol that serves its connections.

Made by `listening.py` for the composition root. A unary call costs 5 us here where grpc.aio takes 100 and more
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
from penstock.server.listening.pace import TOLD_S

from .call import GrpcCall
from .coded_call import CodedCall
from .deadlines import CallDeadlines
from .limits import GrpcLimits
from .method import Method
from .request import GrpcRequest, read

_TLS_HELLO = 0x16
_NOT_HTTP2 = b"this port speaks gRPC, over HTTP/2\n"
_TO_HTTP1 = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_NOT_HTTP2), _NOT_HTTP2)
)


class GrpcShared(Http2Shared):
    """What the connections of one port share: methods by path, limits, deadlines.

    `calls` are the kinds of calls, without and with compressed answers. `asking` are the paths of methods that begin no
    work: they are answered to who comes while the port is drained, too.
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
        """Read a header list."""
        request = read(fields, self.shared.methods)
        if self.drain.late and request is not None:
            request.turn_away(self.shared.asking)
            if self.drain.hurried:
                self.shared.loop.call_soon(self.shutdown)
        return request

    def open(self, stream_id: int, head: GrpcRequest, ended: int) -> None:
        """Open a call."""
        make = self._call  # called as an attribute it would be looked for as a method first
        call = self.streams[stream_id] = make(self, stream_id, head)
        if head.quick and not ended:
            return
        call.remote_ended = bool(ended)
        call.begin()
        if ended and not call.ended:
            call.received(b"", END_STREAM)

    def is_early(self) -> bool:
        """Note that a call is refused for now. Returns: whether another was just before: its client did not wait."""
        now_s = self.shared.loop.time()
        early, self._told_s = now_s < self._told_s, now_s + TOLD_S
        return early

    def greet(self, data: bytes) -> bytes:
        """Tell a client of HTTP/1 what it has reached; one that begins TLS would not understand."""
        return b"" if data[0] == _TLS_HELLO else _TO_HTTP1
