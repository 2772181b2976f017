"""PollHistory: what polling has seen of the models on disk. Pure; used by ModelControl."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("penstock.repository")

UNSTABLE_POLLS = 10
"""After this many differing polls in a row, a model is reported: even a large copy ends some time."""


class PollHistory:
    """The fingerprints of the last poll.

    Invariant: `unstable` holds the models that differed at each of the last UNSTABLE_POLLS polls or more.
    """

    def __init__(self) -> None:
        self.unstable: set[str] = set()
        self._fingerprints: Mapping[str, bytes] = {}
        self._change_counts: dict[str, int] = {}

    def record_start(self, fingerprints: Mapping[str, bytes]) -> None:
        """Record what was loaded at start."""
        self._fingerprints = fingerprints

    def record_poll(self, fingerprints: Mapping[str, bytes]) -> list[str]:
        """Record a poll, and log newly unstable models once. Returns: the models unchanged since the previous poll."""
        previous, self._fingerprints = self._fingerprints, fingerprints
        changes = {
            name: self._change_counts.get(name, 0) + 1
            for name in fingerprints
            if previous.get(name) != fingerprints[name]
        }
        unstable = {name for name, count in changes.items() if count >= UNSTABLE_POLLS}
        for name in sorted(unstable - self.unstable):
            text = "model %s: its files have changed at each of the last %d polls; it is loaded once two polls agree"
            logger.warning(text, name, UNSTABLE_POLLS, extra={"model": name})
        self._change_counts, self.unstable = changes, unstable
        return [name for name in fingerprints if name not in changes]
