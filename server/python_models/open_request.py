"""OpenRequest: a request that was sent to the worker of a Python model and has not ended. Used by PythonModelHost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch


class OpenRequest:
    """A request without a final answer. `later`: its Batch has been returned. `count`: its answers so far.

    `waits`: it is to run again, and has not begun to. `final`: its last answer has arrived meanwhile. `left`: its
    answers are no longer wanted. `held`: its model is to wait before the next answer.
    """

    __slots__ = (
        "answer",
        "batch",
        "count",
        "ended",
        "final",
        "held",
        "later",
        "left",
        "number",
        "request",
        "since_ns",
        "waits",
    )

    def __init__(self, request: InferRequest, batch: Batch, number: int) -> None:
        self.request = request
        self.number = number
        self.count = 0
        self.ended = self.final = self.left = self.held = False
        self.answer: tuple[dict[str, Array], dict[str, Any], str] = {}, {}, ""
        self.since_ns = batch.exec_start_ns
        self.runs_in(batch)

    def runs_in(self, batch: Batch) -> None:
        """Record that it runs, for the first time or again."""
        self.batch = batch
        self.later = self.waits = False
