"""Dependents: the ensembles that need a model, and what becomes of them when it comes, goes or changes.

Called by ModelControl.
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
    """Takes down ensembles that cannot go on, and brings up those that have waited for what has come.

    Threads: the event loop's. Must be called without any of the `locks` held.
    """

    def __init__(self, repository: Repository, transitions: Transitions, locks: Locks) -> None:
        self._repository = repository
        self._transitions = transitions
        self._locks = locks
        self._kept: Counter[str] = Counter()
        self._released = asyncio.Event()

    @contextmanager
    def kept(self, names: Iterable[str]) -> Iterator[None]:
        """Let none of these be idle meanwhile: an ensemble that needs them is being loaded."""
        kept = Counter(names)
        self._kept += kept
        try:
            yield
        finally:
            self._kept -= kept
            self._released.set()
            self._released = asyncio.Event()

    async def released(self, name: str) -> None:
        """Wait until no ensemble that needs a model is being loaded: it would miss what is unloaded under its hands."""
        while name in self._kept:
            await self._released.wait()

    def idle(self, name: str) -> bool:
        """Tell whether a model was loaded for an ensemble, and none needs it any more."""
        record = self._repository.records.get(name)
        others = self._repository.records.values()
        if record is None or record.asked or name in self._kept:
            return False
        return not any(name in other.needs for other in others)

    async def revise(self, name: str) -> None:
        """See to the ensembles that need a model which has come, gone or changed."""
        records = list(self._repository.records.values())
        await asyncio.gather(*(self.revise_one(record.name) for record in records if name in record.needs))

    async def revise_one(self, name: str) -> None:
        """Take down an ensemble that can not go on, and bring up one that waited; then look who needs it."""
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
        """Tell whether a model that an ensemble needs was taken away, and not merely lost or changed."""
        records = self._repository.records
        return any(
            name not in records or not any(held.wanted for held in records[name].listed()) for name in ensemble.needs
        )
