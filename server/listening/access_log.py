"""Access log: the line logged for each answer, over HTTP and gRPC alike. Called if --access-log is on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

logger = logging.getLogger("penstock.access")

_MAX_NAME_CHARS = 128
"""The longest name that is logged: clients choose the length of an id."""


def log_answer(
    address: tuple[str, int] | None, request: str, status: int | str, since_s: float, size: int,
    names: Mapping[str, str],
) -> None:  # fmt: skip
    """Log an answer that was sent: the client, the request and the result; `names` adds the known names.

    `address` is the client's at connection time: after a disconnect it is no longer available.
    Units: `since_s` is a `time.perf_counter` value, when the request began to arrive; `size` is the body's size in
    bytes.
    """
    client = f"{address[0]}:{address[1]}" if address else ""
    fields = {"status": status, "duration_ms": round((time.perf_counter() - since_s) * 1e3, 3), "bytes": size}
    fields |= {name: value[:_MAX_NAME_CHARS] for name, value in names.items() if value}
    logger.info('%s - "%s" %s', client, request, status, extra=fields)
