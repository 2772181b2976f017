"""Isolation: a Batch that fails is run again in parts, until the guilty request stands alone.

Called by both executors: ThreadInstance (instance.py) and the event loop (model.py).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock.backends.backend import Binding
from penstock.backends.errors import Code, InferError

from .batch import Batch
from .execution import run_batch

if TYPE_CHECKING:
    from .model import Model

logger = logging.getLogger("penstock.batching")


def execute(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    """Run a Batch; every request in it ends with `outputs` or `error`.

    A batch that fails is halved and each half is run, until the guilty request is alone and the others are served.
    Returns: the batches that ran, the one given unless it was split.
    """
    try:
        run_batch(model, binding, batch)
    except InferError as error:
        if len(batch.requests) > 1:
            return _halve(model, binding, batch)
        batch.requests[0].error = error
    except Exception as error:
        if len(batch.requests) > 1:
            return _halve(model, binding, batch)
        logger.exception("model %s failed", model.name, extra={"request_id": batch.requests[0].id})
        batch.requests[0].error = InferError(
            Code.INTERNAL, f"inference failed in '{model.name}': {type(error).__name__}"
        )
    return [batch]


def _halve(model: Model, binding: Binding, batch: Batch) -> list[Batch]:
    middle = len(batch.requests) // 2
    ran: list[Batch] = []
    for part in (batch.requests[:middle], batch.requests[middle:]):
        rows = sum(request.rows for request in part)
        ran += execute(model, binding, Batch(part, rows, batch.key, time.monotonic_ns()))
    return ran
