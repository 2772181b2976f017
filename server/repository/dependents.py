"""Dependents: the ensembles that need a model, and what happens to them when it is loaded, unloaded or changed.

Used by ModelControl.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .repository import Repository
from .states import UNLOADED, ModelRecord
from .transitions import Transitions

logger = logging.getLogger("penstock.repository")

Locks = weakref.WeakValueDictionary[str, asyncio.Lock]


class Dependents:
    """Takes down ensembles that cannot continue, and brings up those that waited for a model.

    Threads: the event loop's. Must be called without holding any of the `locks`.
    """

    def __init__(self, repository: Repository, transitions: Transitions, locks: Locks) -> None:
        self._repository = repository
        self._transitions = transitions
        self._locks = locks
        self._pinned: Counter[str] = Counter()
        self._unpinned = asyncio.Event()

    @contextmanager
    def pin(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these models from counting as idle while an ensemble that needs them is being loaded."""
        added = Counter(names)
        self._pinned += added
        try:
            yield
        finally:
            self._pinned -= added
            self._unpinned.set()
            self._unpinned = asyncio.Event()

    async def wait_unpinned(self, name: str) -> None:
        """Wait until no ensemble that needs this model is being loaded, so that it is not unloaded during the load."""
        while name in self._pinned:
            await self._unpinned.wait()

    def is_idle(self, name: str) -> bool:
        """Return whether a model was loaded for an ensemble and is no longer needed by any."""
        record = self._repository.records.get(name)
        others = self._repository.records.values()
        if record is None or record.requested or name in self._pinned:
            return False
        return not any(name in other.dependencies for other in others)

    async def refresh_dependents(self, name: str) -> None:
        """Revise the ensembles that need a model which was loaded, unloaded or changed."""
        records = list(self._repository.records.values())
        await asyncio.gather(*(self.refresh(record.name) for record in records if name in record.dependencies))

    async def refresh(self, name: str) -> None:
        """Take down an ensemble that cannot continue, or bring up one that waited. Then revise those that need it."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._repository.records.get(name)
            if record is None or record.ensemble_entry is None:
                return
            if record.ready_versions:
                reason = self._transitions.ensemble_problem(record)
                if not reason:
                    return
                logger.error("model %s: %s", name, reason)
                retirement = self._take_down(record, reason)
            else:
                retirement = await self._transitions.try_load(record, record.ensemble_entry, atomic=True)
        if retirement is not None:
            await self.refresh_dependents(name)
            await retirement

    def _take_down(self, record: ModelRecord, reason: str) -> asyncio.Task[None] | None:
        return self._transitions.unload(
            record, f"{UNLOADED}: {reason}" if self._has_unloaded_dependency(record) else reason
        )

    def _has_unloaded_dependency(self, ensemble: ModelRecord) -> bool:
        """Return whether a model that an ensemble needs was unloaded, as opposed to lost or changed."""
        records = self._repository.records
        return any(
            name not in records or not any(status.should_serve for status in records[name].statuses())
            for name in ensemble.dependencies
        )
