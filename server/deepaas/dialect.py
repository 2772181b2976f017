"""Deepaas: the parts that serve DEEPaaS models, put together. Made by server/dialects.py."""

from __future__ import annotations

from penstock.server.dialects import Dialect, Parts

from .entries import DEEPAAS, Entries
from .loading import DeepaasModels
from .service import DeepaasService


class Deepaas(Dialect):
    """What one server has of them."""

    nothing = ""
    alone = "model"

    def sources(self) -> Entries:
        """Give the models."""
        return Entries(self.settings)

    def service(self, parts: Parts) -> DeepaasService:
        """Make the Service of the HTTP port."""
        models = parts.engine.outsides[DEEPAAS] = DeepaasModels(parts.environments)
        return DeepaasService(parts, models, self.settings)


DIALECT = Deepaas
