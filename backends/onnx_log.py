"""Routes ONNX Runtime's log into the server's: its own lines, colored and in another format, mixed with ours on stderr.

Called before a session is made. Needs 1.32; with older versions, and from ONNX Runtime's own threads, which cannot wait
for Python, lines go to stderr as before.
"""

from __future__ import annotations

import logging
from functools import cache

import onnxruntime

logger = logging.getLogger("penstock.onnxruntime")

_LEVELS = (logging.DEBUG, logging.DEBUG, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""For its severities: verbose, info, warning, error, fatal. Its "info" is of no use to operators."""


@cache
def route_log() -> None:
    """Register the callback, once per process. Session and run options, and onnx_providers.py, limit what is logged."""
    register = getattr(onnxruntime, "set_default_logger_callback", None)
    if register is not None:
        register(_log)


def _log(severity: int, _category: str, session: str, source: str, message: str) -> None:
    """Threads: whichever logs."""
    logger.log(_LEVELS[severity], "%s (%s)", message.strip(), " ".join(filter(None, (session, source))))
