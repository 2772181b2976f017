"""Folder: the folder of a handler as what a server serves, and the Repository of it. Made by dialect.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.batching.spec import InstanceGroup, ModelSpec, WorkerSpec
from penstock.server.repository.address import is_remote
from penstock.server.repository.findings import Finding
from penstock.server.repository.pbtxt import model_config_pb2
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import Defaults, Entry
from penstock.server.settings import Settings

ABEJA = "abeja"
"""The backend."""
NAME = "handler"
"""The model's name."""


class HandlerFolder:
    """The folder that the handler works in. It stands where Mirrors stand for repositories. Threads: any."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.path = Path(settings.model_repository[0] if settings.model_repository else ".").absolute()

    def repository(self, defaults: Defaults) -> Repository:
        """Give the Repository of the handler."""
        return HandlerRepository(self, defaults)

    def wrong(self) -> Finding | None:
        """Say what is wrong with the path."""
        if self.settings.model_repository and is_remote(self.settings.model_repository[0]):
            return Finding(Path(self.settings.model_repository[0]), "a handler is served from a folder of this machine")
        return None if self.path.is_dir() else Finding(self.path, "no such folder")

    def open(self) -> None:
        """Check what must be right as a whole; it blocks. Raises: MistakesError."""

    def close(self) -> None:
        """Nothing was copied."""

    def spec(self) -> ModelSpec:
        """Give the handler as a model; it blocks."""
        settings = self.settings
        options = {"handler": settings.abeja_handler, "strict": str(settings.abeja_strict).lower()}
        worker = WorkerSpec(settings.abeja_interpreter, None, timeout_s=settings.abeja_timeout_secs)
        group = InstanceGroup(count=settings.abeja_workers)
        return ModelSpec(NAME, 1, self.path, ABEJA, options=options, worker=worker, instances=(group,))


class HandlerRepository(Repository):
    """The handler as the one model of a repository."""

    def __init__(self, folder: HandlerFolder, defaults: Defaults) -> None:
        super().__init__((folder.path,), defaults)
        self._folder = folder

    def scan(self) -> tuple[list[Entry], list[Finding], dict[str, bytes]]:
        """Read what is served; it blocks."""
        return [self._entry()], [], self.fingerprints()

    def fingerprints(self) -> dict[str, bytes]:
        """Give its fingerprint, which does not change: what is served is what was there at the start."""
        return {NAME: b"-"}

    def fingerprint(self, name: str) -> bytes:
        """Likewise; b"" of another name."""
        return b"-" if name == NAME else b""

    def read(self, name: str, config: Any = None) -> tuple[Entry | None, bytes]:
        """Read it; it blocks."""
        if name != NAME:
            return None, b""
        if config is not None:
            finding = Finding(self._folder.path, "takes no configuration: it is a function", model=name)
            return Entry(name, self._folder.path, findings=(finding,)), b"-"
        return self._entry(), b"-"

    def names(self) -> list[str]:
        """Give its name."""
        return [NAME]

    def _entry(self) -> Entry:
        return Entry(NAME, self._folder.path, (self._folder.spec(),), model_config_pb2().ModelConfig(name=NAME))
