"""F15, F16, F21: conversions compared with those of the original libraries (original/README.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.server.cortex.casting import CastError, as_array, cast
from penstock.server.cortex.tensor_protos import TENSOR_TYPES, make_array

ORIGINAL = Path(__file__).parent / "original"


def _cases(name: str) -> list[tuple[str, Any, dict[str, Any]]]:
    return [tuple(line) for line in json.loads((ORIGINAL / name).read_text("utf-8"))]


def _value(kind: str, value: Any) -> Any:
    return np.array(value["array"], dtype=value["dtype"]) if kind == "a" else value


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float) and math.isnan(found):
        return math.isnan(expected)
    return type(found) is type(expected) and bool(found == expected)


def _assert_is(found: Any, expected: Any) -> None:
    if isinstance(expected, str):
        assert found == expected
        return
    assert not isinstance(found, str), found
    elements = [each.decode("latin-1") if isinstance(each, bytes) else each for each in found.ravel().tolist()]
    assert list(found.shape) == expected[0]
    assert len(elements) == len(expected[1])
    assert all(map(_same, elements, expected[1])), (elements, expected[1])


def _outcome(make: Callable[[Any, Any], Any], value: Any, expected: Any) -> Any:
    try:
        return make(value, expected)
    except CastError as error:
        return str(error)


@pytest.mark.parametrize(("kind", "value", "results"), _cases("numpy_1_17.json"))
def test_f15_f16_arrays_equal_those_of_numpy_1_17(kind: str, value: Any, results: dict[str, Any]) -> None:
    for name, result in results.items():
        if not str(result).startswith("expected dtype"):  # decided before a cast: test_conversions_onnx.py
            _assert_is(_outcome(cast if kind == "a" else as_array, _value(kind, value), np.dtype(name)), result)


@pytest.mark.parametrize(("kind", "value", "results"), _cases("tensorflow_1_14.json"))
def test_f21_tensors_equal_those_of_tensorflow_1_14(kind: str, value: Any, results: dict[str, Any]) -> None:
    for word, result in results.items():
        _assert_is(_outcome(make_array, _value(kind, value), TENSOR_TYPES[word]), result)
