"""The states of a model's versions, and how they may change. Called by Repository and ModelControl."""

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
    """Where a version stands, in the repository index's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, frozen=True, eq=False)
class VersionState:
    """One version's state, and why it is not ready, or could not be replaced while it serves.

    `version` 0: all of a model that has no version to speak of.

    A change of state is a new object: whoever holds one can tell whether it still stands.
    """

    version: int
    state: ModelState
    reason: str = ""

    @property
    def wanted(self) -> bool:
        """Whether it is ready, or should be: what was unloaded keeps nobody from being ready."""
        unloaded = self.reason == UNLOADED or self.reason.startswith(f"{UNLOADED}: ")
        return self.state is not ModelState.UNLOADING and not (self.state is ModelState.UNAVAILABLE and unloaded)


@dataclass(slots=True)
class ModelRecord:
    """All that is known of one model that was loaded, or was to be.

    Invariant: a version that serves is READY, whatever becomes of the attempts to replace it.
    `config` is the ModelConfig as declared for what is served. `fingerprint` is that of its files when it was last
    read, empty when it came from elsewhere. `folder` holds the files of what is served if a request brought them.
    `asked`: it was loaded by its name, or at start, and not because an ensemble needs it. `ensemble` is the Entry of an
    ensemble that serves, or waits for the models that it needs. `served` is what serves as it was read, and `contents`
    what its files were (changes.py).
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
        """Give the versions in order."""
        return [self.versions[version] for version in sorted(self.versions)]

    @property
    def ready(self) -> list[int]:
        """The versions that serve."""
        return [held.version for held in self.listed() if held.state is ModelState.READY]

    @property
    def settled(self) -> bool:
        """Whether something serves, and nothing stands in the way of all that should."""
        return bool(self.ready) and all(held.state is ModelState.READY for held in self.listed() if held.wanted)

    def begin(self, versions: Iterable[int]) -> None:
        """Start loading versions; earlier failures are forgotten."""
        self.versions = {number: held for number, held in self.versions.items() if not held.wanted} | {
            version: VersionState(version, ModelState.READY) for version in self.ready
        }
        for version in versions:
            if version not in self.ready:
                self._set(version, ModelState.LOADING)

    def fail(self, version: int, reason: str) -> None:
        """Note why a version could not be loaded, or none at all for version 0. What serves goes on, and says why."""
        ready = self.ready
        for each in ready if ready and not version else (version,):
            self._set(each, ModelState.READY if each in ready else ModelState.UNAVAILABLE, reason)

    def give_up(self) -> None:
        """End a load that failed: what loaded beside the failures is not served."""
        for held in self.listed():
            if held.state is ModelState.LOADING:
                self._set(held.version, ModelState.UNAVAILABLE, UNLOADED)

    def serve(self, versions: Iterable[int]) -> list[VersionState]:
        """Let these versions and no others serve. Returns: those that served before and are UNLOADING now."""
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
        """Let nothing serve. Returns: those that served before and are UNLOADING now."""
        leaving = self.serve(())
        for held in self.listed():
            if held.wanted:
                self._set(held.version, ModelState.UNAVAILABLE, UNLOADED)
        self.versions.pop(0, None)
        return leaving

    def gone(self, leaving: Iterable[VersionState], reason: str = UNLOADED) -> None:
        """Note that versions have ended, and why; of those loaded again meanwhile nothing changes."""
        for held in leaving:
            if self.versions.get(held.version) is held:
                self._set(held.version, ModelState.UNAVAILABLE, reason)

    def _set(self, version: int, state: ModelState, reason: str = "") -> VersionState:
        held = self.versions[version] = VersionState(version, state, reason)
        return held
