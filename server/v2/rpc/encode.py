"""Encoding of ModelInferResponse: bytes joined from kept prefixes, without a protobuf object per answer.

Called by `model_infer.py`. Source: Triton's grpc_service.proto; raw_output_contents has one entry per output, empty if
its data is in shared memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.datatypes import DATATYPES
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.listening.mapped_buffer import LARGE_BYTES, join_mapped
from penstock.server.protobuf import service_pb2
from penstock.server.v2.finish import finish_all, store_all
from penstock.server.v2.tensors import to_binary

from .outputs import is_large
from .wire import field, field_head, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.backends.backend import Array
    from penstock.backends.signature import Signature
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.call_parameters import PerOutputPlan
    from penstock.server.v2.finish import Finished

FINAL, MORE = (field(4, field(1, b"triton_final_response") + field(2, b"\x08" + flag)) for flag in (b"\1", b"\0"))
"""The parameter of every answer on a stream: whether it is the last one to its request."""
_NAME, _VERSION, _ID, _OUTPUTS, _RAW = 1, 2, 3, 5, 6
_ERROR, _ANSWER = 1, 2
_ID_HEADS = tuple(field_head(_ID, size) for size in range(0x80))
_MAX_CACHED = 256
_PARAMETER_FIELDS: dict[type, str] = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}
_LARGE_BYTES = 64 << 10
"""From this size, data is copied only once; below it, avoiding the second copy costs more than the copy."""


class LargeAnswer(Exception):  # noqa: N818 - control flow, not an error
    """The answer must be encoded on a thread, by calling `encode`."""

    def __init__(self, encode: Callable[[], Body]) -> None:
        super().__init__()
        self.encode = encode


class RpcEncoder:
    """Encodes the answers of one model version; keeps the bytes that do not change between answers.

    `has_own_outputs`: outputs may come from user code, possibly in a step.
    """

    def __init__(self, model: str, version: str, signature: Signature, *, has_own_outputs: bool = False) -> None:
        self._names = field(_NAME, model.encode()) + field(_VERSION, version.encode())
        self._outputs = [(output.name.encode(), output.datatype) for output in signature.outputs]
        self.has_own_outputs = has_own_outputs
        self._singles: dict[tuple[int, tuple[int, ...]], tuple[bytes, bytes]] = {}
        self._heads: dict[tuple[Any, ...], tuple[bytes, ...]] = {}
        self._descriptions: dict[tuple[Any, ...], bytes] = {}

    def encode_empty(self, id_and_mark: bytes) -> bytes:
        """Encode an answer without outputs."""
        return self._names + id_and_mark

    def encode_plain(self, wanted: tuple[int, ...], outputs: list[Any], id_and_mark: bytes = b"") -> Body:
        """Encode outputs as they are; `id_and_mark` precedes them, as returned by `encode_id_and_mark`.

        Raises: LargeAnswer.
        """
        if len(outputs) == 1:
            # the common answer: everything before the numbers is one kept prefix
            array = outputs[0]
            key = (wanted[0], array.shape)
            prefix, head = self._singles.get(key) or self._cache_single(key)
            if head:
                if array.nbytes >= _LARGE_BYTES:
                    return b"".join((self._names, id_and_mark, head, to_binary(self._outputs[wanted[0]][1], array)))
                data: bytes = array.tobytes()
                return self._names + id_and_mark + head + data if id_and_mark else prefix + data
        shapes = tuple([array.shape for array in outputs])
        heads = self._heads.get((wanted, shapes))
        if heads is None:
            heads = self._cache_heads(wanted, shapes)
        if heads:
            parts = [self._names, id_and_mark]
            for head, array in zip(heads, outputs, strict=True):
                parts += (head, array.tobytes())
            return b"".join(parts)
        names = list(map(self._outputs.__getitem__, wanted))
        if is_large(None, outputs):
            raise LargeAnswer(partial(self._encode_multiple, names, shapes, outputs, id_and_mark))
        return self._encode_multiple(names, shapes, outputs, id_and_mark)

    def encode_finished(self, outputs: Sequence[Finished], id_and_mark: bytes = b"") -> Body:
        """Encode outputs of which some are in shared memory or classes."""
        names = [(output.name.encode(), output.datatype) for output in outputs]
        return self._encode_multiple(
            names, [output.shape for output in outputs], [output.array for output in outputs], id_and_mark
        )

    def store_and_encode(self, request: InferRequest, plan: PerOutputPlan, id_and_mark: bytes) -> bytes:
        """Write all outputs into shared memory, and encode their description. Raises: as `finish_all`."""
        shapes = store_all(request, plan)
        key = (request.output_positions, shapes)
        description = self._descriptions.get(key)
        if description is None:
            named = zip(request.output_positions, shapes, strict=True)
            description = b"".join([self.describe(*self._outputs[position], shape) for position, shape in named])
            description += field_head(_RAW, 0) * len(shapes)
            _cache(self._descriptions, key, description)
        return self._names + id_and_mark + description

    def _encode_multiple(
        self, names: list[tuple[bytes, str]], shapes: Sequence[tuple[int, ...]], arrays: Sequence[Array | None],
        id_and_mark: bytes,
    ) -> Body:  # fmt: skip
        named = zip(names, shapes, strict=True)
        description = b"".join([self.describe(name, datatype, shape) for (name, datatype), shape in named])
        typed_arrays = zip(names, arrays, strict=True)
        raws = [b"" if array is None else to_binary(datatype, array) for (_, datatype), array in typed_arrays]
        return self.encode_described(description, raws, id_and_mark)

    def encode_described(self, description: bytes, raws: Sequence[Body], id_and_mark: bytes) -> Body:
        """Encode outputs already described and converted to bytes; large ones are Mapped."""
        parts: list[Body] = [self._names, id_and_mark, description]
        total_bytes = 0
        for raw in raws:
            size = len(raw)
            parts += (field_head(_RAW, size), raw)
            total_bytes += size
        return b"".join(parts) if total_bytes < LARGE_BYTES else join_mapped(parts)

    def describe(self, name: bytes, datatype: str, shape: tuple[int, ...]) -> bytes:
        """Encode an output's description, without its data."""
        key = (name, datatype, shape)
        description = self._descriptions.get(key)
        if description is None:
            dims = b"".join(map(varint, shape))
            tensor = field(1, name) + field(2, datatype.encode()) + (field(3, dims) if dims else b"")
            description = field(_OUTPUTS, tensor)
            _cache(self._descriptions, key, description)
        return description

    def _cache_single(self, key: tuple[int, tuple[int, ...]]) -> tuple[bytes, bytes]:
        """Keep everything before the data of a single-output answer, with and without the names.

        Empty if the size is not determined by the shape, or if it is large.
        """
        heads = self._cache_heads((key[0],), (key[1],))
        entry = (self._names + heads[0], heads[0]) if heads else (b"", b"")
        _cache(self._singles, key, entry)
        return entry

    def _cache_heads(self, wanted: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[bytes, ...]:
        """Keep what precedes the data of each output.

        Empty if the size of one is not determined by its shape, or if they are large together.
        """
        description, heads, total_bytes = b"", [], 0
        for position, shape in zip(wanted, shapes, strict=True):
            name, datatype = self._outputs[position]
            description += self.describe(name, datatype, shape)
            size = math.prod(shape) * DATATYPES[datatype].size_bytes
            heads.append(field_head(_RAW, size))
            total_bytes += size
        is_fixed = total_bytes < LARGE_BYTES and all(
            DATATYPES[self._outputs[position][1]].size_bytes for position in wanted
        )
        entry = (description + heads[0], *heads[1:]) if heads and is_fixed else ()
        _cache(self._heads, (wanted, shapes), entry)
        return entry


def encode_id_and_mark(request_id: str, mark: bytes = b"") -> bytes:
    """Encode what comes between an answer's names and its outputs: the request's id; on a stream also FINAL or MORE."""
    if request_id:
        value = request_id.encode()
        return (_ID_HEADS[len(value)] if len(value) < 0x80 else field_head(_ID, len(value))) + value + mark
    return mark


def encode_parameters(parameters: Mapping[str, Any] | None) -> bytes:
    """Encode the parameters that user code has set on an answer."""
    if not parameters:
        return b""
    message = service_pb2().ModelInferResponse()
    for name, value in parameters.items():
        field_name = _PARAMETER_FIELDS.get(type(value))
        if field_name is not None:
            setattr(message.parameters[name], field_name, value)
    encoded: bytes = message.SerializeToString()
    return encoded


def encode_outputs(encoder: RpcEncoder, plan: PerOutputPlan | None, request: InferRequest, id_and_mark: bytes) -> Body:
    """Encode any outputs: as classes, into shared memory, or those of user code. Raises: InferError (INVALID)."""
    outputs: Any = request.outputs or []
    if plan is not None and plan.all_shared and type(outputs) is not CustomOutputs:
        return encoder.store_and_encode(request, plan, id_and_mark)
    finished = finish_all(request.model, request.output_positions, plan, outputs)
    return encoder.encode_finished(finished, id_and_mark + encode_parameters(getattr(outputs, "parameters", None)))


def stream_answer(answer: Body) -> Body:
    """Wrap an answer for a stream."""
    head = field_head(_ANSWER, len(answer))
    return head + answer if type(answer) is bytes else join_mapped((head, answer))


def encode_stream_answer(encode: Callable[[], Body]) -> Body:
    """Encode an answer, and wrap it for a stream."""
    return stream_answer(encode())


def stream_error(text: str, answer: bytes) -> bytes:
    """Encode an error as a stream answer; the stream continues."""
    return field(_ERROR, text.encode("utf-8", "replace")) + field(_ANSWER, answer)


def _cache(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value
