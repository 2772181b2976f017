"""Cortex: assembles the parts that serve Cortex projects. Made by server/dialects.py."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.server.dialects import Dialect, DialectParts

from .check import check_projects
from .repository import CortexRepository, Projects
from .service import CortexService


class Cortex(Dialect):
    """One server's parts."""

    no_paths_message = "nothing to serve: pass the PATH of a project, the folder with its cortex.yaml"
    required_kind = "API"
    names_server = True
    _service: CortexService

    def sources(self) -> Projects:
        """Return the PATHs."""
        return Projects(self.settings.model_repository, self.settings.s3_root)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Report what would be served."""
        report = check_projects(self.settings, invariance=invariance)
        return str(report), report.exit_status

    def service(self, parts: DialectParts) -> CortexService:
        """Make the Service of the HTTP port."""
        if not isinstance(parts.repository, CortexRepository):
            raise TypeError(f"{type(parts.repository).__name__} is not a repository of Cortex projects")
        self._service = CortexService(
            parts.engine, parts.repository, parts.hooks_of, self.settings.limits(), parts.inference, parts.ready
        )
        self._service.restricted = parts.inference.restricted
        return self._service

    def metrics_lines(self) -> Iterable[str]:
        """Return the lines for the metrics page."""
        return self._service.prediction_metrics.render()


DIALECT = Cortex
