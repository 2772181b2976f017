"""Looks: what polling has seen of the models on disk. Pure; used by ModelControl."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("penstock.repository")

RESTLESS_LOOKS = 10
"""After this many differing polls in a row, a model is reported: even a large copy ends some time."""


class Looks:
    """The fingerprints of the last poll.

    Invariant: `restless` holds the models that differed at each of the last RESTLESS_LOOKS polls or more.
    """

    def __init__(self) -> None:
        self.restless: set[str] = set()
        self._seen: Mapping[str, bytes] = {}
        self._changes: dict[str, int] = {}

    def first(self, prints: Mapping[str, bytes]) -> None:
        """Record what was loaded at start."""
        self._seen = prints

    def same(self, prints: Mapping[str, bytes]) -> list[str]:
        """Record a poll, and log newly restless models once. Returns: the models unchanged since the previous poll."""
        before, self._seen = self._seen, prints
        changes = {name: self._changes.get(name, 0) + 1 for name in prints if before.get(name) != prints[name]}
        restless = {name for name, count in changes.items() if count >= RESTLESS_LOOKS}
        for name in sorted(restless - self.restless):
            text = "model %s: its files have changed at each of the last %d polls; it is loaded once two polls agree"
            logger.warning(text, name, RESTLESS_LOOKS, extra={"model": name})
        self._changes, self.restless = changes, restless
        return [name for name in prints if name not in changes]
