"""Repeated: the same few requests, sent repeatedly by any slot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeated:
    """Independent requests, which all slots of a process cycle through."""

    requests: tuple[bytes, ...]
    rows: int = 1

    def stream(self, slot: int) -> Iterator[bytes]:
        """Return them, beginning with one chosen by the slot's number."""
        first_index = slot % len(self.requests)
        return itertools.cycle(self.requests[first_index:] + self.requests[:first_index])

    def ending(self, slot: int) -> None:
        """Return nothing: there is nothing to end."""
