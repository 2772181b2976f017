"""The settings of the gRPC port: Triton's names and defaults, and Penstock's own."""

from __future__ import annotations

import socket
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.server.grpc.limits import GrpcLimits
from penstock.server.http2.limits import Http2Limits
from penstock.server.settings import Settings, resolve
from tests.live import live_server

TRITON = {
    "grpc-port": 8001, "grpc-keepalive-time": 7200000, "grpc-keepalive-timeout": 20000,
    "grpc-keepalive-permit-without-calls": False, "grpc-http2-max-pings-without-data": 2,
    "grpc-http2-min-recv-ping-interval-without-data": 300000, "grpc-http2-max-ping-strikes": 2,
    "grpc-max-connection-age": 0, "grpc-max-connection-age-grace": 0, "grpc-use-ssl": False,
    "grpc-use-ssl-mutual": False, "grpc-infer-response-compression-level": "none", "allow-grpc": True,
}  # fmt: skip


def test_option_names_and_defaults_are_the_same_as_tritons() -> None:
    settings = Settings()

    assert {name: getattr(settings, name.replace("-", "_")) for name in TRITON} == TRITON
    assert settings.grpc_address == "127.0.0.1"


def test_the_defaults_of_the_settings_equal_the_defaults_of_grpc_limits() -> None:
    assert Settings().grpc_limits() == GrpcLimits()


def test_every_grpc_setting_changes_its_limit() -> None:
    flags = {
        "grpc_keepalive_time": "1000", "grpc_keepalive_timeout": "2000", "grpc_keepalive_permit_without_calls": "1",
        "grpc_http2_max_pings_without_data": "3", "grpc_http2_min_recv_ping_interval_without_data": "4000",
        "grpc_http2_max_ping_strikes": "5", "grpc_max_connection_age": "6000", "grpc_max_connection_age_grace": "7000",
        "grpc_max_connections": "8", "grpc_max_streams": "9", "grpc_max_header_bytes": "10000",
        "grpc_receive_timeout_secs": "11", "grpc_write_timeout_secs": "12", "grpc_idle_timeout_secs": "13",
        "grpc_max_message_bytes": "14", "grpc_receive_memory_bytes": "150000",
        "grpc_infer_response_compression_level": "medium",
    }  # fmt: skip
    limits = resolve(flags, {}).grpc_limits()
    default = GrpcLimits()

    assert [item.name for item in fields(limits) if getattr(limits, item.name) == getattr(default, item.name)] == []
    same = {
        item.name
        for item in fields(Http2Limits)
        if getattr(limits.http2, item.name) == getattr(default.http2, item.name)
    }
    assert same == {
        "frame_bytes", "stream_window_bytes", "connection_window_bytes", "preface_timeout_s", "max_resets",
        "max_idle_frames",
    }  # fmt: skip


@pytest.mark.parametrize("allowed", [True, False])
def test_the_grpc_port_is_opened_only_if_grpc_is_allowed(tmp_path: Path, allowed: bool) -> None:
    with live_server(tmp_path, allow_grpc=allowed) as live:
        assert (live.grpc_port > 0) is allowed
        if allowed:
            with socket.create_connection(("127.0.0.1", live.grpc_port), 5) as connection:
                connection.sendall(b"\x16\x03\x01")
                assert connection.recv(10) == b""
