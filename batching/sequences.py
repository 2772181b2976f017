"""Sequences: which request of each sequence may run next. Held by the Scheduler of a sequence model.

Source: Triton core, sequence_batch_scheduler.cc.
"""

from __future__ import annotations

from collections.abc import Iterable

from .batch import Batch
from .request import InferRequest
from .spec import SequenceSpec


class Sequences:
    """The sequences under way of one model, and those that wait for a place.

    Of each sequence one request at a time is in a Lane or in a Batch; the others wait here, in order. Pure: it is told
    the time, and its caller holds the model's lock.
    """

    def __init__(self, name: str, spec: SequenceSpec, rows: int, instances: int) -> None:
        raise NotImplementedError

    def admit(self, request: InferRequest, now_ns: int) -> list[InferRequest]:
        """Take in a request that has come. Returns: what may go to its Lane now, this request or nothing.

        Raises: InferError (INVALID: it says no sequence, or one that it does not begin and that is not under way).
        """
        raise NotImplementedError

    def holds(self, request: InferRequest) -> bool:
        """Tell whether a request waits here, and not in a Lane."""
        raise NotImplementedError

    def left(self, requests: Iterable[InferRequest], now_ns: int) -> list[InferRequest]:
        """Note that requests have run or failed, or were cancelled or expired. Returns: what may go to its Lane now."""
        raise NotImplementedError

    def arrange(self, batch: Batch) -> None:
        """Give the requests of a batch that was closed their rows (`batch.places`), where sequences have their own."""
        raise NotImplementedError

    def held(self) -> list[InferRequest]:
        """List the requests that wait here."""
        raise NotImplementedError

    def idle_ns(self) -> int:
        """Give when `reap` must be called next; 0 for never."""
        raise NotImplementedError

    def reap(self, now_ns: int) -> list[InferRequest]:
        """Forget sequences that were idle for too long. Returns: what may go to its Lane now."""
        raise NotImplementedError
