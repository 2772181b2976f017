"""Sharing: which calls of a component may share a batch, and what its worker is sent when they do (`--batching`).

Made by loading.py. The server decodes a body that may share a batch as the worker would, with the same functions. A
body that it cannot decode, or must not, travels unread. inside/rows.py is the worker's side.

A message of kind ROWS: JSON, {"payload_kind", "kind", "names", "rows": [of each request], "envelopes": [bytes of
each]}, a line feed, the envelopes, and the requests' rows: small ones already in one array. Its answer: TOGETHER, the
length of each answer, and the answers, each as that of a CALL; or APART, or NEVER.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from .calls import SeldonCall
from .messages import NEVER, TOGETHER, ComponentDescription, Endpoint, PayloadKind
from .payload_rows import NDARRAY, TENSOR, PayloadRows, rows_of_json, rows_of_proto

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Sink

MAX_FAILURES = 8
"""After this many batches in a row that had to run apart, sharing stops: the component takes one request at a time."""
SMALL_BYTES = 64 << 10
"""Rows of at most this many bytes in total are concatenated here; larger ones in the worker, which has time for it."""
ENCODINGS = (TENSOR, NDARRAY)
NUMERIC_KINDS = "biuf"
"""Kinds of arrays that may be concatenated: their values do not change next to others of their datatype."""
_LENGTH = struct.Struct("<I")


class Sharing:
    """The sharing rules of one component, and what was learned about it.

    `allowed`: whether batches are shared. It becomes False for a component that returns a SeldonResponse of tags or
    metrics for each call, or whose batches never succeed. Units: `max_rows` of a batch.
    """

    def __init__(self, description: ComponentDescription, max_rows: int, *, strict: bool = True) -> None:
        self.allowed = description.batches
        self._strict = strict
        self._takes_meta = description.takes_meta
        self._max_rows = max_rows
        self._failures = 0

    def make_call(
        self, model: Model, endpoint: Endpoint, payload_kind: PayloadKind, payload: bytes, sink: Sink
    ) -> SeldonCall:
        """Make a call, which shares batches if it may.

        Threads: any; large bodies (answering.LARGE_BYTES) should not be decoded on the event loop.
        """
        call = SeldonCall(model, endpoint, payload_kind, payload, sink)
        if not self.allowed or endpoint is not Endpoint.PREDICT or payload_kind is PayloadKind.HTTP:
            return call
        payload_rows = (
            rows_of_json(payload) if payload_kind is PayloadKind.JSON else rows_of_proto(payload, exact=self._strict)
        )
        if payload_rows is not None and self._may_share(payload_rows):
            array = payload_rows.array
            key = (
                array.shape[1:],
                (payload_kind, ENCODINGS.index(payload_rows.kind), array.dtype.num),
                payload_rows.names,
            )
            call.share(array, key, payload_rows.envelope)  # type: ignore[arg-type]
        return call

    def _may_share(self, payload_rows: PayloadRows) -> bool:
        array = payload_rows.array
        return (
            array.ndim > 1
            and array.dtype.kind in NUMERIC_KINDS
            and 0 < len(array) <= self._max_rows
            and not (self._takes_meta and payload_rows.has_meta)
        )

    # -- messages ----------------------------------------------------------------------------------------------

    @staticmethod
    def pack(calls: Sequence[SeldonCall]) -> tuple[bytes, list[Array | None]]:
        """Encode calls of one Key. Ownership: larger arrays remain the calls' own."""
        _, (payload_kind, kind, _), names = calls[0].key  # type: ignore[misc]
        head = {
            "payload_kind": payload_kind, "kind": ENCODINGS[kind], "names": names,
            "rows": [call.rows for call in calls], "envelopes": [len(call.envelope) for call in calls],
        }  # fmt: skip
        body = b"".join((orjson.dumps(head), b"\n", *(call.envelope for call in calls)))
        arrays: list[Any] = [call.inputs[0] for call in calls]
        if sum(array.nbytes for array in arrays) <= SMALL_BYTES:
            arrays = [np.concatenate(arrays)]
        return body, arrays

    def record_outcome(self, outcome: int) -> bool:
        """Record the outcome of a batch. Returns: whether its requests have run together."""
        if outcome == TOGETHER:
            self._failures = 0
            return True
        self._failures += 1
        if outcome == NEVER or self._failures >= MAX_FAILURES:
            self.allowed = False
        return False

    @staticmethod
    def distribute(calls: Sequence[SeldonCall], body: bytes) -> None:
        """Give each call its reply, from the bytes after TOGETHER."""
        sizes = struct.unpack_from(f"<{len(calls)}I", body)
        offset = _LENGTH.size * len(calls)
        for call, size in zip(calls, sizes, strict=True):
            call.reply = body[offset : offset + size]
            offset += size
