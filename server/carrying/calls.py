"""RawCall: a call that passes through the Engine unread, for its worker to read. Created by the dialects' Services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.batching.request import InferRequest, Sink

if TYPE_CHECKING:
    from penstock.batching.model import Model

RAW = ()
"""The Key of carried calls: they are sent to a worker together, and run there one after another."""


class RawCall(InferRequest):
    """An InferRequest whose `body` the worker reads, and whose `reply` is the worker's answer.

    It has no tensors, and counts as one row. It has a reply unless it has an error.
    """

    __slots__ = ("body", "reply")

    def __init__(self, model: Model, body: bytes, sink: Sink) -> None:
        InferRequest.__init__(self, model, [], 1, RAW, (), sink)
        self.body = body
        self.nbytes = len(body)
        self.reply = b""
