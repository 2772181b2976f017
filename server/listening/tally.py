"""Tally: what a port counts of answers that are errors, and of connections that it does not take.

Each port has one, and those of a server add to the same totals, which are lines of the metrics page by their names and
labels. Nothing is counted of a request that is served well.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger("penstock.serve")

FIRST_ERROR = 400
"""The first HTTP status that is an error."""


class Tally:
    """What one port counts. `protocol` is `http` or `grpc`.

    Threads: the event loop's.
    """

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.totals: Counter[str] = Counter()

    def error(self, code: int | str) -> None:
        """Count an answer that is an error, by its HTTP status or the name of its gRPC status."""
        self.totals[f'penstock_errors_total{{protocol="{self.protocol}",code="{code}"}}'] += 1

    def full(self, most: int) -> None:
        """Count a connection that is turned away because so many are open, and say so."""
        self._refused("limit")
        setting = f"--{self.protocol}-max-connections"
        logger.warning("a connection is rejected: %d are open, the limit of %s", most, setting)

    def exhausted(self) -> None:
        """Count a second in which no connection could be accepted: how many came nobody is told."""
        self._refused("descriptors")

    def _refused(self, reason: str) -> None:
        self.totals[f'penstock_connections_refused_total{{protocol="{self.protocol}",reason="{reason}"}}'] += 1


class Heard:
    """Stands where uvicorn has the logger of accesses, which hears of each answer as it is sent, and of no other.

    An application may answer once more who has gone, or was told something else meanwhile: that leaves nowhere.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def info(self, _text: str, *said: Any) -> None:
        """Count an answer that is an error; its status is what is said last."""
        if said[-1] >= FIRST_ERROR:
            self._tally.error(said[-1])
