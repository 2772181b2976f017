"""TraceFile: traces in Triton's JSON form, in one file or, with a log frequency or a count, in numbered ones.

Source: Triton server, tracer.cc (the members and their order), docs/user_guide/trace.md and qa/L0_trace. Unlike there,
the file is a complete JSON array at any time, not only after the server has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from .config import TIMESTAMPS
from .trace import Trace, TracedTensor

_MAX_COUNT_FILES = 8
"""The most counts with open files: the global one and those of models. The oldest is closed."""


class _JsonArrayFile:
    """A file that is a JSON array at any time; an existing file is replaced.

    Invariant: its first `size` bytes, if any, are that array; a write beyond them that fails, on a full disk, is
    undone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file: FileIO | None = None

    def append(self, lines: Sequence[bytes]) -> None:
        """Append elements. Raises: OSError."""
        if self._file is None:
            self._file = FileIO(self.path, "w")
        start = max(0, self.size - 1)
        text = (b",\n" if start else b"[") + b",\n".join(lines) + b"]"
        try:
            _write_at(self._file, start, text)
        except OSError:
            with suppress(OSError):
                # what was there before needs no additional space
                _write_at(self._file, start, b"]" if start else b"")
                self._file.truncate(self.size)
            raise
        self.size = start + len(text)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TraceFile:
    """Writes to `path`; or to `path.0`, `path.1` and so on, a number of traces each, or all of a finished count.

    `_count_files` are the files of counts, by number: if a count is not finished when the server ends, its traces go to
    `path` after all, as in Triton.
    Threads: one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._main_file = _JsonArrayFile(path)
        self._count_files: dict[int, _JsonArrayFile] = {}
        self._finished_counts: set[int] = set()
        self._pending_lines: list[bytes] = []
        self._pending_traces = 0
        self._index = 0

    def write(self, traces: Sequence[Trace]) -> None:
        """Write traces. Raises: OSError; the traces due to be written are then lost."""
        lines_by_count: dict[int, list[bytes]] = {}
        for trace in traces:
            lines = [orjson.dumps(entry) for each in (trace, *trace.steps) for entry in entries(each)]
            if trace.last:
                self._finished_counts.add(trace.count_number)
            if not trace.log_frequency:
                lines_by_count.setdefault(trace.count_number, []).extend(lines)
                continue
            self._pending_lines += lines
            self._pending_traces += 1
            if self._pending_traces >= trace.log_frequency or trace.last:
                self._write_numbered()
        for number, lines in lines_by_count.items():
            (self._count_file(number) if number else self._main_file).append(lines)

    def close(self) -> None:
        """Write the traces collected for a numbered file, and close."""
        if self._pending_lines:
            self._write_numbered()
        while self._count_files:
            self._close_oldest()
        self._main_file.close()

    def _count_file(self, number: int) -> _JsonArrayFile:
        array = self._count_files.get(number)
        if array is None:
            if len(self._count_files) >= _MAX_COUNT_FILES:
                self._close_oldest()
            array = self._count_files[number] = _JsonArrayFile(self._next_path())
        return array

    def _close_oldest(self) -> None:
        number, array = next(iter(self._count_files.items()))
        del self._count_files[number]
        array.close()
        if number not in self._finished_counts and array.size:
            self._main_file.append([array.path.read_bytes()[1:-1]])
            array.path.unlink()

    def _write_numbered(self) -> None:
        lines, self._pending_lines, self._pending_traces = self._pending_lines, [], 0
        path = self._next_path()
        try:
            path.write_bytes(b"[" + b",\n".join(lines) + b"]")
        except OSError:
            with suppress(OSError):
                path.unlink()  # an incomplete file cannot be read
            raise

    def _next_path(self) -> Path:
        path = self._path.with_name(f"{self._path.name}.{self._index}")
        self._index += 1
        return path


def _write_at(file: FileIO, start: int, text: bytes) -> None:
    file.seek(start)
    remaining = memoryview(text)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def entries(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a trace as Triton's objects: its description, then one object per stamp and per tensor."""
    description: dict[str, Any] = {"id": trace.number, "model_name": trace.model, "model_version": int(trace.version)}
    if trace.request_id:
        description["request_id"] = trace.request_id.encode("utf-8", "replace").decode()
    if trace.parent_number:
        description["parent_id"] = trace.parent_number
    yield description
    if TIMESTAMPS in trace.level:
        for name, ns in trace.stamps:
            yield {"id": trace.number, "timestamps": [{"name": name, "ns": ns}]}
    for tensor in trace.tensors:
        shape = ",".join(map(str, tensor.values.shape))
        described = {"name": tensor.name, "data": _values_text(tensor), "shape": shape, "dtype": tensor.datatype}
        yield {"id": trace.number, "activity": tensor.activity, "tensor": described}


def _values_text(tensor: TracedTensor) -> str:
    values = tensor.values.reshape(-1).tolist()
    if tensor.datatype == "BYTES":
        return ",".join(f'"{_decode_text(value)}"' for value in values)
    if tensor.datatype == "BOOL":
        return ",".join("1" if value else "0" for value in values)
    return ",".join(map(str, values))


def _decode_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
