"""Lanes: the ports that requests come to, made from the settings. Called by the composition roots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .grpc.connection import GrpcShared
from .grpc.listening import GrpcListener
from .http.access import LoggedFastLane, QuietFastLane
from .http.fastlane import FastLane
from .http.service import Service, Shared
from .listener import Listener, make_config

if TYPE_CHECKING:
    from .grpc.method import Method
    from .http.connection import Connection
    from .metrics import ASGIApp
    from .settings import Settings


class Unclaimed:
    """The fast lane's Service of a port without inference: every request is left to uvicorn, limits apply."""

    def claim(self, head: Any) -> None:
        """Claim nothing."""

    def turn_away(self, head: Any) -> None:
        """Never called."""

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Never called."""

    def begin(self, connection: FastLane, head: Any, body: bytes) -> None:
        """Never called."""

    def abandon(self, connection: Connection) -> None:
        """Never called."""


def http_lane(settings: Settings, app: ASGIApp, service: Service) -> Listener:
    """Make the HTTP port: `service` answers what it claims, `app` all else."""
    return _listener(settings, "HTTP", (settings.http_address, settings.http_port), app, service)


def metrics_lane(settings: Settings, app: ASGIApp) -> Listener:
    """Make the metrics port."""
    place = settings.metrics_address or settings.http_address, settings.metrics_port
    return _listener(settings, "metrics", place, app, Unclaimed(), logged=settings.metrics_access_log)


def grpc_lane(settings: Settings, methods: Mapping[str, Method], loop: asyncio.AbstractEventLoop) -> GrpcListener:
    """Make the gRPC port, with RPCs by path."""
    shared = GrpcShared(dict(methods), settings.grpc_limits(), loop=loop)
    listener = GrpcListener(settings.grpc_address, settings.grpc_port, shared)
    listener.reuse_port = bool(settings.http_workers)
    return listener


def _listener(
    settings: Settings, name: str, place: tuple[str, int], app: ASGIApp, service: Service, *, logged: bool = True
) -> Listener:  # fmt: skip
    shared = Shared(service, settings.limits(), loud=settings.dialect in ("cortex", "seldon"))
    if settings.dialect == "seldon":
        from .seldon.pages import failure

        shared.failure = failure
    lane: type[FastLane] = FastLane
    if settings.access_log:
        lane = LoggedFastLane if logged else QuietFastLane
    protocol = type("Connection", (lane,), {"shared": shared})
    config = make_config(app, protocol, idle_s=settings.http_idle_timeout_secs, access_log=settings.access_log)
    listener = Listener(name, *place, config, shared.sweep)
    listener.reuse_port = bool(settings.http_workers)
    return listener
