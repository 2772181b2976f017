"""Layout: what the JSON part of a binary request says, remembered by its bytes.

A client that sends binary tensors sends the same JSON before them again and again: names, shapes and sizes, no data.
It is then decoded once, and each further request costs one look-up and a view per tensor (perf/micro.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.batching.request import InferRequest

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Key, Sink

    from .decode import Options

KEPT_LAYOUTS = 256
MAX_JSON_BYTES = 4096


class _Place(NamedTuple):
    """Where one input's bytes are in the body, and what they are."""

    offset: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Layout:
    """One JSON part, decoded and checked. Right for every body of `nbytes` that begins with the same JSON."""

    __slots__ = ("_id", "_key", "_places", "_rows", "_wanted", "nbytes", "options")

    def __init__(self, request: InferRequest, options: Options, places: list[_Place | None]) -> None:
        self.nbytes = request.nbytes
        self.options = options
        self._id = request.id
        self._key: Key = request.key
        self._rows = request.rows
        self._wanted = request.wanted
        self._places = places

    def request(self, model: Model, body: bytes, sink: Sink) -> InferRequest:
        """Make the request of another such body. Ownership: its tensors are views of `body`."""
        inputs: list[Array | None] = [
            None if place is None else np.frombuffer(body, place.dtype, place.size, place.offset).reshape(place.shape)
            for place in self._places
        ]
        request = InferRequest(model, inputs, self._rows, self._key, self._wanted, sink)
        request.id = self._id
        request.nbytes = self.nbytes
        return request


def layout_of(request: InferRequest, options: Options, body: bytes) -> Layout | None:
    """Make the Layout of a decoded request; None when not every tensor is a plain view of the body.

    BYTES and BOOL are made from the body's values, JSON data is part of the JSON: such requests are decoded each time.
    """
    base = np.frombuffer(body, np.uint8).__array_interface__["data"][0]
    places: list[_Place | None] = []
    for array in request.inputs:
        if array is None:
            places.append(None)
            continue
        offset = array.__array_interface__["data"][0] - base
        copied = array.dtype.hasobject or array.dtype == np.bool_ or not array.size
        if copied or not 0 <= offset <= len(body) - array.nbytes:
            return None
        places.append(_Place(offset, array.size, array.dtype, array.shape))
    return Layout(request, options, places)
