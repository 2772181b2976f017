from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import uuid
from collections import OrderedDict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.server.hooks.encode import to_json

Point = namedtuple("Point", "x y")  # noqa: PYI024 - what an untyped hook would write


class Colour(enum.Enum):
    RED = "red"


class Metres(float):
    """A number of a class of its own."""


@dataclasses.dataclass
class Box:
    label: str
    score: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("iris-setosa", '"iris-setosa"'),
        (None, "null"),
        ((1, 2), "[1,2]"),
        ({1}, "[1]"),
        (dt.date(2019, 1, 2), '"2019-01-02"'),
        (dt.datetime(2019, 1, 2, 3, 4, 5), '"2019-01-02T03:04:05"'),  # noqa: DTZ001 - naive, as hooks write them
        (1 + 2j, "[1.0,2.0]"),
        (np.array([[1, 2], [3, 4]]), "[[1,2],[3,4]]"),
        (np.float32(0.1), "0.10000000149011612"),
        ([np.array([0.5], np.float32), np.array(["a", "ñ"], object)], '[[0.5],["a","ñ"]]'),
        ({"a": np.int64(1), "b": np.bool_(True), "c": np.str_("s")}, '{"a":1,"b":true,"c":"s"}'),
        (np.array([1j]), "[[0.0,1.0]]"),
        (np.datetime64("2020-01-02"), '"2020-01-02"'),
        ({0: 0.25, "1": 0.5}, '{"0":0.25,"1":0.5}'),
        ({np.int64(3): 1}, '{"3":1}'),
        ([Metres(1.5), Metres("nan")], "[1.5,NaN]"),
        ([math.nan, math.inf, -math.inf, None], "[NaN,Infinity,-Infinity,null]"),
        (np.array([np.nan, 1]), "[NaN,1.0]"),
        ({"a": {"b": float("nan")}, np.int8(1): (None,)}, '{"a":{"b":NaN},"1":[null]}'),
        (2**70, "1180591620717411303424"),
        ("\ud800", '"\\ud800"'),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
        (MappingProxyType({"a": 1}), '{"a":1}'),
        (deque([1]), "[1]"),
        (range(3), "[0,1,2]"),
        ({"a": 1}.values(), "[1]"),
        (Colour.RED, '"red"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Box("a", np.float64(0.5)), '{"label":"a","score":0.5}'),
        ({dt.date(2020, 1, 1): None, Colour.RED: None}, '{"2020-01-01":null,"red":null}'),
    ],
)
def test_values_that_hooks_return_are_encoded_as_json(value: Any, expected: str) -> None:
    assert to_json(value).decode() == expected


def _circle() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"abc", "bytes"),
        ([bytearray(b"abc")], "bytearray"),
        (object(), "object"),
        ({"a": [{"b": object()}]}, "object"),
        ({"a": None, "b": object()}, "object"),
        (np.array([b"x"], object), "bytes"),
        (np.longdouble(1), "longdouble"),
        ({(1, 2): 3}, "tuple"),
        (lambda: 0, "function"),
        (_circle(), "nested too deep"),
    ],
)
def test_the_type_of_a_value_that_json_cannot_represent_is_in_the_error(value: Any, named: str) -> None:
    with pytest.raises(InferError, match=named) as failed:
        to_json(value)

    assert failed.value.code is Code.INTERNAL


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_plain_values_survive_a_json_round_trip(value: Any) -> None:
    back = json.loads(to_json(value))

    assert repr(back) == repr(value)
