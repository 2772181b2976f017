"""Abeja: assembles the parts that serve a handler. Made by server/dialects.py."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from penstock.server.dialects import Dialect, DialectParts
from penstock.server.http.head import TooLargeError

from .folder import ABEJA, AbejaFolder
from .health import HealthService
from .loading import Handlers
from .messages import JSON, status_body
from .service import AbejaService

if TYPE_CHECKING:
    from penstock.server.http.head import HttpError
    from penstock.server.listening.listener import Port
    from penstock.server.telemetry.page import ASGIApp


class Abeja(Dialect):
    """One server's parts."""

    no_paths_message = ""
    required_kind = "handler"
    _parts: DialectParts

    def sources(self) -> AbejaFolder:
        """Return the folder."""
        return AbejaFolder(self.settings)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Report what would be served."""
        from .check import check_handler

        report = check_handler(self.settings)
        return str(report), report.exit_status

    def error_response(self, error: HttpError) -> tuple[int, bytes, bytes]:
        """Return the answer to a malformed request."""
        return 413 if isinstance(error, TooLargeError) else error.status, JSON, status_body(error.text)

    def service(self, parts: DialectParts) -> AbejaService:
        """Make the Service of the HTTP port."""
        self._parts = parts
        parts.engine.external_loaders[ABEJA] = Handlers(parts.environments)
        service = AbejaService(parts.engine, parts.inference, parts.ready, self.settings.abeja_strip_headers)
        service.restricted = parts.inference.restricted
        return service

    def extra_ports(self, app: ASGIApp) -> Iterable[Port]:
        """Make the port for the handler's health and Penstock's own paths."""
        # the command line imports this module, and must not wait for uvicorn
        from penstock.server.listening.ports import make_listener, make_shared
        from penstock.server.v2.plane import is_served

        settings = self.settings
        service = HealthService(self._parts.ready, self._parts.inference, partial(is_served, app))  # type: ignore[arg-type]
        address = settings.http_address, settings.abeja_health_port
        return [make_listener(settings, "health", address, app, make_shared(settings, service, self))]


DIALECT = Abeja
