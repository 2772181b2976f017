"""SeldonCall: a call of a component on its way through the Engine.

Made by service.py, rpc.py, batching.py and graph/walk.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.carrying.calls import RawCall

from .messages import Endpoint, PayloadKind

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink

HEADS = [[bytes((endpoint, form)) for form in PayloadKind] for endpoint in Endpoint]


class SeldonCall(RawCall):
    """A RawCall of the original's protocol: `body` is that of CALL.

    It counts as one row, unless it may share a batch (`share`). If it does, `envelope` is what its answer needs in
    addition to the rows.
    """

    __slots__ = ("endpoint", "envelope")

    envelope: bytes

    def __init__(self, model: Model, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes, sink: Sink) -> None:
        RawCall.__init__(self, model, HEADS[endpoint][payload_kind] + payload, sink)
        self.endpoint = endpoint
        self.nbytes = len(payload)

    def share(self, rows: Array, key: Key, envelope: bytes) -> None:
        """Let it share a batch with calls of the same Key. Shapes: axis 0 of `rows` is the rows, at least one."""
        self.inputs, self.rows, self.key, self.envelope = [rows], len(rows), key, envelope
        self.nbytes += rows.nbytes
