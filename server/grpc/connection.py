"""The gRPC lane: GrpcListener, its port, GrpcConnection, the asyncio protocol, and GrpcShared, what connections share.

Made by `listening/ports.py`. A unary call costs 5 us here, and 100 or more with grpc.aio
(docs/adr/0007-grpc-lane.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.server.http2.connection import Http2Connection
from penstock.server.http2.frames import END_STREAM
from penstock.server.http2.headers import Fields
from penstock.server.http2.shared import Http2Shared
from penstock.server.listening.listener import Port
from penstock.server.listening.rejection_pacer import EARLY_RETRY_S

from .call import GrpcCall
from .compressing import CompressingCall
from .deadlines import CallDeadlines
from .limits import GrpcLimits
from .method import Method
from .request import GrpcRequest, parse_request

_TLS_HELLO = 0x16
_HTTP1_ERROR_BODY = b'{"error":"this port speaks gRPC, over HTTP/2"}'  # as a client of the HTTP port reads it
_HTTP1_ERROR = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(_HTTP1_ERROR_BODY), _HTTP1_ERROR_BODY)
)


class GrpcShared(Http2Shared):
    """The common state of a port's connections: methods by path, limits, deadlines.

    `call_classes` are the classes of calls, without and with compressed answers. `read_only_paths` are the paths of
    read-only methods, which are also answered on connections accepted while draining.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: GrpcLimits | None = None,
        *,
        read_only_paths: Collection[str] = (),
        loop: asyncio.AbstractEventLoop | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.grpc_limits = limits or GrpcLimits()
        loop = loop or asyncio.get_running_loop()
        super().__init__(loop, self.grpc_limits.http2, self.grpc_limits.max_receive_bytes)
        self.methods = methods
        self.read_only_paths = read_only_paths
        self.deadlines = CallDeadlines(loop, clock)
        self.call_classes: tuple[type[GrpcCall], type[CompressingCall]] = (GrpcCall, CompressingCall)


class GrpcConnection(Http2Connection):
    """One connection of the gRPC lane."""

    __slots__ = ("_call_class", "_early_until_s", "compression", "max_message_bytes", "refill_stream_below")

    shared: GrpcShared

    def __init__(self, shared: GrpcShared) -> None:
        self.compression = shared.grpc_limits.compression
        self._early_until_s = 0.0
        self._call_class = shared.call_classes[bool(self.compression)]
        self.max_message_bytes = shared.grpc_limits.max_message_bytes
        self.refill_stream_below = shared.limits.stream_window_bytes // 2
        super().__init__(shared)

    def resolve(self, fields: Fields) -> GrpcRequest | None:
        """Convert a header list to a GrpcRequest."""
        request = parse_request(fields, self.shared.methods)
        if self.drain.accepted_in_drain and request is not None:
            request.reject_while_draining(self.shared.read_only_paths)
            if self.drain.expedited:
                self.shared.loop.call_soon(self.shutdown)
        return request

    def open(self, stream_id: int, head: GrpcRequest, end_stream: int) -> None:
        """Open a call."""
        make = self._call_class  # as a direct call it would first be looked up as a method
        call = self.streams[stream_id] = make(self, stream_id, head)
        if head.is_simple and not end_stream:
            return
        call.remote_ended = bool(end_stream)
        call.begin()
        if end_stream and not call.ended:
            call.received(b"", END_STREAM)

    def is_early_retry(self) -> bool:
        """Record a temporary rejection. Returns: whether it follows another so soon that the client did not wait."""
        now_s = self.shared.loop.time()
        is_early, self._early_until_s = now_s < self._early_until_s, now_s + EARLY_RETRY_S
        return is_early

    def answer_non_http2(self, data: bytes) -> bytes:
        """Return an error for an HTTP/1 client; one that begins TLS would not understand it."""
        return b"" if data[0] == _TLS_HELLO else _HTTP1_ERROR


class GrpcListener(Port):
    """The gRPC port: opened, drained and closed like every Port."""

    def __init__(self, address: str, port: int, shared: GrpcShared) -> None:
        super().__init__("gRPC", address, port, shared)
        self._grpc = shared
        self.max_connections = shared.limits.max_connections

    @property
    def scheme(self) -> str:  # type: ignore[override]
        """`grpcs` over TLS."""
        return "grpc" if self.tls is None else "grpcs"

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Make a connection of the lane."""
        return GrpcConnection(self._grpc)

    def open_connections(self) -> Collection[Any]:
        """Return the lane's connections."""
        return self._grpc.connections

    def use_connections(self, connections: set[Any]) -> None:
        """Have the lane use this set for its connections."""
        self._grpc.connections = connections

    async def close(self) -> None:
        """Close the port and every connection at once."""
        await super().close()
        self._grpc.deadlines.close()
