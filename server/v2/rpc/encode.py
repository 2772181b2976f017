"""Encoding of ModelInferResponse: bytes joined from kept prefixes, without a protobuf object per answer.

Called by `infer.py`. Source: Triton's grpc_service.proto; raw_output_contents has one entry per output, empty if its
data is in shared memory.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.backends.datatypes import DATATYPES
from penstock.server.listening.mapped_buffer import LARGE_BYTES, join_mapped
from penstock.server.protobuf import service_pb2
from penstock.server.v2.finish import finish_own, store_all
from penstock.server.v2.tensors import to_binary

from .outputs import is_large
from .wire import field, field_head, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.backends.backend import Array
    from penstock.backends.signature import Signature
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body
    from penstock.server.v2.call_parameters import PerOutputPlan, Plan
    from penstock.server.v2.finish import Finished

FINAL, MORE = (field(4, field(1, b"triton_final_response") + field(2, b"\x08" + flag)) for flag in (b"\1", b"\0"))
"""The parameter of every answer on a stream: whether it is the last one to its request."""
_NAME, _VERSION, _ID, _OUTPUTS, _RAW = 1, 2, 3, 5, 6
_ERROR, _ANSWER = 1, 2
_ID_HEADS = tuple(field_head(_ID, size) for size in range(0x80))
_KEPT = 256
_KINDS: dict[type, str] = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_LARGE_BYTES = 64 << 10
"""From this size, data is copied only once; below it, avoiding the second copy costs more than the copy."""


class LargeAnswer(Exception):  # noqa: N818 - control flow, not an error
    """The answer must be encoded on a thread, by calling `encode`."""

    def __init__(self, encode: Callable[[], Body]) -> None:
        super().__init__()
        self.encode = encode


class RpcEncoder:
    """Encodes the answers of one model version; keeps the bytes that do not change between answers.

    `own`: outputs may come from user code, possibly in a step.
    """

    def __init__(self, model: str, version: str, signature: Signature, *, own: bool = False) -> None:
        self._names = field(_NAME, model.encode()) + field(_VERSION, version.encode())
        self._outputs = [(output.name.encode(), output.datatype) for output in signature.outputs]
        self.own = own
        self._singles: dict[tuple[int, tuple[int, ...]], tuple[bytes, bytes]] = {}
        self._heads: dict[tuple[Any, ...], tuple[bytes, ...]] = {}
        self._described: dict[tuple[Any, ...], bytes] = {}

    def empty(self, between: bytes) -> bytes:
        """Encode an answer without outputs."""
        return self._names + between

    def plain(self, wanted: tuple[int, ...], outputs: list[Any], between: bytes = b"") -> Body:
        """Encode outputs as they are; `between` precedes them, as returned by `before`.

        Raises: LargeAnswer.
        """
        if len(outputs) == 1:
            # the common answer: everything before the numbers is one kept prefix
            array = outputs[0]
            key = (wanted[0], array.shape)
            prefix, rest = self._singles.get(key) or self._single(key)
            if rest:
                if array.nbytes >= _LARGE_BYTES:
                    return b"".join((self._names, between, rest, to_binary(self._outputs[wanted[0]][1], array)))
                data: bytes = array.tobytes()
                return self._names + between + rest + data if between else prefix + data
        shapes = tuple([array.shape for array in outputs])
        heads = self._heads.get((wanted, shapes))
        if heads is None:
            heads = self._keep_heads(wanted, shapes)
        if heads:
            parts = [self._names, between]
            for head, array in zip(heads, outputs, strict=True):
                parts += (head, array.tobytes())
            return b"".join(parts)
        names = list(map(self._outputs.__getitem__, wanted))
        if is_large(None, outputs):
            raise LargeAnswer(partial(self._several, names, shapes, outputs, between))
        return self._several(names, shapes, outputs, between)

    def finished(self, outputs: Sequence[Finished], between: bytes = b"") -> Body:
        """Encode outputs of which some are in shared memory or classes."""
        names = [(output.name.encode(), output.datatype) for output in outputs]
        return self._several(names, [output.shape for output in outputs], [output.array for output in outputs], between)

    def stored(self, request: InferRequest, plan: PerOutputPlan, between: bytes) -> bytes:
        """Write all outputs into shared memory, and encode their description. Raises: as `finish_all`."""
        shapes = store_all(request, plan)
        key = (request.wanted, shapes)
        described = self._described.get(key)
        if described is None:
            named = zip(request.wanted, shapes, strict=True)
            described = b"".join([self.describe(*self._outputs[position], shape) for position, shape in named])
            described += field_head(_RAW, 0) * len(shapes)
            _keep(self._described, key, described)
        return self._names + between + described

    def _several(
        self, names: list[tuple[bytes, str]], shapes: Sequence[tuple[int, ...]], arrays: Sequence[Array | None],
        between: bytes,
    ) -> Body:  # fmt: skip
        named = zip(names, shapes, strict=True)
        described = b"".join([self.describe(name, datatype, shape) for (name, datatype), shape in named])
        kinds = zip(names, arrays, strict=True)
        raws = [b"" if array is None else to_binary(datatype, array) for (_, datatype), array in kinds]
        return self.described(described, raws, between)

    def described(self, described: bytes, raws: Sequence[Body], between: bytes) -> Body:
        """Encode outputs already described and converted to bytes; large ones are Mapped."""
        parts: list[Body] = [self._names, between, described]
        whole = 0
        for raw in raws:
            size = len(raw)
            parts += (field_head(_RAW, size), raw)
            whole += size
        return b"".join(parts) if whole < LARGE_BYTES else join_mapped(parts)

    def describe(self, name: bytes, datatype: str, shape: tuple[int, ...]) -> bytes:
        """Encode an output's description, without its data."""
        key = (name, datatype, shape)
        described = self._described.get(key)
        if described is None:
            dims = b"".join(map(varint, shape))
            tensor = field(1, name) + field(2, datatype.encode()) + (field(3, dims) if dims else b"")
            described = field(_OUTPUTS, tensor)
            _keep(self._described, key, described)
        return described

    def _single(self, key: tuple[int, tuple[int, ...]]) -> tuple[bytes, bytes]:
        """Keep everything before the data of a single-output answer, with and without the names.

        Empty if the size is not determined by the shape, or if it is large.
        """
        heads = self._keep_heads((key[0],), (key[1],))
        kept = (self._names + heads[0], heads[0]) if heads else (b"", b"")
        _keep(self._singles, key, kept)
        return kept

    def _keep_heads(self, wanted: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[bytes, ...]:
        """Keep what precedes the data of each output.

        Empty if the size of one is not determined by its shape, or if they are large together.
        """
        described, heads, whole = b"", [], 0
        for position, shape in zip(wanted, shapes, strict=True):
            name, datatype = self._outputs[position]
            described += self.describe(name, datatype, shape)
            size = math.prod(shape) * DATATYPES[datatype].size_bytes
            heads.append(field_head(_RAW, size))
            whole += size
        fixed = whole < LARGE_BYTES and all(DATATYPES[self._outputs[position][1]].size_bytes for position in wanted)
        kept = (described + heads[0], *heads[1:]) if heads and fixed else ()
        _keep(self._heads, (wanted, shapes), kept)
        return kept


def before(request_id: str, mark: bytes = b"") -> bytes:
    """Encode what comes between an answer's names and its outputs: the request's id; on a stream also FINAL or MORE."""
    if request_id:
        value = request_id.encode()
        return (_ID_HEADS[len(value)] if len(value) < 0x80 else field_head(_ID, len(value))) + value + mark
    return mark


def said_of(said: Mapping[str, Any] | None) -> bytes:
    """Encode the parameters that user code has set on an answer."""
    if not said:
        return b""
    message = service_pb2().ModelInferResponse()
    for name, value in said.items():
        kind = _KINDS.get(type(value))
        if kind is not None:
            setattr(message.parameters[name], kind, value)
    written: bytes = message.SerializeToString()
    return written


def encode_own(encoder: RpcEncoder, plan: Plan, request: InferRequest, between: bytes) -> Body:
    """Encode the answer of user code that differs from its signature. Raises: InferError (INVALID)."""
    outputs: Any = request.outputs
    finished = finish_own(request.model, request.wanted, plan, outputs)
    return encoder.finished(finished, between + said_of(outputs.parameters))


def stream_answer(answer: Body) -> Body:
    """Wrap an answer for a stream."""
    head = field_head(_ANSWER, len(answer))
    return head + answer if type(answer) is bytes else join_mapped((head, answer))


def stream_answer_of(encode: Callable[[], Body]) -> Body:
    """Encode an answer, and wrap it for a stream."""
    return stream_answer(encode())


def stream_error(text: str, answer: bytes) -> bytes:
    """Encode an error as a stream answer; the stream continues."""
    return field(_ERROR, text.encode("utf-8", "replace")) + field(_ANSWER, answer)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
