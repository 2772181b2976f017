"""TraceFile: traces in Triton's JSON form, in a file or, with a log frequency, in numbered ones.

Source: Triton server, tracer.cc (the members and their order) and docs/user_guide/trace.md. Unlike there, the file is a
whole JSON array at any time, not only when the server has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from .config import TIMESTAMPS
from .trace import Tensor, Trace


class TraceFile:
    """Writes to `path`, which an earlier file gives way to; or to `path.0`, `path.1` and so on, so many traces each.

    Invariant: the first `_size` bytes of the file, if any, are a JSON array; what is written beyond them and fails, on
    a disk that is full, is taken back.
    Threads: one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._size = 0
        self._gathered: list[bytes] = []
        self._gathered_traces = 0
        self._index = 0

    def write(self, traces: Sequence[Trace]) -> None:
        """Take traces. Raises: OSError, and then those that were to be written now are lost."""
        together: list[bytes] = []
        for trace in traces:
            lines = [orjson.dumps(entry) for each in (trace, *trace.steps) for entry in entries(each)]
            if not trace.log_frequency:
                together += lines
                continue
            self._gathered += lines
            self._gathered_traces += 1
            if self._gathered_traces >= trace.log_frequency:
                self._write_numbered()
        if together:
            self._append(together)

    def close(self) -> None:
        """Write what is gathered for a numbered file, and close."""
        if self._gathered:
            self._write_numbered()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, lines: list[bytes]) -> None:
        if self._file is None:
            self._file = FileIO(self._path, "w")
        start = max(0, self._size - 1)
        text = (b",\n" if start else b"[") + b",\n".join(lines) + b"]"
        try:
            _write_at(self._file, start, text)
        except OSError:
            with suppress(OSError):
                # what stood there before takes no more room
                _write_at(self._file, start, b"]" if start else b"")
                self._file.truncate(self._size)
            raise
        self._size = start + len(text)

    def _write_numbered(self) -> None:
        lines, self._gathered, self._gathered_traces = self._gathered, [], 0
        path = self._path.with_name(f"{self._path.name}.{self._index}")
        self._index += 1
        path.write_bytes(b"[" + b",\n".join(lines) + b"]")


def _write_at(file: FileIO, start: int, text: bytes) -> None:
    file.seek(start)
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]


def entries(trace: Trace) -> Iterator[dict[str, Any]]:
    """Give a trace as Triton's objects: whose it is, then one object per stamp and per tensor."""
    whose: dict[str, Any] = {"id": trace.number, "model_name": trace.model, "model_version": int(trace.version)}
    if trace.request_id:
        whose["request_id"] = trace.request_id.encode("utf-8", "replace").decode()
    if trace.parent_number:
        whose["parent_id"] = trace.parent_number
    yield whose
    if TIMESTAMPS in trace.level:
        for name, ns in trace.stamps:
            yield {"id": trace.number, "timestamps": [{"name": name, "ns": ns}]}
    for tensor in trace.tensors:
        shape = ",".join(map(str, tensor.values.shape))
        said = {"name": tensor.name, "data": _text(tensor), "shape": shape, "dtype": tensor.datatype}
        yield {"id": trace.number, "activity": tensor.activity, "tensor": said}


def _text(tensor: Tensor) -> str:
    values = tensor.values.reshape(-1).tolist()
    if tensor.datatype == "BYTES":
        return ",".join(f'"{_decoded(value)}"' for value in values)
    if tensor.datatype == "BOOL":
        return ",".join("1" if value else "0" for value in values)
    return ",".join(map(str, values))


def _decoded(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
