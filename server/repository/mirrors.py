"""Mirrors: the paths that a server serves, including up-to-date copies of remote repositories.

Made by the composition root and by `penstock check`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.server.options.backend_config import TENSORFLOW, default_rows, tensorflow_options
from penstock.server.options.gpu_settings import parse_devices, parse_limits
from penstock.server.settings import Settings
from penstock.server.threads import StripedLocks

from .address import is_remote
from .defaults import Defaults
from .findings import Finding
from .gpus import Gpus
from .remote import Remote, RemoteError
from .repository import Repository
from .scan import ModelEntry, list_names, locate, scan

logger = logging.getLogger("penstock.repository")

CORTEX_FILE = "cortex.yaml"
"""The file in a project's folder, which could be mistaken for a model repository."""
_S2I = Path(".s2i", "environment")
"""The same for a Seldon component; seldon/modules.py reads it."""
_SELDON_FILES = frozenset({".py", ".yaml", ".yml", ".json"})
"""The suffixes of files of a Seldon component or graph."""

_NOT_COPIED = b"not copied"
"""The fingerprint of a model that was never copied: while it stays so, polling finds nothing new to load."""


def make_defaults(settings: Settings) -> Defaults:
    """Take from the settings the values for what configurations omit."""
    return Defaults(
        max_batch_rows=settings.completed_max_batch_size,
        tensorflow_rows=default_rows(settings.backend_config, TENSORFLOW, settings.default_max_batch_size),
        tensorflow_options=tensorflow_options(settings.backend_config),
        config_name=settings.model_config_name,
        auto_complete=not settings.disable_auto_complete_config,
        gpus=Gpus(parse_devices(settings.default_device), settings.min_supported_compute_capability),
        cpu_fallback=settings.cpu_fallback,
        gpu_limits=parse_limits(settings.model_load_gpu_limit),
    )


class Mirrors:
    """Local paths, and remote repositories with their copies.

    Invariant: if a remote repository cannot be read, its copy stays as it was.
    Threads: any. `open` and the refreshing methods block.
    """

    def __init__(self, local: Sequence[Path], remotes: Sequence[Remote] = ()) -> None:
        self.local = tuple(local)
        self.remotes = tuple(remotes)

    @classmethod
    def from_paths(cls, paths: Iterable[str]) -> Mirrors:
        """Separate paths from URLs. Duplicates are dropped."""
        unique_paths = list(dict.fromkeys(paths))
        return cls(
            [Path(path) for path in unique_paths if not is_remote(path)],
            [Remote(path) for path in unique_paths if is_remote(path)],
        )

    @property
    def paths(self) -> list[Path]:
        """All paths to scan."""
        return [*self.local, *(remote.root for remote in self.remotes)]

    def invalid_path(self) -> Finding | None:
        """Report a path that cannot be a model repository; None if all can."""
        for path in self.local:
            if not path.exists():
                return Finding(path, "no such file or folder")
            if not path.is_dir() and path.suffix != ".onnx" and path.name != CORTEX_FILE:
                hint = "; for a Seldon Core graph, set --dialect seldon" if path.suffix in _SELDON_FILES else ""
                return Finding(path, f"neither a model repository nor an .onnx file{hint}")
        return self.foreign_project()

    def foreign_project(self) -> Finding | None:
        """Report a path that is a project of another dialect; None if none is."""
        for path in self.local:
            if path.name == CORTEX_FILE or ((path / CORTEX_FILE).is_file() and not list_names([path])):
                return Finding(path, "is a Cortex project: serve it with --dialect cortex")
            if (path / _S2I).is_file() and not list_names([path]):
                return Finding(path, "is a Seldon component: serve it with --dialect seldon")
        return None

    def repository(self, defaults: Defaults) -> Repository:
        """Return the Repository of these paths."""
        return MirroredRepository(self, defaults) if self.remotes else Repository(self.local, defaults)

    def open(self) -> None:
        """Connect to every remote repository. Raises: RemoteError, after removing all copies."""
        try:
            for remote in self.remotes:
                remote.open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the copies."""
        for remote in self.remotes:
            remote.close()

    def refresh_all(self) -> tuple[dict[str, Finding], list[Finding]]:
        """Bring all copies up to date. Returns: what failed, for models by name, and for whole repositories."""
        failures: dict[str, Finding] = {}
        general: list[Finding] = []
        for remote in self.remotes:
            try:
                reasons = remote.refresh_all()
            except RemoteError as error:
                general.append(Finding(remote.root, f"could not be synchronized: {error}", unusable_path=True))
            else:
                failures |= {name: _copy_failure(remote, name, reason) for name, reason in reasons.items()}
        return failures, general

    def refresh(self, name: str) -> Finding | None:
        """Bring the copies of one model up to date. Returns: why it cannot be read, if so."""
        failed: dict[Remote, str] = {}
        for remote in self.remotes:
            try:
                remote.refresh(name)
            except RemoteError as error:
                failed[remote] = str(error)
        found = locate(self.paths, name)
        for remote, reason in failed.items():
            if not found or remote.root / name in found:
                return _copy_failure(remote, name, reason)
            # it is elsewhere; whether it is here too is unknown
            logger.warning("%s", reason)
        return None

    def names(self) -> list[str]:
        """List the names of the models. A remote repository that cannot be read lists those of its copy."""
        names = list_names(self.local)
        for remote in self.remotes:
            try:
                names += remote.names()
            except RemoteError as error:
                logger.warning("%s", error)
                names += list_names([remote.root])
        return sorted(names)

    def with_urls(self, text: str) -> str:
        """Replace the paths of copies in a text by the URLs of their repositories."""
        for remote in self.remotes:
            text = text.replace(str(remote.root), str(remote.address))
        return text


class MirroredRepository(Repository):
    """A Repository that brings its copies of remote models up to date whenever it looks at the disk.

    Invariant: a model whose copy cannot be brought up to date is UNAVAILABLE with the reason, or, if it is being
    served, continues as it was.
    """

    def __init__(self, mirrors: Mirrors, defaults: Defaults) -> None:
        super().__init__(mirrors.paths, defaults)
        self._mirrors = mirrors
        self._locks = StripedLocks()
        self._failures: Mapping[str, Finding] = {}
        self._general_findings: Sequence[Finding] = ()

    def scan(self) -> tuple[list[ModelEntry], list[Finding], dict[str, bytes]]:
        """Read everything, as it is in the stores now. Blocks."""
        fingerprints = self._refresh_fingerprints()
        entries, findings = scan(self._paths, self._defaults)
        readable = [entry for entry in entries if entry.name not in self._failures]
        failed = [_unreadable(name, finding) for name, finding in self._failures.items()]
        return (
            sorted([*readable, *failed], key=lambda entry: entry.name),
            [*findings, *self._general_findings],
            fingerprints,
        )

    def _current_findings(self) -> list[Finding]:
        return [*super()._current_findings(), *self._mirrors.refresh_all()[1]]

    def fingerprints(self) -> dict[str, bytes]:
        """Bring all copies up to date and return the fingerprints of the models. Blocks."""
        reported = {str(finding) for finding in (*self._failures.values(), *self._general_findings)}
        fingerprints = self._refresh_fingerprints()
        for finding in (*self._failures.values(), *self._general_findings):
            if str(finding) not in reported:
                logger.warning("%s", finding)
        return fingerprints

    def _refresh_fingerprints(self) -> dict[str, bytes]:
        """Do the same as `fingerprints` without logging."""
        self._failures, self._general_findings = self._mirrors.refresh_all()
        fingerprints = super().fingerprints()
        return dict.fromkeys(self._failures, _NOT_COPIED) | fingerprints

    def read(self, name: str, config: Any = None) -> tuple[ModelEntry | None, bytes]:
        """Copy one model again if it has changed, and read it. Blocks."""
        # one at a time, so that nothing is replaced while it is read
        with self._locks.lock_for(name):
            finding = self._mirrors.refresh(name)
            if finding is None:
                return super().read(name, config)
        return _unreadable(name, finding), b"" if locate(self._mirrors.paths, name) else _NOT_COPIED

    def names(self) -> list[str]:
        """List the names of the models in the stores and on disk. Blocks."""
        return self._mirrors.names()


def _copy_failure(remote: Remote, name: str, reason: str) -> Finding:
    return Finding(remote.root / name, f"could not be copied: {reason}", model=name)


def _unreadable(name: str, finding: Finding) -> ModelEntry:
    return ModelEntry(name, finding.path, findings=(finding,))
