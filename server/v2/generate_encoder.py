"""GenerateEncoder: answers of the generate extension, with tensors as JSON members. Used by `generate.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.datatypes import BY_DTYPE
from penstock.batching.running.custom_outputs import actual_datatype

from .tensors import json_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.backends.backend import Array
    from penstock.batching.model import Model


class GenerateEncoder:
    """Writes the answers to one request: members by name, a single value without its list.

    What all answers share is kept: `_members` are the outputs, in their own order, and `_pieces` is an answer without
    them. If a parameter of the answer has the name of an output, the parameter wins, as in Triton.
    Threads: one at a time.
    """

    def __init__(self, model: Model, request_id: str) -> None:
        self._model = model
        self._fixed_members = {"model_name": orjson.dumps(model.name), "model_version": orjson.dumps(model.version)}
        if request_id:
            self._fixed_members["id"] = orjson.dumps(request_id)
        self._names: list[str] | None = None
        self._parameters_json = b""
        self._members: list[_Member] = []
        self._pieces: list[bytes] = []

    def write(self, outputs: Mapping[str, Array], parameters: Mapping[str, Any] | None = None) -> bytes:
        """Write an answer, and what its model has said with it. Raises: InferError (INVALID)."""
        names = list(outputs)
        parameters_json = orjson.dumps(parameters) if parameters else b""  # not as they are: 1 == True
        if names != self._names or parameters_json != self._parameters_json:
            self._parameters_json = parameters_json
            self._arrange(names, parameters)
        pieces = self._pieces.copy()
        for member in self._members:
            array = outputs[member.name]
            if array.shape != member.shape or array.dtype != member.dtype:
                member.prepare_for(array, self._datatype(member.name, array))
            text = member.write(array)
            pieces[member.piece_index] = text[1:-1] if member.single else text
        return b"".join(pieces)

    def _arrange(self, names: list[str], parameters: Mapping[str, Any] | None) -> None:
        self._names, self._pieces = names, []
        fixed = {name: orjson.dumps(value) for name, value in (parameters or {}).items()} | self._fixed_members
        piece_indices: dict[str, int] = {}
        for name in sorted({*names, *fixed}):
            self._pieces += (b"," if self._pieces else b"{", orjson.dumps(name), b":", fixed.get(name, b""))
            piece_indices[name] = len(self._pieces) - 1
        self._pieces.append(b"}")
        self._members = [_Member(name, piece_indices[name]) for name in names if name not in fixed]

    def _datatype(self, name: str, array: Array) -> str:
        spec = self._model.signature.output.get(name)
        if spec is None or not spec.is_tensor:
            return BY_DTYPE[array.dtype].name
        return actual_datatype(spec.datatype, array)


class _Member:
    """One output. `piece_index` is that of its values, which `write` writes while dtype and shape stay the same."""

    __slots__ = ("dtype", "name", "piece_index", "shape", "single", "write")

    def __init__(self, name: str, piece_index: int) -> None:
        self.name = name
        self.piece_index = piece_index
        self.dtype: Any = None
        self.shape: tuple[int, ...] | None = None
        self.single = False
        self.write: Callable[[Array], bytes] = bytes

    def prepare_for(self, array: Array, datatype: str) -> None:
        """Prepare to write arrays like this one."""
        self.dtype, self.shape, self.single = array.dtype, array.shape, array.size == 1
        self.write = json_writer(datatype, self.name, array.shape)
