"""Journal: what clients have told an engine, for the engine that replaces it.

The engine sends it to the supervisor (KEEP), which sends all of it to the next one before its START (KEPT). Only the
engine interprets the keys: `lasting.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

Kept = tuple[Any, list[int]]
"""A value, and its descriptors."""


class Journal:
    """The last value of each key, in order of arrival. Held by the supervisor.

    Ownership: the journal owns the descriptors, and closes them when their key is replaced or removed.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __iter__(self) -> Iterator[tuple[str, Kept]]:
        return iter(list(self._kept.items()))

    def keep(self, key: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Keep a value; None removes the key."""
        _, old = self._kept.pop(key, (None, []))
        for descriptor in old:
            os.close(descriptor)
        if value is not None:
            self._kept[key] = value, list(descriptors)

    def close(self) -> None:
        """Remove everything."""
        for key, _ in self:
            self.keep(key, None)
