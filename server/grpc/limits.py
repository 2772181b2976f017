"""Limits: what a gRPC call may use, besides its connection's limits. Read by the lane; made from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.http2.limits import Http2Limits

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits of messages.

    Units: bytes. `max_message_bytes` applies to a message as sent and again decompressed. `max_receive_bytes` is what
    all calls together may hold of incomplete messages; the call that exceeds it is rejected. `compression` is the zlib
    level of answers to clients that accept compression, 0 for none.
    """

    max_message_bytes: int = INT32_MAX
    max_receive_bytes: int = 4 << 30
    compression: int = 0
    http2: Http2Limits = field(default_factory=Http2Limits)
