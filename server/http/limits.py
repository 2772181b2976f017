"""Limits: what one HTTP connection and one request may cost. Read by the fast lane; made from the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that hold before anything of a request is believed.

    Units: bytes, counts and seconds, as named. `max_body_bytes` holds for the body as sent and again for the body
    decompressed. `max_header_bytes` and `max_headers` hold for the request line and headers of one request.
    `receive_timeout_s` runs from the first byte of a request to its last; `idle_timeout_s` between requests;
    `write_timeout_s` while the client takes nothing of an answer that waits for it.
    """

    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 65536
    max_headers: int = 128
    max_json_depth: int = 100
    max_chunks: int = 65536
    receive_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    max_connections: int = 10000
