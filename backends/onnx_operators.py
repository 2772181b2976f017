"""The operators of an .onnx file, read without its weights, and those that crash on empty inputs. Used by `onnx.py`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from .protobuf_fields import fields

_GRAPH, _FUNCTION, _NODE_OF_GRAPH, _NODE_OF_FUNCTION = 7, 25, 1, 7
_OPERATOR, _ATTRIBUTE, _GRAPHS_OF_ATTRIBUTE = 4, 5, (6, 11)
_OTHER_VALUES = frozenset({2, 3, 4, 5, 7, 8, 9, 10, 14, 15, 22, 23})
"""Field numbers; the last are those that an attribute may hold instead of graphs. Source: onnx.proto of the ONNX IR
specification, in which each attribute holds values of one kind."""
_WITH_LENGTH = 2
_MAX_DEPTH = 64
_NEVER_EMPTY = frozenset({"LSTM", "GRU", "DynamicQuantizeLSTM"})
_EMPTY_UNSAFE_UNTIL_FIXED = frozenset({"Einsum", "OneHot", "TopK"})
_FIXED_IN_VERSION = (1, 31)
SHARED_SCALES = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operators whose every output depends on the largest and smallest of their inputs, across all rows."""


def never_empty(version: str) -> frozenset[str]:
    """Return the operators that crash the process if their batch has no rows, by the version of ONNX Runtime.

    Observed on the CPU, where a session on a GPU may leave nodes too: the first with 1.20 to 1.32; Einsum with 1.20 to
    1.24, OneHot with 1.20 to 1.26, TopK with 1.20 to 1.30.
    """
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    return _NEVER_EMPTY if numbers >= _FIXED_IN_VERSION else _NEVER_EMPTY | _EMPTY_UNSAFE_UNTIL_FIXED


def operators(path: Path) -> frozenset[str]:
    """Return the operators of a model, including those in branches, loops and functions; none if it cannot be read.

    Weights, which may be gigabytes, are skipped: in a mapped file they are never touched.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as model,
        ):
            return frozenset(_operators_in_model(model))
    except (OSError, ValueError, LookupError, BufferError):
        return frozenset()  # the loader reports why


def _operators_in_model(model: memoryview) -> Iterator[str]:
    for field, start, stop in _fields(model, 0, len(model)):
        if field in (_GRAPH, _FUNCTION):
            node = _NODE_OF_GRAPH if field == _GRAPH else _NODE_OF_FUNCTION
            yield from _operators_in_nodes(model, start, stop, node, _MAX_DEPTH)


def _operators_in_nodes(model: memoryview, start: int, stop: int, node: int, depth: int) -> Iterator[str]:
    """Yield the operators of a graph or a function. `node`: the number of the field that holds its nodes."""
    for field, begin, end in _fields(model, start, stop):
        if field != node:
            continue
        for part, first, last in _fields(model, begin, end):
            if part == _OPERATOR:
                yield str(model[first:last], "utf-8", "replace")
            elif part == _ATTRIBUTE and depth:
                yield from _operators_in_attribute(model, first, last, depth)


def _operators_in_attribute(model: memoryview, start: int, stop: int, depth: int) -> Iterator[str]:
    """Yield the operators of an attribute's graphs. Skips one of numbers: a forest has millions, each a field."""
    for head, begin, end in fields(model, start, stop):
        if head >> 3 in _GRAPHS_OF_ATTRIBUTE:
            yield from _operators_in_nodes(model, begin, end, _NODE_OF_GRAPH, depth - 1)
        elif head >> 3 in _OTHER_VALUES:
            return


def _fields(model: memoryview, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the start and the end of each field that has a length. Raises: as `fields`."""
    for head, begin, end in fields(model, start, stop):
        if head & 7 == _WITH_LENGTH:
            yield head >> 3, begin, end
