"""Journal: what clients have changed in an engine, for the engine that replaces it.

The engine sends it to the supervisor (SAVE), which sends all of it to the next one before its START (RESTORE). Only the
engine interprets the keys: `saved_state.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

JournalEntry = tuple[Any, list[int]]
"""A value, and its descriptors."""


class Journal:
    """The last value of each key, in order of arrival. Held by the supervisor.

    Ownership: the journal owns the descriptors, and closes them when their key is replaced or removed.
    """

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __iter__(self) -> Iterator[tuple[str, JournalEntry]]:
        return iter(list(self._entries.items()))

    def put(self, key: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Store a value; None removes the key."""
        _, old = self._entries.pop(key, (None, []))
        for descriptor in old:
            os.close(descriptor)
        if value is not None:
            self._entries[key] = value, list(descriptors)

    def close(self) -> None:
        """Remove everything."""
        for key, _ in self:
            self.put(key, None)
