"""The states of a model's versions and their transitions. Used by Repository and ModelControl."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scan import ModelEntry

UNLOADED = "unloaded"


class ModelState(enum.StrEnum):
    """The state of a version, named as in the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, frozen=True, eq=False)
class VersionStatus:
    """One version's state, and why it is not ready, or why it could not be replaced while it serves.

    `version` 0 stands for a model without versions.
    A change of state makes a new object, so a holder can tell whether its state is still current.
    """

    version: int
    state: ModelState
    reason: str = ""

    @property
    def should_serve(self) -> bool:
        """Whether it is ready or should be. A version that was unloaded does not affect readiness."""
        unloaded = self.reason == UNLOADED or self.reason.startswith(f"{UNLOADED}: ")
        return self.state is not ModelState.UNLOADING and not (self.state is ModelState.UNAVAILABLE and unloaded)


@dataclass(slots=True)
class ModelRecord:
    """What is known of one model that was loaded, or should have been.

    Invariant: a version that serves is READY, even if attempts to replace it fail.
    `config` is the declared ModelConfig of what is served. `fingerprint` is that of its files when last read, empty if
    it came from elsewhere. `upload_folder` holds the files of what is served if a request sent them.
    `requested`: it was loaded by name or at start, not because an ensemble needs it. `ensemble_entry` is the ModelEntry
    of an ensemble that serves, or that waits for models it needs. `served_entry` is the ModelEntry of what serves, and
    `content_fingerprint` the fingerprint of its contents (changes.py).
    """

    name: str
    versions: dict[int, VersionStatus] = field(default_factory=dict)
    config: Any = None
    fingerprint: bytes = b""
    upload_folder: Path | None = None
    requested: bool = False
    ensemble_entry: ModelEntry | None = None
    served_entry: ModelEntry | None = None
    content_fingerprint: bytes = b""

    def statuses(self) -> list[VersionStatus]:
        """Return the versions in order."""
        return [self.versions[version] for version in sorted(self.versions)]

    @property
    def ready_versions(self) -> list[int]:
        """The versions that serve."""
        return [status.version for status in self.statuses() if status.state is ModelState.READY]

    @property
    def all_ready(self) -> bool:
        """Whether something serves, and every version that should serve does."""
        return bool(self.ready_versions) and all(
            status.state is ModelState.READY for status in self.statuses() if status.should_serve
        )

    def begin_load(self, versions: Iterable[int]) -> None:
        """Start loading versions. Earlier failures are dropped."""
        self.versions = {version: status for version, status in self.versions.items() if not status.should_serve} | {
            version: VersionStatus(version, ModelState.READY) for version in self.ready_versions
        }
        for version in versions:
            if version not in self.ready_versions:
                self._set(version, ModelState.LOADING)

    def record_failure(self, version: int, reason: str) -> None:
        """Record why a version, or the model (version 0), failed to load. What serves continues, with the reason."""
        ready = self.ready_versions
        for affected in ready if ready and not version else (version,):
            self._set(affected, ModelState.READY if affected in ready else ModelState.UNAVAILABLE, reason)

    def abort_load(self) -> None:
        """End a failed load: versions that did load are not served."""
        for status in self.statuses():
            if status.state is ModelState.LOADING:
                self._set(status.version, ModelState.UNAVAILABLE, UNLOADED)

    def serve(self, versions: Iterable[int]) -> list[VersionStatus]:
        """Make these versions, and no others, serve. Returns: those that served before and are now UNLOADING."""
        wanted = set(versions)
        unloading = [
            self._set(version, ModelState.UNLOADING) for version in self.ready_versions if version not in wanted
        ]
        for version in wanted:
            self._set(version, ModelState.READY)
        return unloading

    @property
    def dependencies(self) -> frozenset[str]:
        """The models without which it does not serve."""
        return self.ensemble_entry.dependencies if self.ensemble_entry is not None else frozenset()

    def unload(self) -> list[VersionStatus]:
        """Stop serving all versions. Returns: those that served before and are now UNLOADING."""
        unloading = self.serve(())
        for status in self.statuses():
            if status.should_serve:
                self._set(status.version, ModelState.UNAVAILABLE, UNLOADED)
        self.versions.pop(0, None)
        return unloading

    def mark_unloaded(self, unloading: Iterable[VersionStatus], reason: str = UNLOADED) -> None:
        """Mark versions as unloaded, with the reason, except those that have been loaded again since."""
        for status in unloading:
            if self.versions.get(status.version) is status:
                self._set(status.version, ModelState.UNAVAILABLE, reason)

    def _set(self, version: int, state: ModelState, reason: str = "") -> VersionStatus:
        status = self.versions[version] = VersionStatus(version, state, reason)
        return status
