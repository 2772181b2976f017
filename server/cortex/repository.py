"""CortexRepository: projects as the Repository of their APIs, each a model of that name. Made by projects.py."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.server.repository.changes import fingerprint_files
from penstock.server.repository.findings import Finding, log_findings
from penstock.server.repository.pbtxt import model_config_pb2
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import Defaults, ModelEntry

from .api import Api
from .entries import entry_of
from .models import ModelError, ModelFinder
from .project import CONFIG, Project, project_file, read_project

logger = logging.getLogger("penstock.repository")

_AT_ONCE = 4
"""How many models are fetched or unpacked concurrently."""


class CortexRepository(Repository):
    """The APIs of some projects.

    Invariant: a cortex.yaml that becomes invalid changes nothing: its last valid content remains in effect. `apis` has
    each API as last read, by name, including those that could not be loaded; it is replaced by a new mapping whenever
    one changes. Threads: any thread, for methods that block; `apis` is read on the event loop's.
    """

    def __init__(
        self, paths: Iterable[Path], defaults: Defaults, models: ModelFinder,
        tell: Callable[[Iterable[Finding]], None] = log_findings,
    ) -> None:  # fmt: skip
        """`tell` is called once with the findings of an invalid project."""
        super().__init__(paths, defaults)
        self._models = models
        self._tell = tell
        self._good: dict[Path, Project] = {}
        self._wrong: dict[Path, tuple[Finding, ...]] = {}
        self._prints: dict[Path, bytes] = {}
        self._turn = threading.Lock()
        self.apis: Mapping[str, Api] = {}

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read everything, and fetch remote models; blocks."""
        projects, apis = self._projects()
        prints = {name: self._print(api) for name, api in apis.items()}
        model_config_pb2()  # two threads must not load it at once
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            entries = list(pool.map(lambda name: self._entry(name, projects), sorted(apis)))
        stray = [finding for project in projects for finding in project.findings if finding.model not in apis]
        return entries, stray, prints

    def fingerprints(self) -> dict[str, bytes]:
        """Return the fingerprint of each API; blocks, and queries the stores of remote models."""
        _, apis = self._projects()
        return {name: self._print(api) for name, api in apis.items()}

    def fingerprint(self, name: str) -> bytes:
        """Return the fingerprint of one API; blocks."""
        api = self._projects()[1].get(name)
        return b"" if api is None else self._print(api)

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Read one API, and fetch its model if it is remote and has changed; blocks."""
        projects, apis = self._projects()
        api = apis.get(name)
        if api is None:
            return None, b""
        print_ = self._print(api)
        if config is not None:
            finding = Finding(api.project / CONFIG, "takes no configuration: the project says it", api.line, model=name)
            return ModelEntry(name, api.project, findings=(finding,)), print_
        return self._entry(name, projects), print_

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
        with self._turn:
            for path in self._paths:
                self._read(path)
            projects = [self._good[path] for path in self._paths if path in self._good]
            apis = {api.name: api for project in reversed(projects) for api in project.apis}
            if apis != self.apis:
                self.apis = apis
            return projects, self.apis

    def _read(self, path: Path) -> None:
        """Read one file, unless it is unchanged."""
        print_ = fingerprint_files([project_file(path)])
        if print_ and self._prints.get(path) == print_:
            return
        project = read_project(path)
        self._prints[path] = print_
        if not project.mistakes:
            self._good[path] = project
            self._wrong.pop(path, None)
            for api in project.apis:
                logger.info("api %s of %s is asked at POST %s", api.name, project.deployment, api.endpoint)
        elif self._wrong.get(path) != project.findings:
            self._wrong[path] = project.findings
            self._tell(project.findings)

    def _entry(self, name: str, projects: list[Project]) -> ModelEntry:
        found = [api for project in projects for api in project.apis if api.name == name]
        said = [finding for project in projects for finding in project.findings if finding.model == name]
        if len(found) > 1:
            places = " and ".join(f"{api.project.name}/{CONFIG}" for api in found)
            text = f'api: {name}: name "{name}" must be unique across apis (defined in {places})'
            twice = [Finding(api.project / CONFIG, text, api.line, model=name) for api in found]
            return ModelEntry(name, found[0].project, findings=(*said, *twice))
        if taken := self._taken(found[0], projects):
            return ModelEntry(name, found[0].project, findings=(*said, taken))
        entry = entry_of(found[0], self._models, self._defaults)
        return replace(entry, findings=(*said, *entry.findings))

    @staticmethod
    def _taken(api: Api, projects: list[Project]) -> Finding | None:
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

    def _print(self, api: Api) -> bytes:
        """Return a value that changes with the files of an API's project, or with its model."""
        places = [api.project]
        try:
            model = self._models.local(api)
        except ModelError:
            model = None
        if model is not None and not model.is_relative_to(api.project):
            places.append(model)
        told = f"{api.endpoint} {self._models.stamp(api)}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(fingerprint_files(places) + told, digest_size=16).digest()
