"""The logger of Cortex's own process, to which handlers may write."""

from __future__ import annotations

import logging
import sys

_FORM = "%(asctime)s:cortex:%(levelname)s:%(message)s"


def get_logger() -> logging.Logger:
    """Return the logger. If logging is not configured, as in a worker, it writes to stdout."""
    logger = logging.getLogger("cortex")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
        if not logging.getLogger().handlers:
            out = logging.StreamHandler(sys.stdout)
            out.setFormatter(logging.Formatter(_FORM))
            logger.addHandler(out)
    return logger
