"""GrpcSettings: the part of the settings that is about gRPC. Settings descends from it; the composition root reads it.

The names of what Triton has are Triton's, and so are their defaults and units.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.server.grpc.limits import INT32_MAX, GrpcLimits
from penstock.server.http2.limits import Http2Limits

from .setting import COUNT, PORTS, SECONDS, setting

_LIMITS = GrpcLimits()
_HTTP2 = _LIMITS.http2
_MILLISECONDS = (0, 2**31 - 1)
_MS = "milliseconds"
_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib's levels for the words of --grpc-infer-response-compression-level."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class GrpcSettings:
    """What can be told about the gRPC port."""

    allow_grpc: bool = setting(True, "gRPC", "Serve the v2 protocol over gRPC.")
    grpc_address: str = setting(
        "127.0.0.1", "gRPC", "Address to listen on. This machine only by default (Triton: 0.0.0.0, all addresses).",
        unit="address",
    )  # fmt: skip
    grpc_port: int = setting(
        8001, "gRPC", "Port to listen on; 0 lets the system choose.", unit="TCP port", bounds=PORTS
    )
    grpc_use_ssl: bool = setting(False, "gRPC", "Serve over TLS; needs --grpc-server-cert and --grpc-server-key.")
    grpc_use_ssl_mutual: bool = setting(
        False, "gRPC", "Demand a certificate of every client, too; needs --grpc-root-cert. Implies --grpc-use-ssl."
    )
    grpc_server_cert: str = setting("", "gRPC", "The server's certificate chain, PEM.", unit="path")
    grpc_server_key: str = setting("", "gRPC", "The server's private key, PEM.", unit="path")
    grpc_root_cert: str = setting("", "gRPC", "The certificates that clients' are checked against, PEM.", unit="path")
    grpc_infer_response_compression_level: str = setting(
        "none", "gRPC", "How hard answers are compressed, for clients that accept gzip or deflate.",
        choices=tuple(_LEVELS),
    )  # fmt: skip
    grpc_keepalive_time: int = setting(
        7200000, "gRPC", "After this long without a frame, a client with calls under way is sent a PING. 0: never.",
        unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_keepalive_timeout: int = setting(
        20000, "gRPC", "How long a client may take to answer it before its connection is closed.",
        unit=_MS, bounds=(1, 2**31 - 1),
    )  # fmt: skip
    grpc_keepalive_permit_without_calls: bool = setting(
        False, "gRPC", "Send PINGs, and allow the client's, also when no call is under way."
    )
    grpc_http2_max_pings_without_data: int = setting(
        2, "gRPC", "Most PINGs sent without an answer sent between them. 0: any number.",
        unit="PINGs", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        300000, "gRPC", "A client's PINGs that come sooner one after another, without an answer sent between them, are "
        "strikes. Without a call under way: 2 hours, unless --grpc-keepalive-permit-without-calls.",
        unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_http2_max_ping_strikes: int = setting(
        2, "gRPC", "One strike more closes the connection (`too_many_pings`). 0: none does.",
        unit="strikes", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    grpc_max_connection_age: int = setting(
        0, "gRPC", "A connection takes no more calls after this, and ends with those it has. 0: never.",
        unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_max_connection_age_grace: int = setting(
        0, "gRPC", "How long those calls may take after --grpc-max-connection-age. 0: as long as they want.",
        unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_max_connections: int = setting(
        _HTTP2.max_connections, "gRPC", "Most connections open at once; more are closed.",
        unit="connections", bounds=COUNT,
    )  # fmt: skip
    grpc_max_streams: int = setting(
        _HTTP2.max_streams, "gRPC", "Most calls under way on one connection; clients are told, and more are refused.",
        unit="calls", bounds=COUNT,
    )  # fmt: skip
    grpc_max_header_bytes: int = setting(
        _HTTP2.max_header_bytes, "gRPC", "Largest header list of one call, 32 bytes added for each field.",
        unit="bytes", bounds=(1024, 2**24),
    )  # fmt: skip
    grpc_max_message_bytes: int = setting(
        INT32_MAX, "gRPC", "Largest request message, as sent and after decompression.", unit="bytes", bounds=COUNT
    )
    grpc_receive_memory_bytes: int = setting(
        _LIMITS.receive_bytes, "gRPC", "Most that is kept, all connections together, of messages that have not "
        "arrived whole, and of what compressed ones have become. The call that passes it is refused.",
        unit="bytes", bounds=(1 << 16, 2**50),
    )  # fmt: skip
    grpc_receive_timeout_secs: float = setting(
        _HTTP2.receive_timeout_s, "gRPC", "A request of which nothing more comes for this long is refused.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    grpc_write_timeout_secs: float = setting(
        _HTTP2.write_timeout_s, "gRPC", "An answer of which a client takes nothing for this long is dropped.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    grpc_idle_timeout_secs: float = setting(
        _HTTP2.idle_timeout_s, "gRPC", "A connection without a call is closed after this. 0: never, as gRPC has it.",
        unit="seconds", bounds=(0.0, 86400.0 * 365),
    )  # fmt: skip

    def grpc_limits(self) -> GrpcLimits:
        """Give the gRPC lane's part."""
        return GrpcLimits(
            max_message_bytes=self.grpc_max_message_bytes,
            receive_bytes=self.grpc_receive_memory_bytes,
            compression=_LEVELS[self.grpc_infer_response_compression_level],
            http2=Http2Limits(
                max_connections=self.grpc_max_connections,
                max_streams=self.grpc_max_streams,
                max_header_bytes=self.grpc_max_header_bytes,
                receive_timeout_s=self.grpc_receive_timeout_secs,
                write_timeout_s=self.grpc_write_timeout_secs,
                idle_timeout_s=self.grpc_idle_timeout_secs,
                keepalive_s=self.grpc_keepalive_time / 1000,
                keepalive_timeout_s=self.grpc_keepalive_timeout / 1000,
                keepalive_without_calls=self.grpc_keepalive_permit_without_calls,
                max_pings_without_data=self.grpc_http2_max_pings_without_data,
                min_ping_interval_s=self.grpc_http2_min_recv_ping_interval_without_data / 1000,
                max_ping_strikes=self.grpc_http2_max_ping_strikes,
                max_age_s=self.grpc_max_connection_age / 1000,
                max_age_grace_s=self.grpc_max_connection_age_grace / 1000,
            ),
        )
