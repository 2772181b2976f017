"""RowRunner: requests whose tensors the server decoded: those that share a batch, and those of the v2 protocol.

Called by service.py. `batching.py` and `tensors.py` describe the messages. Nothing here runs a request a second time:
after a failed batch, the server sends its requests again, one by one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code
from penstock.server.seldon.messages import APART, NEVER, ROWS, TOGETHER, Endpoint, PayloadKind

from . import protobuf
from .answers import take_metrics
from .arrays import array_of, tensors_of
from .component import NO_RESULT, Component, is_inherited
from .errors import exception_text, failure
from .payloads import loads, split_message
from .proto_bytes import pb
from .seldon_core_classes import SeldonNotImplementedError

if TYPE_CHECKING:
    from penstock.backends.backend import Array

    from .endpoints import Rest

Reply = tuple[bytes, Sequence[Any] | None]
_APART, _NEVER = bytes((APART,)), bytes((NEVER,))
_TOGETHER = bytes((TOGETHER,))


class RowRunner:
    """Runs them with one component. Threads: one call at a time."""

    def __init__(self, component: Component, rest: Rest) -> None:
        self._component = component
        self._rest = rest
        self._takes_raw = hasattr(component.user, "predict_rest") or not is_inherited("predict_raw", component.user)

    def call(self, kind: int, body: bytes, arrays: Sequence[Array | None]) -> Reply:
        """Run one call of kind ROWS or TENSORS. Raises: only SystemExit of user code, for a single request."""
        try:
            if kind == ROWS:
                return self._run_shared(body, arrays)
            head = json.loads(body)
            return self._run_batch(head, arrays) if len(head["rows"]) > 1 else self._run_single(head, arrays)
        finally:
            self._component.recorded = []

    # -- calls of the original's protocol ----------------------------------------------------------------------

    def _run_shared(self, body: bytes, arrays: Sequence[Any]) -> Reply:
        """Run requests of one Key as one call of `predict`, and answer each as if it had been alone."""
        line, _, envelopes = body.partition(b"\n")
        head = json.loads(line)
        requests = list(_requests(head, envelopes))
        proto = head["payload_kind"] == PayloadKind.PROTO
        names: Any = list(requests[0].data.names) if proto else head["names"]
        meta: Any = {} if proto else None
        try:
            rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            data, tags, metrics = self._component.call_method(Endpoint.PREDICT, rows, names, meta)
            is_per_row = isinstance(data, (np.ndarray, list)) and len(data) == len(rows)
        except BaseException:  # noqa: BLE001 - each is called alone, and reports its own failure
            return _APART, None
        if _has_call_metadata(tags, metrics):
            return _NEVER, None
        if not is_per_row:
            return _APART, None
        finish = partial(protobuf.finish, self._component) if proto else self._rest.finish
        spans = pairwise(accumulate(head["rows"], initial=0))
        answers = [
            finish(Endpoint.PREDICT, request, data[begin:end], {}, [])
            for request, (begin, end) in zip(requests, spans, strict=True)
        ]
        sizes = struct.pack(f"<{len(answers)}I", *map(len, answers))
        return b"".join((_TOGETHER, sizes, *answers)), None

    # -- requests of the v2 protocol ---------------------------------------------------------------------------

    def _run_batch(self, head: Any, arrays: Sequence[Any]) -> Reply:
        """Run several as one call of `predict`."""
        width = len(head["inputs"])
        spans = list(pairwise(accumulate(head["rows"], initial=0)))
        total = spans[-1][1]
        try:
            inputs = [
                _concatenate([array_of(each, datatype) for each in arrays[index::width]])
                for index, (_, datatype) in enumerate(head["inputs"])
            ]
            data, tags, metrics = self._call_predict(head, inputs)
            positions, tensors = tensors_of(data, head["outputs"])
        except BaseException:  # noqa: BLE001 - as above
            return _APART, None
        if _has_call_metadata(tags, metrics):
            return _NEVER, None
        if any(len(tensor) != total for tensor in tensors):
            return _APART, None
        answers, sent = [], []
        for begin, end in spans:
            answers.append(answer := self._describe_outputs(positions, {}, []))
            if "code" not in answer:
                sent += [tensor[begin:end] for tensor in tensors]
        return _TOGETHER + json.dumps(answers).encode(), sent

    def _run_single(self, head: Any, arrays: Sequence[Any]) -> Reply:
        """Run one."""
        sent: list[Any] = []
        try:
            inputs = [array_of(each, datatype) for each, (_, datatype) in zip(arrays, head["inputs"], strict=True)]
            data, tags, metrics = self._call_predict(head, inputs)
            positions, tensors = tensors_of(data, head["outputs"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            answer = _error_entry(error)
        else:
            answer = self._describe_outputs(positions, tags, metrics)
            sent = [] if "code" in answer else tensors
        return _TOGETHER + json.dumps([answer]).encode(), sent

    def _call_predict(self, head: Any, inputs: list[Any]) -> tuple[Any, Any, Any]:
        """Call `predict`, or what a component has in its place. Raises: the exceptions of user code."""
        component = self._component
        has_several = len(inputs) > 1
        rows: Any = inputs if has_several else inputs[0]
        names = [name for name, _ in head["inputs"]] if has_several else []
        if self._takes_raw:
            if has_several:
                raise SeldonNotImplementedError("predict_raw takes a single input")
            message = component.call_raw(Endpoint.PREDICT, {"data": {"names": [], "ndarray": rows.tolist()}}, False)
            if message is not NO_RESULT:
                data, meta, *_ = split_message(message)
                return data, (meta or {}).get("tags") or {}, []
        return component.call_method(Endpoint.PREDICT, rows, names, None)

    def _describe_outputs(self, positions: list[int], tags: Any, metrics: Any) -> dict[str, Any]:
        """Return what accompanies the tensors of one request: its tags, and its metrics."""
        component = self._component
        component.recorded = []
        try:
            component.metrics(Endpoint.PREDICT, metrics)
            entry: dict[str, Any] = {"outputs": positions}
            found_tags = component.meta(None, [], tags).get("tags")
            if found_tags:
                entry["parameters"] = {key: _parameter(value) for key, value in found_tags.items()}
            if recorded := take_metrics(component):
                entry["metrics"] = recorded.decode()
        except Exception as error:  # noqa: BLE001 - as above
            return _error_entry(error)
        return entry


def _has_call_metadata(tags: Any, metrics: Any) -> bool:
    """Return whether a SeldonResponse has more than data, which cannot be assigned to one of several requests."""
    return bool(tags or metrics or type(metrics) is not list)


def _requests(head: Any, envelopes: bytes) -> Any:
    """Yield the requests of a batch, without their rows."""
    for begin, end in pairwise(accumulate(head["envelopes"], initial=0)):
        envelope = envelopes[begin:end]
        if head["payload_kind"] == PayloadKind.PROTO:
            yield pb.SeldonMessage.FromString(envelope)
        else:
            yield {"data": {head["kind"]: None}, **({"meta": loads(envelope)} if envelope else {})}


def _concatenate(arrays: Sequence[Any]) -> Any:
    """Concatenate an input of several requests. Raises: ValueError for strings of which only some are text."""
    if len({array.dtype.kind for array in arrays}) > 1:
        raise ValueError("bytes and texts")
    return np.concatenate(arrays)


def _parameter(value: Any) -> Any:
    """Return a tag as a parameter of the v2 protocol: anything but a scalar becomes JSON."""
    return value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str)


def _error_entry(error: Exception) -> dict[str, Any]:
    """Return an error: with the exception's own text, and INVALID if user code blames the client."""
    status, _ = failure(error)
    text = getattr(error, "message", None)
    code = Code.INVALID if 400 <= status < 500 else Code.INTERNAL
    if isinstance(error, SeldonNotImplementedError):
        code = Code.UNSUPPORTED
    return {"code": code.name, "message": text if isinstance(text, str) else exception_text(error)}
