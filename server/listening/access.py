"""Access: the line that each answer has in the log, over HTTP and gRPC alike. Called where --access-log is on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

logger = logging.getLogger("penstock.access")

_LONGEST = 128
"""How much of a name is told: clients say how long an id is."""


def tell(
    address: tuple[str, int] | None, asked: str, status: int | str, since_s: float, size: int, named: Mapping[str, str]
) -> None:  # fmt: skip
    """Log an answer that has been sent: what was asked by whom, and what came of it; `named`, where it is known.

    `address` is what the client had as it came: of one that has gone nobody can tell any more.
    Units: `since_s` is `time.perf_counter`'s, when the request began to arrive; `size` the bytes of the answer's body.
    """
    client = f"{address[0]}:{address[1]}" if address else ""
    about = {"status": status, "duration_ms": round((time.perf_counter() - since_s) * 1e3, 3), "bytes": size}
    about |= {name: value[:_LONGEST] for name, value in named.items() if value}
    logger.info('%s - "%s" %s', client, asked, status, extra=about)
