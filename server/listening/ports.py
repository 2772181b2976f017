"""Ports: makes the ports that receive requests, from the settings. Called by the composition roots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.grpc.access import LoggedCall, LoggedCompressingCall, logged_methods
from penstock.server.grpc.connection import GrpcListener, GrpcShared
from penstock.server.http.access import LoggedFastLane
from penstock.server.http.fastlane import FastLane
from penstock.server.http.service import HttpShared, Service
from penstock.server.restricted import GRPC_CATEGORIES

from .listener import Listener, Port, make_config
from .unread_answers import UnreadAnswers

if TYPE_CHECKING:
    from penstock.server.dialects import Dialect
    from penstock.server.grpc.method import Method
    from penstock.server.http.connection import Connection
    from penstock.server.settings import Settings
    from penstock.server.telemetry.page import ASGIApp

_READ_ONLY = {"health", "metadata", "model-config", "statistics"}
"""The categories of read-only RPCs."""


class NullService:
    """The fast lane's Service for a port without inference: every request is left to uvicorn, and limits apply."""

    def claim(self, head: Any) -> None:
        """Claim nothing."""

    def early_rejection(self, head: Any) -> None:
        """Never called."""

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Never called."""

    def begin(self, connection: FastLane, head: Any, body: bytes) -> None:
        """Never called."""

    def abandon(self, connection: Connection) -> None:
        """Never called."""


def make_http_port(settings: Settings, app: ASGIApp, service: Service, dialect: Dialect) -> Listener:
    """Make the HTTP port: `service` answers what it claims, `app` everything else."""
    shared = make_shared(settings, service, dialect)
    listener = make_listener(settings, "HTTP", (settings.http_address, settings.http_port), app, shared)
    listener.reuse_port |= settings.reuse_http_port
    return listener


def make_metrics_port(settings: Settings, app: ASGIApp) -> Listener:
    """Make the metrics port."""
    address = settings.metrics_address or settings.http_address, settings.metrics_port
    shared = HttpShared(NullService(), settings.limits())
    return make_listener(settings, "metrics", address, app, shared, logged=settings.metrics_access_log)


def make_grpc_port(settings: Settings, methods: Mapping[str, Method], loop: asyncio.AbstractEventLoop) -> GrpcListener:
    """Make the gRPC port, from RPCs by path."""
    read_only = frozenset(path for path in methods if GRPC_CATEGORIES.get(path) in _READ_ONLY)
    logged = logged_methods(methods) if settings.access_log else dict(methods)
    shared = GrpcShared(logged, settings.grpc_limits(), read_only_paths=read_only, loop=loop)
    if settings.access_log:
        shared.call_classes = LoggedCall, LoggedCompressingCall
    listener = GrpcListener(settings.grpc_address, settings.grpc_port, shared)
    listener.reuse_port = bool(settings.http_workers) or settings.reuse_grpc_port
    return listener


def share_unread_limit(settings: Settings, ports: Iterable[Port]) -> None:
    """Limit the unread answers of all ports together to the configured memory."""
    unread = UnreadAnswers(settings.write_memory_bytes)
    for port in ports:
        if port.shared is not None:
            port.shared.unread = unread


def share_totals(totals: Counter[str], ports: Iterable[Port]) -> None:
    """Make all ports count in the same totals."""
    for port in ports:
        port.tally.totals = totals


def make_shared(settings: Settings, service: Service, dialect: Dialect) -> HttpShared:
    """Make the shared state of the connections to a dialect's Service."""
    limits, format_error = settings.limits(), dialect.error_response
    return HttpShared(service, limits, uppercase=dialect.names_server, format_error=format_error)


def make_listener(
    settings: Settings, name: str, address: tuple[str, int], app: ASGIApp, shared: HttpShared, *, logged: bool = True
) -> Listener:  # fmt: skip
    """Make an HTTP port."""
    lane = LoggedFastLane if settings.access_log and logged else FastLane
    protocol = type("Connection", (lane,), {"shared": shared})
    config = make_config(app, protocol, idle_s=settings.http_idle_timeout_secs, access_log=settings.access_log)
    listener = Listener(name, *address, config, shared)
    listener.reuse_port = bool(settings.http_workers)
    return listener
