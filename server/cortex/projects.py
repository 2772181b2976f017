"""Projects: the PATHs of a server that serves Cortex projects. Made by dialect.py and by `penstock check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.server.repository.address import is_remote
from penstock.server.repository.findings import Finding, MistakesError, log_findings
from penstock.server.repository.scan import Defaults

from .models import ModelFinder
from .project import CONFIG, project_file
from .repository import CortexRepository


class Projects:
    """Folders, each with a cortex.yaml. Used instead of Mirrors."""

    def __init__(self, paths: Iterable[str], s3_root: str = "") -> None:
        distinct = list(dict.fromkeys(paths))
        self._remote = [path for path in distinct if is_remote(path)]
        local = [Path(path).absolute() for path in distinct if not is_remote(path)]
        self.local = tuple({project_file(path).resolve(): path for path in local}.values())
        self.models = ModelFinder(s3_root)

    def repository(
        self, defaults: Defaults, report: Callable[[Iterable[Finding]], None] = log_findings
    ) -> CortexRepository:
        """Return the Repository of their APIs. `report` is called once with the findings of an invalid project."""
        return CortexRepository(self.local, defaults, self.models, report)

    def invalid_path(self) -> Finding | None:
        """Return the finding for a PATH that is not a project, None if all are."""
        for url in self._remote:
            return Finding(Path(url), "a Cortex project must be a local folder")
        for path in self.local:
            if not path.exists():
                return Finding(path, "no such file or folder")
            if not project_file(path).is_file() or project_file(path).name != CONFIG:
                return Finding(path, f"not a Cortex project: it has no {CONFIG}")
        return None

    def open(self) -> None:
        """Read every cortex.yaml, without fetching models. Raises: MistakesError for any mistake in any of them."""
        mistakes = self.repository(Defaults()).check()
        if mistakes:
            raise MistakesError(mistakes)

    def close(self) -> None:
        """Remove what was fetched and unpacked."""
        self.models.close()
