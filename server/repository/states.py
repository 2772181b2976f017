"""The states of a model's versions and their transitions. Used by Repository and ModelControl."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scan import Entry

UNLOADED = "unloaded"


class ModelState(enum.StrEnum):
    """The state of a version, named as in the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, frozen=True, eq=False)
class VersionState:
    """One version's state, and why it is not ready, or why it could not be replaced while it serves.

    `version` 0 stands for a model without versions.
    A change of state makes a new object, so a holder can tell whether its state is still current.
    """

    version: int
    state: ModelState
    reason: str = ""

    @property
    def wanted(self) -> bool:
        """Whether it is ready or should be. A version that was unloaded does not affect readiness."""
        unloaded = self.reason == UNLOADED or self.reason.startswith(f"{UNLOADED}: ")
        return self.state is not ModelState.UNLOADING and not (self.state is ModelState.UNAVAILABLE and unloaded)


@dataclass(slots=True)
class ModelRecord:
    """What is known of one model that was loaded, or should have been.

    Invariant: a version that serves is READY, even if attempts to replace it fail.
    `config` is the declared ModelConfig of what is served. `fingerprint` is that of its files when last read, empty if
    it came from elsewhere. `folder` holds the files of what is served if a request sent them.
    `asked`: it was loaded by name or at start, not because an ensemble needs it. `ensemble` is the Entry of an ensemble
    that serves, or that waits for models it needs. `served` is the Entry of what serves, and `contents` the fingerprint
    of its contents (changes.py).
    """

    name: str
    versions: dict[int, VersionState] = field(default_factory=dict)
    config: Any = None
    fingerprint: bytes = b""
    folder: Path | None = None
    asked: bool = False
    ensemble: Entry | None = None
    served: Entry | None = None
    contents: bytes = b""

    def listed(self) -> list[VersionState]:
        """Return the versions in order."""
        return [self.versions[version] for version in sorted(self.versions)]

    @property
    def ready(self) -> list[int]:
        """The versions that serve."""
        return [held.version for held in self.listed() if held.state is ModelState.READY]

    @property
    def settled(self) -> bool:
        """Whether something serves, and every version that should serve does."""
        return bool(self.ready) and all(held.state is ModelState.READY for held in self.listed() if held.wanted)

    def begin(self, versions: Iterable[int]) -> None:
        """Start loading versions. Earlier failures are dropped."""
        self.versions = {number: held for number, held in self.versions.items() if not held.wanted} | {
            version: VersionState(version, ModelState.READY) for version in self.ready
        }
        for version in versions:
            if version not in self.ready:
                self._set(version, ModelState.LOADING)

    def fail(self, version: int, reason: str) -> None:
        """Record why a version, or the model (version 0), failed to load. What serves continues, with the reason."""
        ready = self.ready
        for each in ready if ready and not version else (version,):
            self._set(each, ModelState.READY if each in ready else ModelState.UNAVAILABLE, reason)

    def give_up(self) -> None:
        """End a failed load: versions that did load are not served."""
        for held in self.listed():
            if held.state is ModelState.LOADING:
                self._set(held.version, ModelState.UNAVAILABLE, UNLOADED)

    def serve(self, versions: Iterable[int]) -> list[VersionState]:
        """Make these versions, and no others, serve. Returns: those that served before and are now UNLOADING."""
        chosen = set(versions)
        leaving = [self._set(version, ModelState.UNLOADING) for version in self.ready if version not in chosen]
        for version in chosen:
            self._set(version, ModelState.READY)
        return leaving

    @property
    def needs(self) -> frozenset[str]:
        """The models without which it does not serve."""
        return self.ensemble.needs if self.ensemble is not None else frozenset()

    def unload(self) -> list[VersionState]:
        """Stop serving all versions. Returns: those that served before and are now UNLOADING."""
        leaving = self.serve(())
        for held in self.listed():
            if held.wanted:
                self._set(held.version, ModelState.UNAVAILABLE, UNLOADED)
        self.versions.pop(0, None)
        return leaving

    def gone(self, leaving: Iterable[VersionState], reason: str = UNLOADED) -> None:
        """Mark versions as unloaded, with the reason, except those that have been loaded again since."""
        for held in leaving:
            if self.versions.get(held.version) is held:
                self._set(held.version, ModelState.UNAVAILABLE, reason)

    def _set(self, version: int, state: ModelState, reason: str = "") -> VersionState:
        held = self.versions[version] = VersionState(version, state, reason)
        return held
