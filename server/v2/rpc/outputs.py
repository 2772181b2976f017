"""Outputs: encodes the answers of hooks and user-code models, which name their outputs themselves.

Made by inference.py, one per request, which may have any number of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.batching.running.own_outputs import own_datatype
from penstock.server.hooks.convert import datatype_of
from penstock.server.listening.mapped_buffer import LARGE_BYTES
from penstock.server.v2.call_parameters import Classes, PerOutputPlan
from penstock.server.v2.finish import LARGE_ELEMENTS, finish, is_much, ways_of
from penstock.server.v2.regions import INLINE_BYTES, Lease
from penstock.server.v2.tensors import to_binary
from penstock.server.v2.wanted_outputs import told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.call_parameters import Plan, Way

    from .encode import RpcEncoder


class Outputs:
    """Encodes the outputs that the call requests, or all if it requests none.

    What repeated answers share is kept: `_told` are the outputs sent of the last answer, each with its datatype and
    shape, and `_described` is their encoded description. Threads: one at a time.
    """

    def __init__(self, encoder: RpcEncoder, request: InferRequest, plan: Plan) -> None:
        self._encoder = encoder
        self._request = request
        self._model = request.model
        self._plan = plan
        self._form: list[Any] | None = None
        self._told: dict[str, Way] = {}
        self._datatypes: list[str] = []
        self._described = b""

    def take(self, outputs: Mapping[str, Array]) -> bool:
        """Prepare to encode an answer. Returns: whether encoding would block the event loop. Raises: as `told`."""
        form = [(name, array.dtype, array.shape) for name, array in outputs.items()]
        if form != self._form:
            self._take(form, outputs)
        return is_large(PerOutputPlan(tuple(self._told.values())), [outputs[name] for name in self._told])

    def encode(self, outputs: Mapping[str, Array], between: bytes) -> Body:
        """Encode the prepared answer; `between` is as in RpcEncoder. Raises: InferError (INVALID)."""
        if self._plan is not None:
            named = zip(self._told.items(), self._datatypes, strict=True)
            finished = [finish(self._model, (name, kind), way, outputs[name]) for (name, way), kind in named]
            return self._encoder.finished(finished, between)
        raws = [to_binary(kind, outputs[name]) for name, kind in zip(self._told, self._datatypes, strict=True)]
        return self._encoder.described(self._described, raws, between)

    def _take(self, form: list[Any], outputs: Mapping[str, Array]) -> None:
        self._told = told(self._request, self._plan, outputs)
        self._datatypes = [self._datatype(name, outputs[name]) for name in self._told]
        named = zip(self._told, self._datatypes, strict=True)
        self._described = b"".join(
            [self._encoder.describe(name.encode(), kind, outputs[name].shape) for name, kind in named]
        )
        self._form = form

    def _datatype(self, name: str, array: Array) -> str:
        """Return an output's datatype; for user code the signature says whether UINT16 holds BF16 bit patterns."""
        spec = self._model.signature.output.get(name) if self._model.spec.declared else None
        return datatype_of(array) if spec is None else own_datatype(spec.datatype, array)


def is_large(plan: Any, outputs: list[Any]) -> bool:
    """Return whether encoding an answer would block the event loop."""
    size = 0
    for way, array in zip(ways_of(plan, len(outputs)), outputs, strict=True):
        if array is None:
            continue
        if type(way) is Lease:
            if array.nbytes > INLINE_BYTES and not way.holds(array):
                return True
        elif type(way) is Classes:
            if is_much(way.count, array):
                return True
        else:
            size += array.nbytes
        if array.dtype.hasobject and array.size >= LARGE_ELEMENTS:
            return True
    return size >= LARGE_BYTES
