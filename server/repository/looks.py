"""Looks: what polling has seen of the models on disk, from one look to the next. Pure; used by ModelControl."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("penstock.repository")

RESTLESS_LOOKS = 10
"""What has been different at so many looks in succession is told: a copy, however large, is through one day."""


class Looks:
    """The fingerprints of the last look.

    Invariant: `restless` are the models that were different at each of the last RESTLESS_LOOKS looks, or more.
    """

    def __init__(self) -> None:
        self.restless: set[str] = set()
        self._seen: Mapping[str, bytes] = {}
        self._changes: dict[str, int] = {}

    def first(self, prints: Mapping[str, bytes]) -> None:
        """Take what was loaded at start."""
        self._seen = prints

    def same(self, prints: Mapping[str, bytes]) -> list[str]:
        """Take a look, and log who is restless, once. Returns: the models that are as they were at the look before."""
        before, self._seen = self._seen, prints
        changes = {name: self._changes.get(name, 0) + 1 for name in prints if before.get(name) != prints[name]}
        restless = {name for name, count in changes.items() if count >= RESTLESS_LOOKS}
        for name in sorted(restless - self.restless):
            text = "model %s: its files have changed at each of the last %d polls; it is loaded once two polls agree"
            logger.warning(text, name, RESTLESS_LOOKS, extra={"model": name})
        self._changes, self.restless = changes, restless
        return [name for name in prints if name not in changes]
