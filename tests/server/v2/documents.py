"""Hypothesis strategies that the v2 suites share: tensors of every datatype, arbitrary JSON, mutated documents."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, Sink
from penstock.server.v2.call_parameters import Options
from penstock.server.v2.decode import decode_and_cache
from penstock.server.v2.layout import Layouts

SHAPES = st.lists(st.integers(0, 3), max_size=3)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SPECIAL = [0.0, -0.0, 1.0, -1.5, float("nan"), float("inf"), float("-inf")]


def elements(datatype: str, *, finite: bool = False) -> st.SearchStrategy[Any]:
    """Draw Python values that a datatype holds exactly."""
    dtype = DATATYPES[datatype].dtype
    if datatype == "BYTES":
        return TEXTS.map(str.encode)
    if datatype == "BOOL":
        return st.booleans()
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype.str)
        return st.integers(int(bounds.min), int(bounds.max))
    floats = st.floats(width=64 if datatype == "FP64" else 32 if datatype == "FP32" else 16)
    return floats.filter(np.isfinite) if finite else st.one_of(st.sampled_from(SPECIAL), floats)


@st.composite
def tensors(draw: st.DrawFn, datatype: str, shapes: st.SearchStrategy[list[int]] = SHAPES) -> Array:
    """Draw an array of a datatype."""
    shape = draw(shapes)
    count = int(np.prod(shape))
    values = draw(st.lists(elements(datatype), min_size=count, max_size=count))
    array = np.empty(count, DATATYPES[datatype].dtype)
    array[:] = values
    return array.reshape(shape)


def same(left: Array, right: Array) -> bool:
    """Tell whether two arrays are equal to the bit, apart from the payload of a NaN."""
    if left.dtype.hasobject or left.dtype.kind != "f":
        return (left.dtype, left.shape, left.tolist()) == (right.dtype, right.shape, right.tolist())
    return bool(
        left.dtype == right.dtype
        and np.array_equal(left, right, equal_nan=True)
        and (np.signbit(left) | np.isnan(left)).tolist() == (np.signbit(right) | np.isnan(right)).tolist()
    )


def nested(values: list[Any], shape: list[int]) -> list[Any]:
    """Nest flat values as `shape` says."""
    if len(shape) <= 1:
        return values
    step = len(values) // shape[0] if shape[0] else 0
    return [nested(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths of all values in a document."""
    found = [path]
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        found += places(value, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """Draw a valid document with one to three changes: a value replaced, deleted or repeated."""
    mutant = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([place for place in places(mutant) if place] or [("x",)]))
        inner = mutant
        for key in path:
            inner = inner[key]
        change = draw(st.sampled_from(["replace", "delete", "repeat"]))
        if change == "replace" or not isinstance(inner, dict | list):
            inner[last] = draw(ANYTHING)
        elif change == "delete":
            inner.pop(last, None) if isinstance(inner, dict) else inner.pop(last)
        elif isinstance(inner, list):
            inner.insert(last, copy.deepcopy(inner[last]))
    return mutant


def decode_remembered(
    model: Model, body: bytes, header_bytes: int, max_depth: int, sink: Sink, layouts: Layouts
) -> tuple[InferRequest, Options]:
    """Decode as the fast lane does: with the cached layout if there is one, otherwise in full."""
    found = layouts.find(model, body, header_bytes, sink)
    return found or decode_and_cache(model, body, header_bytes, max_depth, sink, layouts)
