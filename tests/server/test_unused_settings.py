"""Settings that have no effect without another setting: when they are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.server import cli
from penstock.server.options.unused_settings import unused_settings
from penstock.server.settings import Settings

CERTIFICATE: dict[str, Any] = {"grpc_server_cert": "c", "grpc_server_key": "k", "grpc_root_cert": "r"}


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({}, []),
        (
            CERTIFICATE,
            [
                f"--grpc-{name} has no effect without --grpc-use-ssl: gRPC is served without TLS"
                for name in ("server-cert", "server-key", "root-cert")
            ],
        ),
        (
            {**CERTIFICATE, "grpc_use_ssl": True},
            ["--grpc-root-cert has no effect without --grpc-use-ssl-mutual: client certificates are not requested"],
        ),
        ({**CERTIFICATE, "grpc_use_ssl_mutual": True}, []),
        (
            {"rate_limit_resource": ("R1:2",)},
            ["--rate-limit-resource has no effect without --rate-limit=execution_count: the rate limiter is off"],
        ),
        ({"rate_limit_resource": ("R1:2",), "rate_limit": "execution_count"}, []),
        (
            {"repository_poll_secs": 2.0},
            ["--repository-poll-secs has no effect without --model-control-mode=poll: the repository is not polled"],
        ),
        ({"repository_poll_secs": 2.0, "model_control_mode": "poll"}, []),
    ],
)
def test_a_setting_without_effect_is_reported_with_the_setting_that_it_requires(
    options: dict[str, Any], warnings: list[str]
) -> None:
    assert list(unused_settings(Settings(**options))) == warnings


def test_a_setting_without_effect_is_a_warning_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["check", str(tmp_path), "--grpc-root-cert", "ca.pem"])

    assert capsys.readouterr().err == (
        "penstock: warning: --grpc-root-cert has no effect without --grpc-use-ssl: gRPC is served without TLS\n"
    )
