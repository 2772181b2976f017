"""Projects: the PATHs of a server that serves Cortex projects; and CortexRepository, their APIs as its models.

Made by dialect.py and check.py.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.address import is_remote
from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding, MistakesError, log_findings
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import ModelEntry

from .api import Api
from .entries import entry_of
from .models import ModelFinder
from .project import CONFIG, Project, project_file, read_project
from .saved_models import ModelError

logger = logging.getLogger("penstock.repository")

_MAX_CONCURRENT = 4
"""How many models are fetched or unpacked concurrently."""


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


class CortexRepository(Repository):
    """The APIs of some projects.

    Invariant: a cortex.yaml that becomes invalid changes nothing: its last valid content remains in effect. `apis` has
    each API as last read, by name, including those that could not be loaded; it is replaced by a new mapping whenever
    one changes. Threads: any thread, for methods that block; `apis` is read on the event loop's.
    """

    def __init__(
        self, paths: Iterable[Path], defaults: Defaults, models: ModelFinder,
        report: Callable[[Iterable[Finding]], None] = log_findings,
    ) -> None:  # fmt: skip
        """`report` is called once with the findings of an invalid project."""
        super().__init__(paths, defaults)
        self._models = models
        self._report = report
        self._valid_projects: dict[Path, Project] = {}
        self._reported_findings: dict[Path, tuple[Finding, ...]] = {}
        self._fingerprints: dict[Path, bytes] = {}
        self._lock = threading.Lock()
        self.apis: Mapping[str, Api] = {}

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read everything, and fetch remote models; blocks."""
        projects, apis = self._projects()
        fingerprints = {name: self._fingerprint(api) for name, api in apis.items()}
        model_config_pb2()  # two threads must not load it at once
        with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
            entries = list(pool.map(lambda name: self._entry(name, projects), sorted(apis)))
        unassigned = [finding for project in projects for finding in project.findings if finding.model not in apis]
        return entries, unassigned, fingerprints

    def fingerprints(self) -> dict[str, bytes]:
        """Return the fingerprint of each API; blocks, and queries the stores of remote models."""
        _, apis = self._projects()
        return {name: self._fingerprint(api) for name, api in apis.items()}

    def fingerprint(self, name: str) -> bytes:
        """Return the fingerprint of one API; blocks."""
        api = self._projects()[1].get(name)
        return b"" if api is None else self._fingerprint(api)

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Read one API, and fetch its model if it is remote and has changed; blocks."""
        projects, apis = self._projects()
        api = apis.get(name)
        if api is None:
            return None, b""
        digest = self._fingerprint(api)
        if config is not None:
            finding = Finding(
                api.project / CONFIG, "takes no configuration: it is in the project", api.line, model=name
            )
            return ModelEntry(name, api.project, findings=(finding,)), digest
        return self._entry(name, projects), digest

    def names(self) -> list[str]:
        """List the names of all APIs, with duplicates; blocks."""
        return sorted(api.name for project in self._projects()[0] for api in project.apis)

    def check(self) -> list[Finding]:
        """Return the mistakes of all projects, which prevent them from being deployed; blocks."""
        return [finding for path in self._paths for finding in read_project(path).mistakes]

    def _projects(self) -> tuple[list[Project], Mapping[str, Api]]:
        """Read the files again; for one that is now invalid, keep the last valid content.

        Returns: the projects, and the `apis` that belong to them: another thread may read the files again meanwhile.
        """
        with self._lock:
            for path in self._paths:
                self._read(path)
            projects = [self._valid_projects[path] for path in self._paths if path in self._valid_projects]
            apis = {api.name: api for project in reversed(projects) for api in project.apis}
            if apis != self.apis:
                self.apis = apis
            return projects, self.apis

    def _read(self, path: Path) -> None:
        """Read one file, unless it is unchanged."""
        digest = fingerprint_files([project_file(path)])
        if digest and self._fingerprints.get(path) == digest:
            return
        project = read_project(path)
        self._fingerprints[path] = digest
        if not project.mistakes:
            self._valid_projects[path] = project
            self._reported_findings.pop(path, None)
            for api in project.apis:
                logger.info("api %s of %s is served at POST %s", api.name, project.deployment, api.endpoint)
        elif self._reported_findings.get(path) != project.findings:
            self._reported_findings[path] = project.findings
            self._report(project.findings)

    def _entry(self, name: str, projects: list[Project]) -> ModelEntry:
        matches = [api for project in projects for api in project.apis if api.name == name]
        own_findings = [finding for project in projects for finding in project.findings if finding.model == name]
        if len(matches) > 1:
            paths = " and ".join(f"{api.project.name}/{CONFIG}" for api in matches)
            text = f'api: {name}: name "{name}" must be unique across apis (defined in {paths})'
            duplicates = [Finding(api.project / CONFIG, text, api.line, model=name) for api in matches]
            return ModelEntry(name, matches[0].project, findings=(*own_findings, *duplicates))
        if conflict := self._endpoint_conflict(matches[0], projects):
            return ModelEntry(name, matches[0].project, findings=(*own_findings, conflict))
        entry = entry_of(matches[0], self._models, self._defaults)
        return replace(entry, findings=(*own_findings, *entry.findings))

    @staticmethod
    def _endpoint_conflict(api: Api, projects: list[Project]) -> Finding | None:
        """Report the API of an earlier project that has an API's endpoint."""
        for project in projects:
            for other in project.apis:
                if other.name == api.name:
                    return None
                if other.endpoint == api.endpoint:
                    # Source: Cortex v0.10, pkg/operator/workloads/errors.go
                    text = (
                        f'api: {api.name}: endpoint is already in use by an API named "{other.name}" in the '
                        f'"{other.deployment}" deployment'
                    )
                    return Finding(api.project / CONFIG, text, api.line, model=api.name)
        return None

    def _fingerprint(self, api: Api) -> bytes:
        """Return a value that changes with the files of an API's project, or with its model."""
        paths = [api.project]
        try:
            model = self._models.local_path(api)
        except ModelError:
            model = None
        if model is not None and not model.is_relative_to(api.project):
            paths.append(model)
        stamp = f"{api.endpoint} {self._models.stamp(api)}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(fingerprint_files(paths) + stamp, digest_size=16).digest()
