"""Tally: counts a port's error answers and the connections it does not accept.

Each port has one, and those of a server add to the same totals, whose keys are names and labels of metrics. Successful
requests are not counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger("penstock.serve")

FIRST_ERROR = 400
"""The first HTTP status that is an error."""


class Tally:
    """The counts of one port. `protocol` is `http` or `grpc`.

    Threads: the event loop's.
    """

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.totals: Counter[str] = Counter()

    def count_error(self, code: int | str) -> None:
        """Count an error answer, by its HTTP status or the name of its gRPC status."""
        self.totals[f'penstock_errors_total{{protocol="{self.protocol}",code="{code}"}}'] += 1

    def count_over_limit(self, limit: int) -> None:
        """Count and log a connection that is rejected because too many are open."""
        self._count_rejection("limit")
        setting = f"--{self.protocol}-max-connections"
        logger.warning("a connection is rejected: %d are open, the limit of %s", limit, setting)

    def count_no_descriptors(self) -> None:
        """Count a second in which no connection could be accepted; the number of attempts is unknown."""
        self._count_rejection("descriptors")

    def _count_rejection(self, reason: str) -> None:
        self.totals[f'penstock_connections_refused_total{{protocol="{self.protocol}",reason="{reason}"}}'] += 1


class CountingAccessLogger:
    """Replaces uvicorn's access logger, which is called for each answer that is actually sent.

    An application may also answer a client that has disconnected or got another answer; that is not counted.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def info(self, _message: str, *args: Any) -> None:
        """Count an error answer; the status is the last argument."""
        if args[-1] >= FIRST_ERROR:
            self._tally.count_error(args[-1])
