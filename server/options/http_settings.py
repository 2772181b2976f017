"""HttpSettings: the settings of the HTTP port. Settings inherits them; the composition root reads them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.http.limits import Limits

from .setting import COUNT, PORTS, SECONDS, setting

_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class HttpSettings:
    """Settings of the HTTP port."""

    allow_http: bool = setting(True, "HTTP", "Serve the v2 protocol over HTTP.")
    http_address: str = setting(
        "127.0.0.1", "HTTP", "Address to listen on. By default only this machine can connect (Triton: 0.0.0.0, all "
        "addresses).", unit="address",
    )  # fmt: skip
    http_port: int = setting(
        8000, "HTTP", "Port to listen on; 0 lets the system choose one.", unit="TCP port", bounds=PORTS
    )
    http_max_input_size: int = setting(
        _LIMITS.max_body_bytes, "HTTP", "Maximum size of a request body, both as sent and after decompression.",
        unit="bytes", bounds=(1, 2**40),
    )  # fmt: skip
    http_receive_memory_bytes: int = setting(
        _LIMITS.max_receive_bytes, "HTTP", "Maximum memory, over all connections, for incomplete requests. Checked "
        "every second: the largest are rejected.", unit="bytes", bounds=(1 << 16, 2**50),
    )  # fmt: skip
    http_max_connections: int = setting(
        _LIMITS.max_connections, "HTTP", "Maximum number of open connections; further ones are rejected.",
        unit="connections", bounds=COUNT,
    )  # fmt: skip
    http_max_header_bytes: int = setting(
        _LIMITS.max_header_bytes, "HTTP", "Maximum size of the request line and headers together.",
        unit="bytes", bounds=COUNT,
    )  # fmt: skip
    http_max_headers: int = setting(
        _LIMITS.max_headers, "HTTP", "Maximum number of headers in a request.", unit="headers", bounds=COUNT
    )
    http_max_json_depth: int = setting(
        _LIMITS.max_json_depth, "HTTP", "Maximum nesting depth of request JSON.", unit="levels", bounds=(1, 1024)
    )
    http_header_forward_pattern: str = setting(
        "", "HTTP", "Forward headers as request parameters if their name contains a match of this regular expression. "
        "Case-insensitive.", unit="PATTERN",
    )  # fmt: skip
    http_max_chunks: int = setting(
        _LIMITS.max_chunks, "HTTP", "Maximum number of chunks in a chunked request body.", unit="chunks", bounds=COUNT
    )
    http_receive_timeout_secs: float = setting(
        _LIMITS.receive_timeout_s, "HTTP", "Maximum time from the first byte of a request until it has been received "
        "completely.", unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_idle_timeout_secs: float = setting(
        _LIMITS.idle_timeout_s, "HTTP", "Close a connection that has had no request for this long.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    http_write_timeout_secs: float = setting(
        _LIMITS.write_timeout_s, "HTTP", "Drop a client that has read none of its response for this long.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip

    def limits(self) -> Limits:
        """Return the fast lane's limits."""
        return Limits(
            max_body_bytes=self.http_max_input_size,
            max_receive_bytes=self.http_receive_memory_bytes,
            max_header_bytes=self.http_max_header_bytes,
            max_headers=self.http_max_headers,
            max_json_depth=self.http_max_json_depth,
            max_chunks=self.http_max_chunks,
            receive_timeout_s=self.http_receive_timeout_secs,
            idle_timeout_s=self.http_idle_timeout_secs,
            write_timeout_s=self.http_write_timeout_secs,
            max_connections=self.http_max_connections,
        )
