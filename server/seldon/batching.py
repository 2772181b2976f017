"""Sharing: which calls of a component may share a batch, and what its worker is sent when they do (`--batching`).

Made by loading.py. The server decodes a body that may share a batch with the worker's own functions, which need no
component and no seldon_core. A body that it cannot decode, or must not, travels unread. inside/rows.py is the worker's
side.

A message of kind ROWS: JSON, {"payload_kind", "kind", "names", "rows": [of each request], "envelopes": [bytes of
each]}, a line feed, the envelopes, and the requests' rows: small ones already in one array. Its answer: TOGETHER, the
length of each answer, and the answers, each as that of a CALL; or APART, or NEVER.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from .calls import SeldonCall
from .inside.payloads import loads, split_message
from .inside.proto_values import array_of
from .messages import NEVER, TOGETHER, ComponentDescription, Endpoint, PayloadKind
from .protos import message_class

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Sink

MAX_FAILURES = 8
"""After this many batches in a row that had to run apart, sharing stops: the component takes one request at a time."""
SMALL_BYTES = 64 << 10
"""Rows of at most this many bytes in total are concatenated here; larger ones in the worker, which has time for it."""
TENSOR, NDARRAY = "tensor", "ndarray"
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


class PayloadRows(NamedTuple):
    """The content of a body. `kind` is TENSOR or NDARRAY; `envelope` is what the answer needs besides the rows."""

    array: Array
    kind: str
    names: tuple[str, ...]
    envelope: bytes
    has_meta: bool


def rows_of_json(body: bytes) -> PayloadRows | None:
    """Decode a body of JSON; None if it is anything but plain rows.

    The envelope is its meta as JSON, b"" for none.
    """
    try:
        message = loads(body)
        data = message["data"]
        kind = TENSOR if TENSOR in data else NDARRAY
        names = data.get("names", ())
        if kind not in data or type(names) not in (list, tuple) or not all(type(name) is str for name in names):
            return None
        array, meta, _, _ = split_message(message)
        has_meta = "meta" in message
        if has_meta and type(meta) is not dict:
            return None
        return PayloadRows(array, kind, tuple(names), json.dumps(meta).encode() if has_meta else b"", has_meta)
    except Exception:  # noqa: BLE001 - the worker reports what is wrong with it
        return None


def rows_of_proto(body: bytes, *, exact: bool) -> PayloadRows | None:
    """Decode a SeldonMessage like `rows_of_json`. The envelope is the message without its values."""
    try:
        message = message_class("SeldonMessage").FromString(body)
        if message.WhichOneof("data_oneof") != "data":
            return None
        data = message.data
        kind = data.WhichOneof("data_oneof")
        if kind not in (TENSOR, NDARRAY):
            return None
        array = array_of(data, exact=exact)
        getattr(data, kind).Clear()
        getattr(data, kind).SetInParent()
        return PayloadRows(array, kind, tuple(data.names), message.SerializeToString(), message.HasField("meta"))
    except Exception:  # noqa: BLE001 - as above
        return None
