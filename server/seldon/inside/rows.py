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
from .answers import recorded_of
from .arrays import array_of, tensors_of
from .component import NOTHING, Component, inherited
from .failing import failure, text_of
from .originals import SeldonNotImplementedError
from .payloads import loads, parts
from .proto_bytes import pb

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
        self._takes_raw = hasattr(component.user, "predict_rest") or not inherited("predict_raw", component.user)

    def call(self, kind: int, body: bytes, arrays: Sequence[Array | None]) -> Reply:
        """Run one call of kind ROWS or TENSORS. Raises: only SystemExit of user code, for a single request."""
        try:
            if kind == ROWS:
                return self._shared(body, arrays)
            said = json.loads(body)
            return self._batch(said, arrays) if len(said["rows"]) > 1 else self._alone(said, arrays)
        finally:
            self._component.recorded = []

    # -- calls of the original's protocol ----------------------------------------------------------------------

    def _shared(self, body: bytes, arrays: Sequence[Any]) -> Reply:
        """Run requests of one Key as one call of `predict`, and answer each as if it had been alone."""
        head, _, rests = body.partition(b"\n")
        said = json.loads(head)
        requests = list(_requests(said, rests))
        proto = said["form"] == PayloadKind.PROTO
        names: Any = list(requests[0].data.names) if proto else said["names"]
        meta: Any = {} if proto else None
        try:
            rows = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            data, tags, metrics = self._component.respond(Endpoint.PREDICT, rows, names, meta)
            fits = isinstance(data, (np.ndarray, list)) and len(data) == len(rows)
        except BaseException:  # noqa: BLE001 - each is called alone, and reports its own failure
            return _APART, None
        if _is_of_one_call(tags, metrics):
            return _NEVER, None
        if not fits:
            return _APART, None
        answered = partial(protobuf.answered, self._component) if proto else self._rest.answered
        spans = pairwise(accumulate(said["rows"], initial=0))
        answers = [
            answered(Endpoint.PREDICT, request, data[begin:end], {}, [])
            for request, (begin, end) in zip(requests, spans, strict=True)
        ]
        sizes = struct.pack(f"<{len(answers)}I", *map(len, answers))
        return b"".join((_TOGETHER, sizes, *answers)), None

    # -- requests of the v2 protocol ---------------------------------------------------------------------------

    def _batch(self, said: Any, arrays: Sequence[Any]) -> Reply:
        """Run several as one call of `predict`."""
        width = len(said["inputs"])
        spans = list(pairwise(accumulate(said["rows"], initial=0)))
        total = spans[-1][1]
        try:
            inputs = [
                _joined([array_of(each, datatype) for each in arrays[at::width]])
                for at, (_, datatype) in enumerate(said["inputs"])
            ]
            data, tags, metrics = self._respond(said, inputs)
            positions, tensors = tensors_of(data, said["outputs"])
        except BaseException:  # noqa: BLE001 - as above
            return _APART, None
        if _is_of_one_call(tags, metrics):
            return _NEVER, None
        if any(len(tensor) != total for tensor in tensors):
            return _APART, None
        answers, sent = [], []
        for begin, end in spans:
            answers.append(answer := self._described(positions, {}, []))
            if "code" not in answer:
                sent += [tensor[begin:end] for tensor in tensors]
        return _TOGETHER + json.dumps(answers).encode(), sent

    def _alone(self, said: Any, arrays: Sequence[Any]) -> Reply:
        """Run one."""
        sent: list[Any] = []
        try:
            inputs = [array_of(each, datatype) for each, (_, datatype) in zip(arrays, said["inputs"], strict=True)]
            data, tags, metrics = self._respond(said, inputs)
            positions, tensors = tensors_of(data, said["outputs"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            answer = _refusal(error)
        else:
            answer = self._described(positions, tags, metrics)
            sent = [] if "code" in answer else tensors
        return _TOGETHER + json.dumps([answer]).encode(), sent

    def _respond(self, said: Any, inputs: list[Any]) -> tuple[Any, Any, Any]:
        """Call `predict`, or what a component has in its place. Raises: the exceptions of user code."""
        component = self._component
        several = len(inputs) > 1
        rows: Any = inputs if several else inputs[0]
        names = [name for name, _ in said["inputs"]] if several else []
        if self._takes_raw:
            if several:
                raise SeldonNotImplementedError("predict_raw takes a single input")
            message = component.raw(Endpoint.PREDICT, {"data": {"names": [], "ndarray": rows.tolist()}}, False)
            if message is not NOTHING:
                data, meta, *_ = parts(message)
                return data, (meta or {}).get("tags") or {}, []
        return component.respond(Endpoint.PREDICT, rows, names, None)

    def _described(self, positions: list[int], tags: Any, metrics: Any) -> dict[str, Any]:
        """Return what accompanies the tensors of one request: its tags, and its metrics."""
        component = self._component
        component.recorded = []
        try:
            component.metrics(Endpoint.PREDICT, metrics)
            said: dict[str, Any] = {"outputs": positions}
            found = component.meta(None, [], tags).get("tags")
            if found:
                said["parameters"] = {key: _parameter(value) for key, value in found.items()}
            if recorded := recorded_of(component):
                said["metrics"] = recorded.decode()
        except Exception as error:  # noqa: BLE001 - as above
            return _refusal(error)
        return said


def _is_of_one_call(tags: Any, metrics: Any) -> bool:
    """Return whether a SeldonResponse has more than data, which cannot be assigned to one of several requests."""
    return bool(tags or metrics or type(metrics) is not list)


def _requests(said: Any, rests: bytes) -> Any:
    """Yield the requests of a batch, without their rows."""
    for begin, end in pairwise(accumulate(said["rests"], initial=0)):
        rest = rests[begin:end]
        if said["form"] == PayloadKind.PROTO:
            yield pb.SeldonMessage.FromString(rest)
        else:
            yield {"data": {said["kind"]: None}, **({"meta": loads(rest)} if rest else {})}


def _joined(arrays: Sequence[Any]) -> Any:
    """Concatenate an input of several requests. Raises: ValueError for strings of which only some are text."""
    if len({array.dtype.kind for array in arrays}) > 1:
        raise ValueError("bytes and texts")
    return np.concatenate(arrays)


def _parameter(value: Any) -> Any:
    """Return a tag as a parameter of the v2 protocol: anything but a scalar becomes JSON."""
    return value if isinstance(value, (str, int, float, bool)) else json.dumps(value, default=str)


def _refusal(error: Exception) -> dict[str, Any]:
    """Return an error: with the exception's own text, and INVALID if user code blames the client."""
    status, _ = failure(error)
    text = getattr(error, "message", None)
    code = Code.INVALID if 400 <= status < 500 else Code.INTERNAL
    if isinstance(error, SeldonNotImplementedError):
        code = Code.UNSUPPORTED
    return {"code": code.name, "message": text if isinstance(text, str) else text_of(error)}
