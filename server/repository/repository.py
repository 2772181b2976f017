"""Repository: what is on disk, and the state of each version of it. Made by the composition root."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.backends.errors import InferError
from penstock.batching.model import Model
from penstock.batching.spec import ModelSpec

from .completed import completed, to_json
from .findings import Finding
from .pbtxt import model_config_pb2
from .scan import Defaults, Entry, scan

logger = logging.getLogger("penstock.repository")


class State(enum.StrEnum):
    """Where a version stands, in the repository index's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class VersionState:
    """One version's state, and why it is not ready. `version` 0: all of a model that has no version to speak of."""

    version: int
    state: State
    reason: str = ""


class Loads(Protocol):
    """What Repository needs of the Engine."""

    async def load(self, spec: ModelSpec) -> Model: ...


class Repository:
    """All models under some paths.

    Invariant: what cannot be served is UNAVAILABLE with its reason, and stops nothing else.
    Threads: the event loop's; `read` may run before there is one.
    """

    def __init__(self, paths: Iterable[Path], defaults: Defaults | None = None) -> None:
        self._paths = tuple(paths)
        self._defaults = defaults or Defaults()
        self._entries: Mapping[str, Entry] = {}
        self._states: dict[str, list[VersionState]] = {}
        self._stray: list[Finding] = []
        self._loaded = False

    def read(self) -> list[Finding]:
        """Read everything on disk. Returns: every mistake and warning."""
        entries, self._stray = scan(self._paths, self._defaults)
        self._entries = {entry.name: entry for entry in entries}
        self._states = {entry.name: _states(entry) for entry in entries}
        return [*self._stray, *(finding for entry in entries for finding in entry.findings)]

    async def load_all(self, engine: Loads, threads: int = 4) -> list[str]:
        """Load every version that was read, `threads` at a time.

        Returns: the reason of each version that is not served, and every mistake about no model; for --exit-on-error.
        """
        turn = asyncio.Semaphore(threads)
        specs = [spec for entry in self._entries.values() for spec in entry.specs]
        await asyncio.gather(*(self._load(engine, spec, turn) for spec in specs))
        self._loaded = True
        reasons = [str(finding) for finding in self._stray if finding.mistake]
        for name, states in self._states.items():
            reasons += [f"{_titled(name, held)}: {held.reason}" for held in states if held.state is not State.READY]
        return reasons

    async def _load(self, engine: Loads, spec: ModelSpec, turn: asyncio.Semaphore) -> None:
        held = next(held for held in self._states[spec.name] if held.version == spec.version)
        async with turn:
            try:
                await engine.load(spec)
            except InferError as error:
                held.state, held.reason = State.UNAVAILABLE, error.message
            except Exception as error:
                logger.exception("model %s version %d: failed to load", spec.name, spec.version)
                held.state, held.reason = State.UNAVAILABLE, f"{type(error).__name__}: {error}"
            else:
                held.state, held.reason = State.READY, ""
                logger.info("model %s version %d: ready", spec.name, spec.version)
                return
        logger.error("model %s version %d: %s", spec.name, spec.version, held.reason)

    def ready(self, strict: bool = True) -> bool:
        """Tell whether everything that should be served is; not strict: whether loading has ended."""
        if not self._loaded:
            return False
        return not strict or all(held.state is State.READY for states in self._states.values() for held in states)

    def index(self, ready: bool = False) -> list[dict[str, str]]:
        """List every version with its state, as `POST /v2/repository/index` does; `ready`: only those that are."""
        rows: list[dict[str, str]] = []
        for name, states in self._states.items():
            for held in states:
                if ready and held.state is not State.READY:
                    continue
                row = {"name": name}
                if held.version:
                    row["version"] = str(held.version)
                row["state"] = held.state.value
                if held.reason:
                    row["reason"] = held.reason
                rows.append(row)
        return rows

    def config(self, model: Model) -> Any:
        """Give the ModelConfig a loaded model runs with."""
        entry = self._entries.get(model.name)
        declared = entry.config if entry is not None else model_config_pb2().ModelConfig()
        return completed(declared, model.spec, model.platform)

    def config_json(self, model: Model) -> dict[str, Any]:
        """Give the same as `GET /v2/models/{name}/config` answers it."""
        return to_json(self.config(model))


def _states(entry: Entry) -> list[VersionState]:
    states = [VersionState(spec.version, State.LOADING) for spec in entry.specs]
    reasons: dict[int, list[str]] = {}
    for finding in entry.findings:
        if finding.mistake:
            reasons.setdefault(finding.version, []).append(str(finding))
    states += [VersionState(version, State.UNAVAILABLE, "; ".join(texts)) for version, texts in reasons.items()]
    return sorted(states, key=lambda held: held.version)


def _titled(name: str, held: VersionState) -> str:
    return f"model '{name}' version {held.version}" if held.version else f"model '{name}'"
