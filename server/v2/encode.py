"""Encoding of the answer to a v2 infer request: JSON, or JSON followed by binary tensors.

Source: KServe v2 and Triton's binary tensor data extension; the order of members is Triton's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.hooks.convert import datatype_of
from penstock.server.listening.mapped_buffer import MappedBuffer

from .call_parameters import BINARY, PerOutputPlan
from .finish import Finished, finish, finish_all, store_all
from .tensors import json_pieces, json_writer, to_binary, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest
    from penstock.server.listening.mapped_buffer import Body

    from .call_parameters import OutputMode, Plan

_MAX_CACHED_PREFIXES = 256
_LARGE_BYTES = 64 << 10
"""From this size, data is copied only once; below it, avoiding the second copy costs more than the copy."""
_DATA = b',"data":'


class Encoder:
    """Encodes the answers of one model version; keeps the bytes that do not change between answers.

    `outputs` are (name, datatype) pairs, in the Signature's order. `strings`: some of them are BYTES.
    """

    def __init__(self, model: str, version: str, outputs: Sequence[tuple[str, str]]) -> None:
        self._outputs = list(outputs)
        self.strings = any(datatype == "BYTES" for _, datatype in outputs)
        self._names = b'"model_name":%s,"model_version":%s,' % (orjson.dumps(model), orjson.dumps(version))
        self._start = b"{" + self._names + b'"outputs":['
        self._binaries: dict[tuple[Any, ...], bytes] = {}
        self._single_binaries: dict[tuple[int, tuple[int, ...]], bytes] = {}
        self._singles: dict[tuple[int, tuple[int, ...]], tuple[bytes, Callable[[Array], bytes]]] = {}
        self._prefixes: dict[tuple[str, str, tuple[int, ...]], bytes] = {}

    def encode_json(self, request_id: str, wanted: tuple[int, ...], outputs: list[Any]) -> bytes:
        """Encode outputs as JSON.

        Raises: InferError (INVALID) for what JSON cannot carry.
        """
        if len(outputs) == 1 and not request_id:
            # the common answer: everything before the numbers is one kept prefix
            array = outputs[0]
            key = (wanted[0], array.shape)
            prefix, write = self._singles.get(key) or self._cache_single(key)
            return prefix + write(array) + b"}]}"
        return self._build_json(request_id, wanted, outputs, [None] * len(outputs))

    def encode_mixed(
        self, request_id: str, wanted: tuple[int, ...], plan: tuple[bool, ...] | None, outputs: list[Any]
    ) -> tuple[bytes, int]:
        """Encode outputs, with those that `plan` marks as binary after the JSON.

        Returns: the body and the length of its JSON, 0 if no binary data follows.
        Raises: InferError (INVALID) for what JSON cannot carry.
        """
        binaries = plan or (False,) * len(wanted)
        if len(outputs) == 1 and binaries[0]:
            # the common answer: everything before the values is kept
            array = outputs[0]
            text = self._single_binaries.get((wanted[0], array.shape))
            if text is not None:
                text = self._insert_id(request_id, text) if request_id else text
                return text + array.tobytes(), len(text)
        return self._encode_mixed(request_id, wanted, binaries, outputs)

    def _encode_mixed(
        self, request_id: str, wanted: tuple[int, ...], binaries: tuple[bool, ...], outputs: list[Any]
    ) -> tuple[bytes, int]:
        raws = [
            to_binary(self._outputs[position][1], outputs[index]) if binaries[index] else None
            for index, position in enumerate(wanted)
        ]
        if all(binaries):
            key = (wanted, tuple([array.shape for array in outputs]), tuple(map(len, raws)))  # type: ignore[arg-type]
            text = self._insert_id(request_id, self._binaries.get(key) or self._cache_binary(key, outputs, raws))
        else:
            text = self._build_json(request_id, wanted, outputs, raws)
        sent: Iterable[bytes | memoryview] = filter(None, raws)
        body = b"".join([text, *sent])
        return body, len(text) if len(body) > len(text) else 0

    def _build_json(
        self, request_id: str, wanted: tuple[int, ...], outputs: list[Any], raws: Sequence[bytes | memoryview | None]
    ) -> bytes:
        texts: list[bytes] = []
        for position, array, raw in zip(wanted, outputs, raws, strict=True):
            name, datatype = self._outputs[position]
            prefix = self._prefix(name, datatype, array.shape)
            texts.append(
                _with_data_size(prefix, raw) if raw is not None else prefix + to_json(datatype, name, array) + b"}"
            )
        return (self._build_start(request_id) if request_id else self._start) + b",".join(texts) + b"]}"

    def encode_finished(
        self, request_id: str, outputs: Sequence[Finished], parameters: Mapping[str, Any] | None = None
    ) -> tuple[bytes, int]:
        """Encode finished outputs. Returns, and raises: as `encode_mixed`.

        Outputs in shared memory have no data, and no parameters: C++ clients would take those to mean binary data.
        """
        texts: list[bytes] = []
        raws: list[bytes | memoryview] = []
        for name, datatype, shape, array, binary in outputs:
            prefix = self._prefix(name, datatype, shape)
            if array is None:
                texts.append(prefix[: -len(_DATA)] + b"}")
            elif binary:
                raw = to_binary(datatype, array)
                raws.append(raw)
                texts.append(_with_data_size(prefix, raw))
            else:
                texts.append(prefix + to_json(datatype, name, array) + b"}")
        opening = self._build_start(request_id, parameters) if request_id or parameters else self._start
        text = opening + b",".join(texts) + b"]}"
        sent = [raw for raw in raws if raw]
        return (b"".join([text, *sent]), len(text)) if sent else (text, 0)

    def encode_mapped(
        self, request_id: str, outputs: Sequence[Finished], parameters: Mapping[str, Any] | None = None
    ) -> tuple[Body, int]:
        """Encode as `encode_finished` does, on a thread: into mapped memory, a piece at a time."""
        body, raws, comma = MappedBuffer(), [], b""
        body.append(self._build_start(request_id, parameters))
        for name, datatype, shape, array, binary in outputs:
            prefix = comma + self._prefix(name, datatype, shape)
            if array is None:
                body.append(prefix[: -len(_DATA)])
            elif binary:
                raws.append(to_binary(datatype, array))
                body.append(_with_data_size(prefix, raws[-1])[:-1])
            else:
                body.append(prefix)
                for piece in json_pieces(datatype, name, array):
                    body.append(piece)
            body.append(b"}")
            comma = b","
        body.append(b"]}")
        json_bytes = body.size
        for raw in raws:
            body.append(raw)
        return body.finish(), json_bytes if body.size > json_bytes else 0

    def _cache_binary(
        self, key: tuple[Any, ...], outputs: list[Any], raws: Sequence[bytes | memoryview | None]
    ) -> bytes:
        text = self._build_json("", key[0], outputs, raws)
        self._cache(key, text)
        if len(outputs) == 1 and 0 < outputs[0].nbytes < _LARGE_BYTES:
            (position,) = key[0]
            if self._outputs[position][1] != "BYTES":
                self._single_binaries[position, outputs[0].shape] = text
        return text

    def _cache(self, key: tuple[Any, ...], text: bytes) -> None:
        if len(self._binaries) >= _MAX_CACHED_PREFIXES:
            self._binaries.clear()
            self._single_binaries.clear()
        self._binaries[key] = text

    def _cache_single(self, key: tuple[int, tuple[int, ...]]) -> tuple[bytes, Callable[[Array], bytes]]:
        name, datatype = self._outputs[key[0]]
        if len(self._singles) >= _MAX_CACHED_PREFIXES:
            self._singles.clear()
        single = self._start + self._prefix(name, datatype, key[1]), json_writer(datatype, name, key[1])
        self._singles[key] = single
        return single

    def store_and_encode(self, request: InferRequest, plan: PerOutputPlan) -> bytes:
        """Write all outputs into shared memory, and encode their description. Raises: as `encode_mixed`."""
        shapes = store_all(request, plan)
        key = (request.output_positions, shapes)
        text = self._binaries.get(key)
        if text is None:
            names = [self._outputs[position] for position in request.output_positions]
            finished = [Finished(*each, shape, None, BINARY) for each, shape in zip(names, shapes, strict=True)]
            text, _ = self.encode_finished("", finished)
            self._cache(key, text)
        return self._insert_id(request.id, text)

    def _insert_id(self, request_id: str, text: bytes) -> bytes:
        """Insert an id into a text kept without one."""
        return self._build_start(request_id) + text[len(self._start) :] if request_id else text

    def _build_start(self, request_id: str, parameters: Mapping[str, Any] | None = None) -> bytes:
        id_member = b'"id":%s,' % orjson.dumps(request_id) if request_id else b""
        parameters_member = b'"parameters":%s,' % orjson.dumps(parameters) if parameters else b""
        return b'{%s%s%s"outputs":[' % (id_member, self._names, parameters_member)

    def _prefix(self, name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
        key = (name, datatype, shape)
        prefix = self._prefixes.get(key)
        if prefix is None:
            members = orjson.dumps(name), datatype.encode(), orjson.dumps(shape)
            prefix = b'{"name":%s,"datatype":"%s","shape":%s' % members + _DATA
            if len(self._prefixes) >= _MAX_CACHED_PREFIXES:
                self._prefixes.clear()
            self._prefixes[key] = prefix
        return prefix


def encode_outputs(encoder: Encoder, request: InferRequest, plan: Plan, *, large: bool) -> tuple[Body, int]:
    """Encode any outputs: as classes, into shared memory, or those of user code.

    `large`: on a thread. Returns: as `encode_mixed`, or mapped. Raises: as `encode_mixed`.
    """
    outputs: Any = request.outputs or []
    if type(plan) is PerOutputPlan and plan.all_shared and type(outputs) is not CustomOutputs:
        return encoder.store_and_encode(request, plan), 0
    finished = finish_all(request.model, request.output_positions, plan, outputs)
    encode = encoder.encode_mapped if large else encoder.encode_finished
    return encode(request.id, finished, getattr(outputs, "parameters", None))


def encode_hook_outputs(
    encoder: Encoder, request: InferRequest, modes: Mapping[str, OutputMode], outputs: Mapping[str, Array], *,
    large: bool,
) -> tuple[Body, int]:  # fmt: skip
    """Encode what post_inference returned: arrays under names it chose, with the `modes` from `select_outputs`.

    `large`: on a thread. Returns: as `encode_mixed`, or mapped. Raises: InferError (INVALID).
    """
    finished = [
        finish(request.model, (name, datatype_of(outputs[name])), mode, outputs[name]) for name, mode in modes.items()
    ]
    encode = encoder.encode_mapped if large else encoder.encode_finished
    return encode(request.id, finished, getattr(outputs, "parameters", None))


def _with_data_size(prefix: bytes, raw: bytes | memoryview) -> bytes:
    """Describe an output whose data follows the JSON."""
    return b'%s,"parameters":{"binary_data_size":%d}}' % (prefix[: -len(_DATA)], len(raw))
