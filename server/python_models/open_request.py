"""OpenRequest: a request that was sent to the worker of a Python model and has not ended. Used by PythonModelHost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch


class OpenRequest:
    """A request without a final answer. `batch_returned`: its Batch has been returned. `answer_count`: answers so far.

    `rescheduled`: it is to run again, and has not begun to. `final`: its last answer has arrived meanwhile.
    `abandoned`: its answers are no longer wanted. `paused`: its model is to wait before the next answer.
    """

    __slots__ = (
        "abandoned",
        "answer",
        "answer_count",
        "batch",
        "batch_returned",
        "ended",
        "final",
        "last_answer_ns",
        "number",
        "paused",
        "request",
        "rescheduled",
    )

    def __init__(self, request: InferRequest, batch: Batch, number: int) -> None:
        self.request = request
        self.number = number
        self.answer_count = 0
        self.ended = self.final = self.abandoned = self.paused = False
        self.answer: tuple[dict[str, Array], dict[str, Any], str] = {}, {}, ""
        self.last_answer_ns = batch.exec_start_ns
        self.start_run(batch)

    def start_run(self, batch: Batch) -> None:
        """Record that it runs, for the first time or again."""
        self.batch = batch
        self.batch_returned = self.rescheduled = False
