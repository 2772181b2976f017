"""Outputs: encodes the answers of hooks and user-code models, which name their outputs themselves.

Made by inference.py, one per request, which may have any number of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.batching.running.custom_outputs import actual_datatype
from penstock.server.hooks.convert import datatype_of
from penstock.server.listening.mapped_buffer import LARGE_BYTES
from penstock.server.v2.call_parameters import Classes, PerOutputPlan
from penstock.server.v2.finish import LARGE_ELEMENTS, finish, is_slow_to_classify, modes_of
from penstock.server.v2.regions import INLINE_BYTES, Lease
from penstock.server.v2.requested_outputs import select_outputs
from penstock.server.v2.tensors import to_binary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.call_parameters import OutputMode, Plan

    from .encode import RpcEncoder


class OutputEncoder:
    """Encodes the outputs that the call requests, or all if it requests none.

    What repeated answers share is kept: `_selected` are the outputs sent of the last answer, each with its datatype and
    shape, and `_description` is their encoded description. Threads: one at a time.
    """

    def __init__(self, encoder: RpcEncoder, request: InferRequest, plan: Plan) -> None:
        self._encoder = encoder
        self._request = request
        self._model = request.model
        self._plan = plan
        self._shapes: list[Any] | None = None
        self._selected: dict[str, OutputMode] = {}
        self._datatypes: list[str] = []
        self._description = b""

    def prepare(self, outputs: Mapping[str, Array]) -> bool:
        """Prepare an answer. Returns: whether encoding would block the event loop. Raises: as `select_outputs`."""
        shapes = [(name, array.dtype, array.shape) for name, array in outputs.items()]
        if shapes != self._shapes:
            self._prepare(shapes, outputs)
        return is_large(PerOutputPlan(tuple(self._selected.values())), [outputs[name] for name in self._selected])

    def encode(self, outputs: Mapping[str, Array], id_and_mark: bytes) -> Body:
        """Encode the prepared answer; `id_and_mark` is as in RpcEncoder. Raises: InferError (INVALID)."""
        if self._plan is not None:
            named = zip(self._selected.items(), self._datatypes, strict=True)
            finished = [finish(self._model, (name, datatype), mode, outputs[name]) for (name, mode), datatype in named]
            return self._encoder.encode_finished(finished, id_and_mark)
        raws = [
            to_binary(datatype, outputs[name]) for name, datatype in zip(self._selected, self._datatypes, strict=True)
        ]
        return self._encoder.encode_described(self._description, raws, id_and_mark)

    def _prepare(self, shapes: list[Any], outputs: Mapping[str, Array]) -> None:
        self._selected = select_outputs(self._request, self._plan, outputs)
        self._datatypes = [self._datatype(name, outputs[name]) for name in self._selected]
        named = zip(self._selected, self._datatypes, strict=True)
        self._description = b"".join(
            [self._encoder.describe(name.encode(), datatype, outputs[name].shape) for name, datatype in named]
        )
        self._shapes = shapes

    def _datatype(self, name: str, array: Array) -> str:
        """Return an output's datatype; for user code the signature says whether UINT16 holds BF16 bit patterns."""
        spec = self._model.signature.output.get(name) if self._model.spec.declared_config else None
        return datatype_of(array) if spec is None else actual_datatype(spec.datatype, array)


def is_large(plan: Any, outputs: list[Any]) -> bool:
    """Return whether encoding an answer would block the event loop."""
    size = 0
    for mode, array in zip(modes_of(plan, len(outputs)), outputs, strict=True):
        if array is None:
            continue
        if type(mode) is Lease:
            if array.nbytes > INLINE_BYTES and not mode.is_same_memory(array):
                return True
        elif type(mode) is Classes:
            if is_slow_to_classify(mode.count, array):
                return True
        else:
            size += array.nbytes
        if array.dtype.hasobject and array.size >= LARGE_ELEMENTS:
            return True
    return size >= LARGE_BYTES
