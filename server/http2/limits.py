"""Limits: what one HTTP/2 connection may use. Read by the connection; made from the settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Limits of each connection, and `max_connections` for all of them.

    Units: bytes, counts and seconds, as named; for `max_age_s`, `idle_timeout_s` and `keepalive_s` 0 means no limit.
    `max_header_bytes` applies to a header block as sent and again decoded, counted as in RFC 9113, 32 extra bytes per
    field. `frame_bytes` is the largest unpadded DATA frame, at least 16,384, which is the limit for all other frames.
    `preface_timeout_s` is for the client's first frames, `receive_timeout_s` for the next byte of a request that has
    begun, `write_timeout_s` while the client reads nothing of what is pending. `max_resets` and `max_idle_frames` are
    per second: calls that a client cancels, as many as it may have open at once since their deadlines may coincide; and
    frames that request nothing. Both grow with the calls that are answered, and the latter with all calls.
    """

    max_connections: int = 10000
    max_streams: int = 1024
    max_header_bytes: int = 16384
    stream_window_bytes: int = 4 << 20
    connection_window_bytes: int = 16 << 20
    frame_bytes: int = 1 << 20
    preface_timeout_s: float = 10.0
    receive_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    idle_timeout_s: float = 0.0
    max_resets: int = 1024
    max_idle_frames: int = 1000
    keepalive_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0
