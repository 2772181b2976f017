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
        self._kept: Counter[str] = Counter()
        self._released = asyncio.Event()

    @contextmanager
    def kept(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these models from counting as idle while an ensemble that needs them is being loaded."""
        kept = Counter(names)
        self._kept += kept
        try:
            yield
        finally:
            self._kept -= kept
            self._released.set()
            self._released = asyncio.Event()

    async def released(self, name: str) -> None:
        """Wait until no ensemble that needs this model is being loaded, so that it is not unloaded during the load."""
        while name in self._kept:
            await self._released.wait()

    def idle(self, name: str) -> bool:
        """Return whether a model was loaded for an ensemble and is no longer needed by any."""
        record = self._repository.records.get(name)
        others = self._repository.records.values()
        if record is None or record.asked or name in self._kept:
            return False
        return not any(name in other.needs for other in others)

    async def revise(self, name: str) -> None:
        """Revise the ensembles that need a model which was loaded, unloaded or changed."""
        records = list(self._repository.records.values())
        await asyncio.gather(*(self.revise_one(record.name) for record in records if name in record.needs))

    async def revise_one(self, name: str) -> None:
        """Take down an ensemble that cannot continue, or bring up one that waited. Then revise those that need it."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            record = self._repository.records.get(name)
            if record is None or record.ensemble is None:
                return
            if record.ready:
                reason = self._transitions.misfit(record)
                if not reason:
                    return
                logger.error("model %s: %s", name, reason)
                gone = self._down(record, reason)
            else:
                gone = await self._transitions.try_up(record, record.ensemble, whole=True)
        if gone is not None:
            await self.revise(name)
            await gone

    def _down(self, record: ModelRecord, reason: str) -> asyncio.Task[None] | None:
        return self._transitions.take_down(record, f"{UNLOADED}: {reason}" if self._unloaded(record) else reason)

    def _unloaded(self, ensemble: ModelRecord) -> bool:
        """Return whether a model that an ensemble needs was unloaded, as opposed to lost or changed."""
        records = self._repository.records
        return any(
            name not in records or not any(held.wanted for held in records[name].listed()) for name in ensemble.needs
        )
