"""Entries: the models that a server has, each a name and where its code is, and the Repository of them.

Made by dialect.py. A PATH is `name=package.module[:attr]`; without any, the entry points of what is installed count.
Source: deepaas 2.6.0, model/v2: the namespace, and which models are served.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.batching.spec import InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.repository.findings import Finding
from penstock.server.repository.pbtxt import model_config_pb2
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import Defaults
from penstock.server.repository.scan import Entry as Scanned
from penstock.server.settings import Settings

DEEPAAS = "deepaas"
"""The backend."""
NAMESPACE = "deepaas.v2.model"


@dataclass(frozen=True, slots=True)
class Target:
    """A model: its name, and `module` or `module:attr`."""

    name: str
    target: str


class Entries:
    """The models of one server. They stand where Mirrors stand for repositories. Threads: any."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.targets = {found.name: found for found in _targets(settings.model_repository)}

    def repository(self, defaults: Defaults) -> Repository:
        """Give the Repository of the models."""
        return EntryRepository(self, defaults)

    def wrong(self) -> Finding | None:
        """Say which path is not what it has to be."""
        for path in self.settings.model_repository:
            if "=" not in path:
                return Finding(Path(path), "no DEEPaaS model: wanted name=package.module or name=package.module:attr")
        return None

    def open(self) -> None:
        """Check what must be right as a whole; it blocks. Raises: MistakesError."""

    def close(self) -> None:
        """Nothing was copied."""

    def spec(self, found: Target) -> ModelSpec:
        """Give a model's spec; it blocks."""
        settings = self.settings
        options = {
            "target": found.target,
            "warm": str(settings.deepaas_warm).lower(),
            "accept_header": str(settings.deepaas_accept_header).lower(),
            "show_errors": str(settings.deepaas_show_errors).lower(),
        }
        requirements = Path(settings.deepaas_requirements).absolute() if settings.deepaas_requirements else None
        worker = WorkerSpec(settings.deepaas_interpreter, requirements, timeout_s=settings.deepaas_timeout_secs)
        group = InstanceGroup(count=settings.deepaas_workers)
        return ModelSpec(found.name, 1, Path.cwd(), DEEPAAS, options=options, worker=worker, instances=(group,))


def _targets(paths: tuple[str, ...]) -> list[Target]:
    if paths:
        return [Target(*path.split("=", 1)) for path in paths if "=" in path]
    return [Target(each.name, each.value) for each in importlib.metadata.entry_points(group=NAMESPACE)]


class EntryRepository(Repository):
    """The models as those of a repository."""

    def __init__(self, entries: Entries, defaults: Defaults) -> None:
        super().__init__((Path.cwd(),), defaults)
        self._entries = entries

    def scan(self) -> tuple[list[Scanned], list[Finding], dict[str, bytes]]:
        """Read what is served; it blocks."""
        return [self._entry(name) for name in self.names()], [], self.fingerprints()

    def fingerprints(self) -> dict[str, bytes]:
        """Give the fingerprints, which do not change: what is served is what was there at the start."""
        return dict.fromkeys(self.names(), b"-")

    def fingerprint(self, name: str) -> bytes:
        """Likewise; b"" of another name."""
        return b"-" if name in self._entries.targets else b""

    def read(self, name: str, config: Any = None) -> tuple[Scanned | None, bytes]:
        """Read one; it blocks."""
        if name not in self._entries.targets:
            return None, b""
        if config is not None:
            finding = Finding(Path.cwd(), "takes no configuration: its module says it", model=name)
            return Scanned(name, Path.cwd(), findings=(finding,)), b"-"
        return self._entry(name), b"-"

    def names(self) -> list[str]:
        """List the names."""
        return list(self._entries.targets)

    def _entry(self, name: str) -> Scanned:
        spec = self._entries.spec(self._entries.targets[name])
        return Scanned(name, Path.cwd(), (spec,), model_config_pb2().ModelConfig(name=name))
