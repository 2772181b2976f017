"""Journal: what an engine has been told while it served, for the engine that takes its place.

The engine tells the supervisor (KEEP), which gives it all to the next one before its START (KEPT). What each key means
is the engine's own affair: `lasting.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

Kept = tuple[Any, list[int]]
"""A value, and the descriptors that belong to it."""


class Journal:
    """The last value of each key, in the order in which they came. The supervisor's.

    Ownership: the descriptors are the journal's, and closed when their key is forgotten.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def __iter__(self) -> Iterator[tuple[str, Kept]]:
        return iter(list(self._kept.items()))

    def keep(self, key: str, value: Any, descriptors: Sequence[int] = ()) -> None:
        """Remember a value; None: forget the key."""
        _, old = self._kept.pop(key, (None, []))
        for descriptor in old:
            os.close(descriptor)
        if value is not None:
            self._kept[key] = value, list(descriptors)

    def close(self) -> None:
        """Forget everything."""
        for key, _ in self:
            self.keep(key, None)
