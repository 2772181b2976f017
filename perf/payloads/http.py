"""Requests over HTTP/1.1, head and body: JSON, followed by the tensors that are sent as binary.

Source: KServe v2 and Triton's binary tensor data and sequence extensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from penstock.perf.generator.orders import Target

from .tensors import InputError, InputTensor, Step, to_json
from .writing import Call, RequestedOutput, Template

_MARKS = (
    b',"sequence_start":false,"sequence_end":false',
    b',"sequence_start":true,"sequence_end":false',
    b',"sequence_start":false,"sequence_end":true',
    b',"sequence_start":true,"sequence_end":true',
)
"""By FIRST | LAST."""
_OURS = ("content-length", "inference-header-content-length", "content-type", "transfer-encoding", "expect")
_NO_TOKEN = frozenset('"(),/:;<=>?@[\\]{} \t\r\n')


@dataclass(frozen=True, slots=True)
class HttpWriter:
    """Writes requests. `binary_input`, `binary_output`: whether tensors outside shared memory are sent as binary."""

    call: Call
    target: Target
    headers: tuple[tuple[str, str], ...] = ()
    binary_input: bool = True
    binary_output: bool = True

    def whole(self, step: Step) -> bytes:
        body = self._body(step)
        parameters = b'"parameters":{' + body.parameters + b"}," if body.parameters else b""
        document = b"{" + parameters + body.members
        return body.head(len(document)) + document + body.tensors

    def identity(self, number: int) -> bytes:
        return b"%d" % number

    def template(self, step: Step) -> Template:
        body = self._body(step)
        begin = b'{"parameters":{"sequence_id":'
        end = (b"," + body.parameters if body.parameters else b"") + b"}," + body.members
        tail, size = end + body.tensors, len(begin) + len(end)

        def written(identity: bytes, mark: int) -> bytes:
            marks = _MARKS[mark]
            return b"".join((body.head(size + len(identity) + len(marks)), begin, identity, marks, tail))

        return written

    def _body(self, step: Step) -> _Body:
        binary = [sent.raw for sent in step if self.binary_input and sent.place is None]
        inputs = b",".join(map(self._input, step))
        members = b'"inputs":[' + inputs + b"]"
        if self.call.outputs:
            members += b',"outputs":' + _compact([self._output(each) for each in self.call.outputs])
        parameters = _compact(dict(self.call.parameters))[1:-1]
        tensors = b"".join(binary)
        return _Body(parameters, members + b"}", tensors, self._head(len(tensors) if binary else None))

    def _input(self, sent: InputTensor) -> bytes:
        entry: dict[str, Any] = {"name": sent.name, "datatype": sent.datatype, "shape": sent.shape}
        if sent.place is not None:
            return _compact({**entry, "parameters": _shared(RequestedOutput(sent.name, sent.place))})
        if self.binary_input:
            return _compact({**entry, "parameters": {"binary_data_size": len(sent.raw)}})
        return _compact(entry)[:-1] + b',"data":' + to_json(sent) + b"}"

    def _output(self, requested: RequestedOutput) -> dict[str, Any]:
        if requested.place is not None:
            return {"name": requested.name, "parameters": _shared(requested)}
        # the default for an output is JSON
        binary = {"parameters": {"binary_data": True}} if self.binary_output else {}
        return {"name": requested.name, **binary}

    def _head(self, binary_bytes: int | None) -> Callable[[int], bytes]:
        """Return what writes a head, given the length of the JSON. `binary_bytes` follow it; None: there are none."""
        model, version = (quote(text, safe="") for text in (self.call.model, self.call.version))
        path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
        kind = "application/json" if binary_bytes is None else "application/octet-stream"
        lines = [f"POST {path} HTTP/1.1", *_named(self.target, self.headers), f"Content-Type: {kind}"]
        front = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        if binary_bytes is None:
            return lambda size: b"%bContent-Length: %d\r\n\r\n" % (front, size)
        front += b"Inference-Header-Content-Length: "
        return lambda size: b"%b%d\r\nContent-Length: %d\r\n\r\n" % (front, size, size + binary_bytes)


@dataclass(frozen=True, slots=True)
class _Body:
    """A body in parts: `parameters` without their braces, `members` after them, and the tensors after the JSON."""

    parameters: bytes
    members: bytes
    tensors: bytes
    head: Callable[[int], bytes] = field(repr=False)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _shared(requested: RequestedOutput) -> dict[str, Any]:
    if requested.place is None:
        return {}
    place = requested.place
    offset = {"shared_memory_offset": place.offset} if place.offset else {}
    return {"shared_memory_region": place.region, "shared_memory_byte_size": place.nbytes, **offset}


def _named(target: Target, headers: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the lines of Host, unless the user has set it, and of the user's headers."""
    lines = []
    if not any(name.lower() == "host" for name, _ in headers):
        host = f"[{target.host}]" if ":" in target.host else target.host
        # a Unix socket has no host and no port
        lines.append("Host: localhost" if host.startswith("/") else f"Host: {host}:{target.port}")
    for name, value in headers:
        if name.lower() in _OURS:
            raise InputError(f"-H {name}: this header is written for each request as its body needs it")
        is_invalid = not name.isascii() or not name or _NO_TOKEN & set(name) or {"\r", "\n", "\0"} & set(value)
        if is_invalid or any(ord(letter) > 255 for letter in value):
            raise InputError(f"-H '{name}:{value}': no HTTP header can be written so")
        lines.append(f"{name}: {value}")
    return lines
