"""CarriedRepository: a Repository of models whose calls are carried. Each dialect derives its own from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import Finding
from penstock.server.repository.repository import Repository
from penstock.server.repository.scan import ModelEntry

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.batching.spec import ModelSpec


class CarriedRepository(Repository):
    """Models that are not defined by the files of a model repository. `path` is where they are.

    `unconfigurable` says why they take no configuration. Invariant: unless a subclass defines otherwise, fingerprints
    do not change: the server serves what was there at the start.
    """

    unconfigurable: str

    def __init__(self, path: Path, defaults: Defaults) -> None:
        super().__init__((path,), defaults)
        self._path = path

    def names(self) -> list[str]:
        """List the names; blocks."""
        raise NotImplementedError

    def spec(self, name: str) -> ModelSpec:
        """Return the spec of a model; blocks."""
        raise NotImplementedError

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read all models; blocks."""
        fingerprints = self.fingerprints()
        return [self._entry(name) for name in fingerprints], [], fingerprints

    def fingerprints(self) -> dict[str, bytes]:
        """Return all fingerprints; blocks."""
        return {name: self.fingerprint(name) for name in self.names()}

    def fingerprint(self, name: str) -> bytes:
        """Return a model's fingerprint, b"" if there is no such model; blocks."""
        return b"-" if name in self.names() else b""

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Read one model; blocks."""
        if name not in self.names():
            return None, b""
        fingerprint = self.fingerprint(name)
        if config is not None:
            finding = Finding(self._path, f"takes no configuration: {self.unconfigurable}", model=name)
            return ModelEntry(name, self._path, findings=(finding,)), fingerprint
        return self._entry(name), fingerprint

    def _entry(self, name: str) -> ModelEntry:
        return ModelEntry(name, self._path, (self.spec(name),), model_config_pb2().ModelConfig(name=name))
