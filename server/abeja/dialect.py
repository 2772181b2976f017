"""Abeja: the parts that serve a handler, put together. Made by server/dialects.py."""

from __future__ import annotations

from penstock.server.dialects import Dialect, Parts

from .folder import ABEJA, HandlerFolder
from .loading import Handlers
from .service import AbejaService


class Abeja(Dialect):
    """What one server has of it."""

    nothing = ""
    alone = "handler"

    def sources(self) -> HandlerFolder:
        """Give the folder."""
        return HandlerFolder(self.settings)

    def service(self, parts: Parts) -> AbejaService:
        """Make the Service of the HTTP port."""
        parts.engine.outsides[ABEJA] = Handlers(parts.environments)
        return AbejaService(parts.engine, parts.inference, self.settings)


DIALECT = Abeja
