"""Settings that have no effect because another one that they depend on is not set. Reported by the CLI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.settings import Settings

_RULES: tuple[tuple[tuple[str, ...], Callable[[Settings], bool], str], ...] = (
    (
        ("grpc_server_cert", "grpc_server_key", "grpc_root_cert"),
        lambda settings: settings.grpc_use_ssl or settings.grpc_use_ssl_mutual,
        "--grpc-use-ssl: gRPC is served without TLS",
    ),
    (
        ("grpc_root_cert",),
        lambda settings: settings.grpc_use_ssl_mutual or not settings.grpc_use_ssl,
        "--grpc-use-ssl-mutual: client certificates are not requested",
    ),
    (
        ("rate_limit_resource",),
        lambda settings: settings.rate_limit == "execution_count",
        "--rate-limit=execution_count: the rate limiter is off",
    ),
    (
        ("repository_poll_secs",),
        lambda settings: settings.model_control_mode == "poll",
        "--model-control-mode=poll: the repository is not polled",
    ),
)
"""Settings, the condition under which they count, and what is missing otherwise."""


def unused_settings(settings: Settings) -> Iterator[str]:
    """Say which settings have no effect, and why."""
    changed = {field.name for field in fields(settings) if getattr(settings, field.name) != field.default}
    for names, applies, missing in _RULES:
        if not applies(settings):
            yield from (
                f"--{name.replace('_', '-')} has no effect without {missing}" for name in names if name in changed
            )
