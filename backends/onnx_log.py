"""What ONNX Runtime logs, in our log: its own lines, coloured and of another form, stood between ours on stderr.

Called before a session is made. Needs 1.32; with older ones, and from threads of ONNX Runtime's own, which cannot wait
for Python, lines go to stderr as before.
"""

from __future__ import annotations

import logging
from functools import cache

import onnxruntime

logger = logging.getLogger("penstock.onnxruntime")

_LEVELS = (logging.DEBUG, logging.DEBUG, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Of its severities: verbose, info, warning, error, fatal. Its "info" is of no use to who runs a server."""


@cache
def route_log() -> None:
    """Have it call us, once for the process. What it logs is for others to say: of sessions what no exception says."""
    register = getattr(onnxruntime, "set_default_logger_callback", None)
    if register is not None:
        register(_log)


def _log(severity: int, _category: str, session: str, place: str, message: str) -> None:
    """Threads: whichever logs."""
    logger.log(_LEVELS[severity], "%s (%s)", message.strip(), " ".join(filter(None, (session, place))))
