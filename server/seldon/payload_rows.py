"""Decodes a body in the server: the rows in it, if they may share a batch with others'.

Called by batching.py. The functions are the worker's own, so both read the same; these modules need no component and no
seldon_core.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from .inside.payloads import loads, split_message
from .inside.proto_values import array_of
from .protos import message_class

if TYPE_CHECKING:
    from penstock.backends.backend import Array

TENSOR, NDARRAY = "tensor", "ndarray"


class PayloadRows(NamedTuple):
    """The content of a body. `kind` is TENSOR or NDARRAY; `envelope` is what the answer needs besides the rows."""

    array: Array
    kind: str
    names: tuple[str, ...]
    envelope: bytes
    has_meta: bool


def rows_of_json(body: bytes) -> PayloadRows | None:
    """Decode a body of JSON; None if it is anything but plain rows.

    The rest is its meta as JSON, b"" for none.
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
    """Decode a SeldonMessage like `rows_of_json`. The rest is the message without its values."""
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
