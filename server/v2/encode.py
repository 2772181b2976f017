"""Encoding the answer to a v2 infer request: JSON, or JSON followed by binary tensors.

Source: KServe v2 and Triton's binary tensor data extension; the order of members is Triton's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from .tensors import to_binary, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .decode import Plan

_KEPT_PREFIXES = 256


class Encoder:
    """Encodes the answers of one model version; keeps the bytes that do not change between answers.

    `outputs` are (name, datatype), by the Signature's positions.
    """

    def __init__(self, model: str, version: str, outputs: Sequence[tuple[str, str]]) -> None:
        self._outputs = list(outputs)
        self._names = b'"model_name":%s,"model_version":%s,' % (orjson.dumps(model), orjson.dumps(version))
        self._open = b"{" + self._names + b'"outputs":['
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
        texts = []
        for position, array in zip(wanted, outputs, strict=True):
            name, datatype = self._outputs[position]
            texts.append(self._prefix(position, array.shape) + to_json(datatype, name, array) + b"}")
        return (self._opening(request_id) if request_id else self._open) + b",".join(texts) + b"]}"

    def mixed(self, request_id: str, wanted: tuple[int, ...], plan: Plan, outputs: list[Any]) -> tuple[bytes, int]:
        """Encode outputs, those that `plan` marks as binary after the JSON.

        Returns: the body, and how much of it is JSON; 0 when no binary byte follows.
        Raises: InferError (INVALID) for what JSON cannot carry.
        """
        texts: list[bytes] = []
        raws: list[bytes | memoryview] = []
        for position, array, binary in zip(wanted, outputs, plan or (), strict=True):
            name, datatype = self._outputs[position]
            if binary:
                raw = to_binary(datatype, array)
                raws.append(raw)
                head = self._prefix(position, array.shape)[: -len(b'"data":')]
                texts.append(b'%s"parameters":{"binary_data_size":%d}}' % (head, len(raw)))
            else:
                texts.append(self._prefix(position, array.shape) + to_json(datatype, name, array) + b"}")
        text = (self._opening(request_id) if request_id else self._open) + b",".join(texts) + b"]}"
        if not any(raws):
            return text, 0
        return b"".join([text, *raws]), len(text)

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
