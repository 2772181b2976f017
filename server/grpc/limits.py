"""Limits: what a gRPC call may cost, beside what its connection may. Read by the lane; made from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.http2.limits import Http2Limits

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds of messages.

    Units: bytes. `max_message_bytes` holds for a message as sent and again decompressed. `receive_bytes` is what all
    calls together may keep of messages that have not arrived whole; the call that passes it is refused.
    `compression` is the zlib level of answers, 0 for none, for clients that accept any.
    """

    max_message_bytes: int = INT32_MAX
    receive_bytes: int = 4 << 30
    compression: int = 0
    http2: Http2Limits = field(default_factory=Http2Limits)
