"""The logger of Cortex's own process, which its handlers may write to."""

from __future__ import annotations

import logging
import sys

_FORM = "%(asctime)s:cortex:%(levelname)s:%(message)s"


def get_logger() -> logging.Logger:
    """Give the logger. Where nobody has said where records go, as in a worker, they go to the output."""
    logger = logging.getLogger("cortex")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
        if not logging.getLogger().handlers:
            out = logging.StreamHandler(sys.stdout)
            out.setFormatter(logging.Formatter(_FORM))
            logger.addHandler(out)
    return logger
