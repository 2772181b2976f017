"""SeldonCall: a call of a component on its way through the Engine.

Made by service.py, rpc.py, batching.py and graph/walk.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.batching.request import InferRequest, Sink

from .messages import Endpoint, Form

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Key

RAW = ()
"""The Key of calls that travel as they came: they are sent to a worker together, and run there one after another."""
HEADS = [[bytes((endpoint, form)) for form in Form] for endpoint in Endpoint]


class SeldonCall(InferRequest):
    """An InferRequest of the original's protocol: `body` is that of CALL, `reply` what has come back.

    It has no tensors, and counts as one row, unless it may share a batch (`share`). It has a reply unless it has an
    error. `rest` is what its answer needs of it beside its rows, where it shares a batch.
    """

    __slots__ = ("body", "endpoint", "reply", "rest")

    rest: bytes

    def __init__(self, model: Model, endpoint: Endpoint, form: Form, payload: bytes, sink: Sink) -> None:
        InferRequest.__init__(self, model, [], 1, RAW, (), sink)
        self.endpoint = endpoint
        self.body = HEADS[endpoint][form] + payload
        self.nbytes = len(payload)
        self.reply = b""

    def share(self, rows: Array, key: Key, rest: bytes) -> None:
        """Let it share a batch with calls of the same Key. Shapes: `rows` has them on axis 0, one at least."""
        self.inputs, self.rows, self.key, self.rest = [rows], len(rows), key, rest
        self.nbytes += rows.nbytes
