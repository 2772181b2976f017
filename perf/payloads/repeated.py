"""Repeated: the same few requests over and over, by whoever asks next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeated:
    """Requests that stand alone; all slots of a process take turns with them."""

    requests: tuple[bytes, ...]
    rows: int = 1

    def stream(self, slot: int) -> Iterator[bytes]:
        """Give them from one that the slot's number chooses."""
        first = slot % len(self.requests)
        return itertools.cycle(self.requests[first:] + self.requests[:first])

    def ending(self, slot: int) -> None:
        """There is nothing to end."""
