"""Encoding the answer to a v2 infer request: JSON, or JSON followed by binary tensors.

Source: KServe v2 and Triton's binary tensor data extension; the order of members is Triton's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.datatypes import DATATYPES

from .finish import finish, finish_all, finish_own, ways_of
from .said import BINARY
from .tensors import to_binary, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest

    from .finish import Finished
    from .said import Plan, Ways

_KEPT_PREFIXES = 256


class Encoder:
    """Encodes the answers of one model version; keeps the bytes that do not change between answers.

    `outputs` are (name, datatype), by the Signature's positions.
    """

    def __init__(self, model: str, version: str, outputs: Sequence[tuple[str, str]]) -> None:
        self._outputs = list(outputs)
        self._names = b'"model_name":%s,"model_version":%s,' % (orjson.dumps(model), orjson.dumps(version))
        self._open = b"{" + self._names + b'"outputs":['
        self._binaries: dict[tuple[Any, ...], bytes] = {}
        self._singles: dict[tuple[int, tuple[int, ...]], bytes] = {}
        self._prefixes: dict[tuple[int, tuple[int, ...]], bytes] = {}

    def json(self, request_id: str, wanted: tuple[int, ...], outputs: list[Any]) -> bytes:
        """Encode outputs as JSON.

        Raises: InferError (INVALID) for what JSON cannot carry.
        """
        if len(outputs) == 1 and not request_id:
            # the usual answer: everything before the numbers is one kept prefix
            array = outputs[0]
            key = (wanted[0], array.shape)
            prefix = self._singles.get(key) or self._single(key)
            name, datatype = self._outputs[wanted[0]]
            return prefix + to_json(datatype, name, array) + b"}]}"
        return self._text(request_id, wanted, outputs, [None] * len(outputs))

    def mixed(
        self, request_id: str, wanted: tuple[int, ...], plan: tuple[bool, ...] | None, outputs: list[Any]
    ) -> tuple[bytes, int]:
        """Encode outputs, those that `plan` marks as binary after the JSON.

        Returns: the body, and how much of it is JSON; 0 when no binary byte follows.
        Raises: InferError (INVALID) for what JSON cannot carry.
        """
        binaries = plan or (False,) * len(wanted)
        raws = [
            to_binary(self._outputs[position][1], outputs[place]) if binaries[place] else None
            for place, position in enumerate(wanted)
        ]
        if request_id or not all(binaries):
            text = self._text(request_id, wanted, outputs, raws)
        else:
            key = (wanted, tuple([array.shape for array in outputs]), tuple(map(len, raws)))  # type: ignore[arg-type]
            text = self._binaries.get(key) or self._binary(key, outputs, raws)
        sent: Iterable[bytes | memoryview] = filter(None, raws)
        body = b"".join([text, *sent])
        return body, len(text) if len(body) > len(text) else 0

    def _text(
        self, request_id: str, wanted: tuple[int, ...], outputs: list[Any], raws: Sequence[bytes | memoryview | None]
    ) -> bytes:
        texts: list[bytes] = []
        for position, array, raw in zip(wanted, outputs, raws, strict=True):
            prefix = self._prefix(position, array.shape)
            if raw is None:
                name, datatype = self._outputs[position]
                texts.append(prefix + to_json(datatype, name, array) + b"}")
            else:
                texts.append(b'%s"parameters":{"binary_data_size":%d}}' % (prefix[: -len(b'"data":')], len(raw)))
        return (self._opening(request_id) if request_id else self._open) + b",".join(texts) + b"]}"

    def _binary(self, key: tuple[Any, ...], outputs: list[Any], raws: Sequence[bytes | memoryview | None]) -> bytes:
        text = self._text("", key[0], outputs, raws)
        if len(self._binaries) >= _KEPT_PREFIXES:
            self._binaries.clear()
        self._binaries[key] = text
        return text

    def _single(self, key: tuple[int, tuple[int, ...]]) -> bytes:
        prefix = self._open + self._prefix(*key)
        if len(self._singles) >= _KEPT_PREFIXES:
            self._singles.clear()
        self._singles[key] = prefix
        return prefix

    def _opening(self, request_id: str) -> bytes:
        return b'{"id":%s,%s"outputs":[' % (orjson.dumps(request_id), self._names)

    def _prefix(self, position: int, shape: tuple[int, ...]) -> bytes:
        key = (position, shape)
        prefix = self._prefixes.get(key)
        if prefix is None:
            name, datatype = self._outputs[position]
            prefix = b'{"name":%s,"datatype":"%s","shape":%s,"data":' % (
                orjson.dumps(name),
                datatype.encode(),
                orjson.dumps(shape),
            )
            if len(self._prefixes) >= _KEPT_PREFIXES:
                self._prefixes.clear()
            self._prefixes[key] = prefix
        return prefix


def encode_ways(request: InferRequest, plan: Ways) -> tuple[bytes, int]:
    """Encode outputs of which some are classes or go into shared memory. Returns, and raises: as `Encoder.mixed`."""
    return _encode_finished(request, finish_all(request.model, request.wanted, plan, request.outputs or []))


def encode_own(request: InferRequest, plan: Plan) -> tuple[bytes, int]:
    """Encode what user code has answered that its signature does not tell. Returns, and raises: as `Encoder.mixed`."""
    outputs: Any = request.outputs
    return _encode_finished(request, finish_own(request.model, request.wanted, plan, outputs), outputs.parameters)


def encode_hooked(request: InferRequest, plan: Plan, outputs: dict[str, Array]) -> tuple[bytes, int]:
    """Encode what post_inference returned: arrays by names of its own choosing.

    A call that names outputs which the hook returns gets those; any other gets all. Returns: as `Encoder.mixed`.
    """
    model, ways = request.model, ways_of(plan, len(request.wanted))
    asked = {model.signature.outputs[position].name: way for position, way in zip(request.wanted, ways, strict=True)}
    names = [name for name in outputs if name in asked] or list(outputs)
    others = all(way is BINARY for way in ways)
    finished = [
        finish(model, (name, _datatype_of(outputs[name])), asked.get(name, others), outputs[name]) for name in names
    ]
    return _encode_finished(request, finished)


def _encode_finished(
    request: InferRequest, outputs: Sequence[Finished], parameters: Mapping[str, Any] | None = None
) -> tuple[bytes, int]:
    """Write the answer. What is in shared memory has no data, and no parameters: C++ clients take those for binary."""
    model, texts, raws = request.model, [], []
    for output in outputs:
        head = orjson.dumps({"name": output.name, "datatype": output.datatype, "shape": output.shape})[:-1]
        if output.array is not None and output.binary:
            raw = to_binary(output.datatype, output.array)
            raws.append(raw)
            head += b',"parameters":{"binary_data_size":%d}' % len(raw)
        elif output.array is not None:
            head += b',"data":' + to_json(output.datatype, output.name, output.array)
        texts.append(head + b"}")
    opening = orjson.dumps(
        ({"id": request.id} if request.id else {})
        | {"model_name": model.name, "model_version": model.version}
        | ({"parameters": parameters} if parameters else {})
    )
    text = opening[:-1] + b',"outputs":[' + b",".join(texts) + b"]}"
    sent = [raw for raw in raws if raw]
    return (b"".join([text, *sent]), len(text)) if sent else (text, 0)


def _datatype_of(array: Array) -> str:
    return next(row.name for row in DATATYPES.values() if row.dtype == array.dtype)
