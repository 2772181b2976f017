"""Limits: what one HTTP connection and one request may use. Read by the fast lane; made from the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits enforced before anything in a request is trusted.

    Units: bytes, counts and seconds, as named. `max_body_bytes` applies to the body as sent and again after
    decompression. `max_receive_bytes` is what all requests that are still arriving may hold together, or one of
    `max_body_bytes` if that is more. `max_header_bytes` and `max_headers` apply to the request line and headers of one
    request. `receive_timeout_s` runs from the first byte of a request to its last; `idle_timeout_s` between requests;
    `write_timeout_s` while the client reads nothing of a pending answer.
    """

    max_body_bytes: int = 64 << 20
    max_receive_bytes: int = 4 << 30
    max_header_bytes: int = 65536
    max_headers: int = 128
    max_json_depth: int = 100
    max_chunks: int = 65536
    receive_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_connections: int = 10000
