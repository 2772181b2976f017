"""GrpcSettings: the settings of the gRPC port. Settings inherits them; the composition root reads them.

Names, defaults and units are Triton's where it has the setting.
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
"""zlib's level for each value of --grpc-infer-response-compression-level."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False, eq=False)
class GrpcSettings:
    """Settings of the gRPC port."""

    allow_grpc: bool = setting(True, "gRPC", "Serve the v2 protocol over gRPC.")
    grpc_address: str = setting(
        "127.0.0.1", "gRPC", "Address to listen on. By default only this machine can connect (Triton: 0.0.0.0, all "
        "addresses).", unit="address",
    )  # fmt: skip
    grpc_port: int = setting(
        8001, "gRPC", "Port to listen on; 0 lets the system choose one.", unit="TCP port", bounds=PORTS
    )
    grpc_use_ssl: bool = setting(False, "gRPC", "Serve over TLS; requires --grpc-server-cert and --grpc-server-key.")
    grpc_use_ssl_mutual: bool = setting(
        False, "gRPC", "Also require client certificates; requires --grpc-root-cert. Implies --grpc-use-ssl."
    )
    grpc_server_cert: str = setting("", "gRPC", "PEM file with the server's certificate chain.", unit="path")
    grpc_server_key: str = setting("", "gRPC", "PEM file with the server's private key.", unit="path")
    grpc_root_cert: str = setting("", "gRPC", "PEM file with the CA certificates used to verify clients.", unit="path")
    grpc_infer_response_compression_level: str = setting(
        "none", "gRPC", "Compression level of responses to clients that accept gzip or deflate.", choices=tuple(_LEVELS)
    )
    grpc_keepalive_time: int = setting(
        7200000, "gRPC", "Send a PING to a client with calls in progress after this long without a frame from it. 0: "
        "never.", unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_keepalive_timeout: int = setting(
        20000, "gRPC", "Close the connection if a PING is not answered within this time.",
        unit=_MS, bounds=(1, 2**31 - 1),
    )  # fmt: skip
    grpc_keepalive_permit_without_calls: bool = setting(
        False, "gRPC", "Send PINGs, and permit clients to send them, even when no call is in progress."
    )
    grpc_http2_max_pings_without_data: int = setting(
        2, "gRPC", "Maximum number of PINGs sent without a response sent in between. 0: unlimited.",
        unit="PINGs", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        300000, "gRPC", "Minimum interval between a client's PINGs if no response is sent in between; a PING that "
        "arrives sooner is a strike. With no call in progress the minimum is 2 hours, unless "
        "--grpc-keepalive-permit-without-calls is set.", unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_http2_max_ping_strikes: int = setting(
        2, "gRPC", "Number of strikes tolerated; one more closes the connection (`too_many_pings`). 0: unlimited.",
        unit="strikes", bounds=(0, 2**31 - 1),
    )  # fmt: skip
    grpc_max_connection_age: int = setting(
        0, "gRPC", "After this time a connection accepts no new calls and closes when its calls have finished. 0: "
        "never.", unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_max_connection_age_grace: int = setting(
        0, "gRPC", "Time that calls in progress are given to finish after --grpc-max-connection-age. 0: unlimited.",
        unit=_MS, bounds=_MILLISECONDS,
    )  # fmt: skip
    grpc_max_connections: int = setting(
        _HTTP2.max_connections, "gRPC", "Maximum number of open connections; further ones are closed.",
        unit="connections", bounds=COUNT,
    )  # fmt: skip
    grpc_max_streams: int = setting(
        _HTTP2.max_streams, "gRPC", "Maximum number of concurrent calls per connection. The limit is announced to "
        "clients; further calls are rejected.", unit="calls", bounds=COUNT,
    )  # fmt: skip
    grpc_max_header_bytes: int = setting(
        _HTTP2.max_header_bytes, "gRPC", "Maximum size of a call's header list, counting 32 extra bytes per field.",
        unit="bytes", bounds=(1024, 2**24),
    )  # fmt: skip
    grpc_max_message_bytes: int = setting(
        INT32_MAX, "gRPC", "Maximum size of a request message, both as sent and after decompression.",
        unit="bytes", bounds=COUNT,
    )  # fmt: skip
    grpc_receive_memory_bytes: int = setting(
        _LIMITS.max_receive_bytes, "gRPC", "Maximum memory, over all connections, for incomplete messages and for "
        "decompressed ones. A call that would exceed it is rejected.", unit="bytes", bounds=(1 << 16, 2**50),
    )  # fmt: skip
    grpc_receive_timeout_secs: float = setting(
        _HTTP2.receive_timeout_s, "gRPC", "Reject a request of which nothing more arrives for this long.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    grpc_write_timeout_secs: float = setting(
        _HTTP2.write_timeout_s, "gRPC", "Drop a response of which the client reads nothing for this long.",
        unit="seconds", bounds=SECONDS,
    )  # fmt: skip
    grpc_idle_timeout_secs: float = setting(
        _HTTP2.idle_timeout_s, "gRPC", "Close a connection that has had no call for this long. 0: never, as in gRPC.",
        unit="seconds", bounds=(0.0, 86400.0 * 365),
    )  # fmt: skip

    def grpc_limits(self) -> GrpcLimits:
        """Return the gRPC lane's limits."""
        return GrpcLimits(
            max_message_bytes=self.grpc_max_message_bytes,
            max_receive_bytes=self.grpc_receive_memory_bytes,
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
