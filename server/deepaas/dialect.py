"""Deepaas: assembles the parts that serve DEEPaaS models. Made by server/dialects.py."""

from __future__ import annotations

from penstock.server.dialects import Dialect, DialectParts
from penstock.server.http.head import HttpError

from . import pages
from .check import check_entries
from .entries import DEEPAAS, Entries
from .loading import DeepaasModels
from .service import DeepaasService


class Deepaas(Dialect):
    """One server's parts."""

    no_paths_message = ""
    required_kind = "model"
    opens_late = True

    _models: DeepaasModels | None = None
    _service: DeepaasService | None = None

    def sources(self) -> Entries:
        """Return the models."""
        return Entries(self.settings)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Report what would be served."""
        report = check_entries(self.settings)
        return str(report), report.exit_status

    def service(self, parts: DialectParts) -> DeepaasService:
        """Make the Service of the HTTP port."""
        models = self._models = parts.engine.external_loaders[DEEPAAS] = DeepaasModels(
            parts.environments, self.settings
        )
        self._service = DeepaasService(parts, models, self.settings)
        return self._service

    def error_response(self, error: HttpError) -> tuple[int, bytes, bytes]:
        """Return the answer to a malformed request."""
        return pages.malformed_answer(error, self.settings.http_max_input_size)

    async def close(self) -> None:
        """End the trainings, and save their state."""
        if self._service is not None:
            self._service.close()
        if self._models is not None:
            await self._models.close()


DIALECT = Deepaas
