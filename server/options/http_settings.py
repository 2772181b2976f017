"""HttpSettings: the part of the settings that is about HTTP. Settings has it; the composition root reads it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.http.limits import Limits

from .setting import COUNT, PORTS, SECONDS, setting

_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class HttpSettings:
    """What can be told about the HTTP port."""

    allow_http: bool = setting(True, "HTTP", "Serve the v2 protocol over HTTP.")
    http_address: str = setting(
        "127.0.0.1", "HTTP", "Address to listen on. This machine only by default (Triton: 0.0.0.0, all addresses).",
        unit="address",
    )  # fmt: skip
    http_port: int = setting(
        8000, "HTTP", "Port to listen on; 0 lets the system choose.", unit="TCP port", bounds=PORTS
    )
    http_max_input_size: int = setting(
        _LIMITS.max_body_bytes, "HTTP", "Largest request body, as sent and after decompression.",
        unit="bytes", bounds=(1, 2**40),
    )  # fmt: skip
    http_max_connections: int = setting(
        _LIMITS.max_connections, "HTTP", "Most connections open at once; more are refused.",
        unit="connections", bounds=COUNT,
    )  # fmt: skip
    http_max_header_bytes: int = setting(
        _LIMITS.max_header_bytes, "HTTP", "Largest request line and headers together.", unit="bytes", bounds=COUNT
    )
    http_max_headers: int = setting(
        _LIMITS.max_headers, "HTTP", "Most headers in one request.", unit="headers", bounds=COUNT
    )
    http_max_json_depth: int = setting(
        _LIMITS.max_json_depth, "HTTP", "Deepest nesting of request JSON.", unit="levels", bounds=(1, 1024)
    )
    http_header_forward_pattern: str = setting(
        "", "HTTP", "Header fields whose names match become parameters of the request. A regular expression, searched "
        "for in any case.", unit="PATTERN",
    )  # fmt: skip
    http_max_chunks: int = setting(
        _LIMITS.max_chunks, "HTTP", "Most chunks in one chunked request body.", unit="chunks", bounds=COUNT
    )
    http_receive_timeout_secs: float = setting(
        _LIMITS.receive_timeout_s, "HTTP", "A request must have arrived whole this long after its first byte.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_idle_timeout_secs: float = setting(
        _LIMITS.idle_timeout_s, "HTTP", "A connection without a request is closed after this.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_write_timeout_secs: float = setting(
        _LIMITS.write_timeout_s, "HTTP", "A client that takes nothing of its answer for this long is dropped.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip

    def limits(self) -> Limits:
        """Give the fast lane's part."""
        return Limits(
            max_body_bytes=self.http_max_input_size,
            max_header_bytes=self.http_max_header_bytes,
            max_headers=self.http_max_headers,
            max_json_depth=self.http_max_json_depth,
            max_chunks=self.http_max_chunks,
            receive_timeout_s=self.http_receive_timeout_secs,
            idle_timeout_s=self.http_idle_timeout_secs,
            write_timeout_s=self.http_write_timeout_secs,
            max_connections=self.http_max_connections,
        )
