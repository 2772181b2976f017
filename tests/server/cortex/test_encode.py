"""F26 and F27 and their cases: the answers of Cortex, byte for byte."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import json
import math
import sys
import uuid
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.backends.errors import Code, InferError
from penstock.server.cortex.encode import _to_json_type, to_json

Point = namedtuple("Point", "x y")  # noqa: PYI024 - what an untyped hook would write


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "x"


@dataclasses.dataclass
class Box:
    label: str
    score: Any


class Slots:
    __slots__ = ("x", "y")

    def __init__(self) -> None:
        self.x, self.y = 1, 2


class SlotsAndMore(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.z = 3


class Says:
    def __json_encode__(self) -> Any:
        return {"j": Colour.RED}


class Fails:
    def __json_encode__(self) -> Any:
        raise KeyError("a")


class Particular:
    def __new__(cls, _: Any) -> Any:
        return object.__new__(cls)


def _flask_json(value: Any) -> bytes:
    """Encode as Flask's jsonify did, without the newline."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_to_json_type).encode()


# each is the original's answer, except those of types that Python 3.6 did not have
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("iris-setosa", '"iris-setosa"'),
        (None, "null"),
        ((1, 2), "[1,2]"),
        ({1}, "[1]"),
        ({3, 1, 2}, "[1,2,3]"),
        (dt.date(2019, 1, 2), '"2019-01-02"'),
        (1 + 2j, "[1.0,2.0]"),
        (dt.datetime(2019, 1, 2, 3, 4, 5), '"2019-01-02T03:04:05"'),  # noqa: DTZ001 - naive, as hooks write them
        (dt.datetime(2019, 1, 2, 3, 4, 5, 6), '"2019-01-02T03:04:05.000006"'),  # noqa: DTZ001
        (dt.datetime(2019, 1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=2))), '"2019-01-02T03:00:00+02:00"'),
        (dt.time(1, 2, 3), '"01:02:03"'),
        (dt.timedelta(days=1, seconds=2.5), "86402.5"),
        (Colour.RED, '{"RED":"red"}'),
        (Colour.PAIR, '{"PAIR":[1,2]}'),
        (Level.HIGH, "3"),
        (Word.YES, '"x"'),
        (decimal.Decimal("1.10"), "1.1"),
        (decimal.Decimal("NaN"), "NaN"),
        (fractions.Fraction(1, 3), "0.3333333333333333"),
        (OrderedDict([("b", 1), ("a", 2)]), '{"a":2,"b":1}'),
        (defaultdict(int, b=1), '{"b":1}'),
        (Counter("aab"), '{"a":2,"b":1}'),
        (Box("b", [Colour.RED, np.float32(0.1)]), '{"label":"b","score":[{"RED":"red"},0.10000000149011612]}'),
        (Slots(), '{"x":1,"y":2}'),
        (SlotsAndMore(), '{"x":1,"y":2,"z":3}'),
        (Says(), '{"j":{"RED":"red"}}'),
        (SimpleNamespace(b=1, a=2), '{"a":2,"b":1}'),
        (UserDict(a=1), '{"data":{"a":1}}'),
        (ValueError("x"), "{}"),
        (Point(1, 2), "[1,2]"),
        (uuid.UUID(int=5), '{"int":5}'),
        (Path("/a/b"), '"/a/b"'),
        (np.complex64(1 + 2j), "[1.0,2.0]"),
        (np.float32(0.1), "0.10000000149011612"),
        (np.float16(0.1), "0.0999755859375"),
        (np.float64(0.1), "0.1"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.str_("s"), '"s"'),
        (np.datetime64("2020-01-02"), '"2020-01-02"'),
        (np.datetime64("2020-01-02", "ns"), "1577923200000000000"),
        (np.datetime64("NaT", "s"), "null"),
        (np.timedelta64(3, "D"), "259200.0"),
        (np.array([[1, 2], [3, 4]], np.float32), "[[1.0,2.0],[3.0,4.0]]"),
        (np.array(5), "5"),
        (np.zeros((0, 3)), "[]"),
        (np.array([{"a": 1}, None, "ñ"], object), '[{"a":1},null,"\\u00f1"]'),
        (np.array([1j]), "[[0.0,1.0]]"),
        (np.array([(1, 2.5)], dtype=[("a", int), ("b", float)]), "[[1,2.5]]"),
        (np.ma.array([1, 2], mask=[False, True]), "[1,null]"),
        ([math.nan, math.inf, -math.inf], "[NaN,Infinity,-Infinity]"),
        ([1.0, 1e-5, 1e16, 1e22, 0.0001], "[1.0,1e-05,1e+16,1e+22,0.0001]"),
        (10**30, "1000000000000000000000000000000"),
        ("ñ\u2028\U0001f600\x7f\x00\ud800", '"\\u00f1\\u2028\\ud83d\\ude00\\u007f\\u0000\\ud800"'),
        ('\\"/\n\r\t\b\f', '"\\\\\\"/\\n\\r\\t\\b\\f"'),
        ({2: 1, 10: 2, 1: 3}, '{"1":3,"2":1,"10":2}'),
        ({0.5: 1, 0.1: 2}, '{"0.1":2,"0.5":1}'),
        ({True: 1, 5: 2}, '{"true":1,"5":2}'),
        ({None: 1}, '{"null":1}'),
        ({np.float64(1): 2}, '{"1.0":2}'),
        ({np.str_("a"): 1}, '{"a":1}'),
        ({Level.HIGH: 1}, '{"3":1}'),
        ({"z": [{1: Colour.RED}], "a": (1, {2})}, '{"a":[1,[2]],"z":[{"1":{"RED":"red"}}]}'),
    ],
)
def test_f27_c23_every_type_is_encoded_as_cortex_encoded_it(value: Any, expected: str) -> None:
    assert to_json(value) == expected.encode() + b"\n"


def test_f26_keys_are_sorted_and_there_are_no_spaces() -> None:
    assert to_json({"b": [1, {"d": 1, "c": 2}], "a": "é"}) == b'{"a":"\\u00e9","b":[1,{"c":2,"d":1}]}\n'


def test_c7_c21_a_list_of_outputs_is_encoded_as_nested_lists() -> None:
    outputs = [np.array([0]), [{0: 0.5949878692626953, 1: 0.25, 10: 0.5, 2: 1.0}]]

    assert to_json(outputs) == b'[[0],[{"0":0.5949878692626953,"1":0.25,"2":1.0,"10":0.5}]]\n'
    assert to_json([np.array([[0.59498787]], np.float32)]) == b"[[[0.5949878692626953]]]\n"


def _text(value: Any) -> str:
    with pytest.raises(InferError) as error:
        to_json(value)
    assert error.value.code is Code.UNKNOWN
    return error.value.message


@pytest.mark.parametrize(
    "value",
    [
        b"abc", bytearray(b"a"), object(), frozenset([1]), deque([1]), range(3), iter([1]), {"a": 1}.values(), ...,
        MappingProxyType({}), dt.UTC, np.dtype("f4"), np.longdouble(1), len,
    ],
)  # fmt: skip
def test_c24_f27_the_type_of_a_value_that_cannot_be_encoded_is_in_the_error(value: Any) -> None:
    name = "float128" if isinstance(value, np.longdouble) else type(value).__name__

    assert _text({"a": [value]}).startswith("Object of type <class '")
    assert name in _text(value) or type(value).__name__ in _text(value)
    assert "could not be encoded" in _text(value)


def test_f27_numpy_bytes_are_rejected_as_bytes() -> None:
    assert "'bytes'" in _text(np.bytes_(b"s"))
    assert "'bytes'" in _text(np.array([b"a"]))


def test_f27_functions_and_classes_cannot_be_encoded() -> None:
    assert _text(lambda: 0).endswith("cannot be encoded because it appears to be a lambda or function.")
    assert "__new__ method cannot be called" in _text(Particular(1))
    assert "__new__ method cannot be called" in _text(Box)


@pytest.mark.parametrize("key", [np.int64(1), (1, 2), b"a", dt.date(2019, 1, 2), Colour.RED])
def test_f27_keys_other_than_strings_and_python_numbers_are_rejected(key: Any) -> None:
    assert _text({key: 2}) == "keys must be a string"


@pytest.mark.parametrize("value", [{"a": 1, 2: 3}, {None: 1, "a": 2}, [{"a": {"b": 1, 1: 2}}]])
def test_f27_keys_of_several_types_cannot_be_sorted(value: Any) -> None:
    assert "'<' not supported between instances of" in _text(value)


def test_circular_and_too_deeply_nested_values_are_rejected() -> None:
    ring: list[Any] = []
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]

    assert _text(ring) == "Circular reference detected"
    assert _text(deep) == "maximum recursion depth exceeded while encoding a JSON object"
    while deep:  # free it without recursion
        deep = deep[0]


def test_an_exception_of_json_encode_is_the_error() -> None:
    assert _text(Fails()) == "'a'"


class TestFrames:
    """pandas is not installed here; a stand-in has the attributes that are read."""

    @pytest.fixture(autouse=True)
    def pandas(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        class Series:
            index = SimpleNamespace(values=np.array([0, 1]))
            values = np.array([1.5, 2.5])

        class DataFrame:
            index = SimpleNamespace(values=np.array([0, 1]))
            columns = SimpleNamespace(values=np.array(["a"], object))
            iloc = type("Iloc", (), {"__getitem__": lambda self, at: Series()})()

        found = SimpleNamespace(Series=Series, DataFrame=DataFrame)
        monkeypatch.setitem(sys.modules, "pandas", found)
        return found

    def test_pandas_series_and_frames_are_encoded_as_dicts_of_columns(self, pandas: Any) -> None:
        assert to_json(pandas.Series()) == b'{"data":[1.5,2.5],"index":[0,1]}\n'
        assert to_json(pandas.DataFrame()) == b'{"a":[1.5,2.5],"index":[0,1]}\n'
        assert to_json([np.array([1j]), Slots()]) == b'[[[0.0,1.0]],{"x":1,"y":2}]\n'


_NUMBERS = st.floats() | st.sampled_from([0.0, -0.0, 1e16, 9999999999999998.0, 1e-4, 9.999e-05, 5e-324, 1e15])


class TestLongNumberLists:
    """The faster encoding for 65 numbers or more in one place."""

    @settings(max_examples=40)
    @given(
        st.sampled_from([np.float64, np.float32, np.float16]).flatmap(
            lambda kind: hnp.arrays(kind, st.sampled_from([(80,), (30, 3), (3,), (0,)]))
        )
    )
    def test_long_float_arrays_are_encoded_as_json_dumps_encodes_them(self, array: Any) -> None:
        for value in (array, array[::-1], [array, {"a": 1}], {"b": array, "a": [array]}, (array,)):
            assert to_json(value) == _flask_json(value) + b"\n"

    @settings(max_examples=40)
    @given(st.lists(_NUMBERS, min_size=1, max_size=4))
    def test_long_float_lists_are_encoded_as_json_dumps_encodes_them(self, numbers: list[float]) -> None:
        many = numbers * 80
        for value in (many, {"é": many, "a": "x"}, [many, None], [*many, None], {1: many, 0: 1}):
            assert to_json(value) == _flask_json(value) + b"\n"

    def test_long_arrays_of_other_types_are_encoded_as_json_dumps_encodes_them(self) -> None:
        for array in (np.arange(100), np.arange(100) > 5, np.arange(100) * 1j, np.array(["a"] * 100, object)):
            assert to_json([array]) == _flask_json([array]) + b"\n"

    def test_exponents_are_written_as_python_writes_them(self) -> None:
        assert to_json(np.array([1e-05, 1.5e-7, -2e300, 1e16, 0.0001] * 20)).startswith(
            b"[1e-05,1.5e-07,-2e+300,1e+16,0.0001,1e-05"
        )
        assert to_json(np.array([1e16, 1.0, -2e300] * 40)).startswith(b"[1e+16,1.0,-2e+300,1e+16")
        assert to_json(np.array([1e-05, 1.0, 0.0] * 40)).startswith(b"[1e-05,1.0,0.0,1e-05")


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.complex_numbers() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(_VALUES)
def test_f26_any_value_is_encoded_as_json_dumps_encodes_it(value: Any) -> None:
    assert to_json(value) == _flask_json(value) + b"\n"


def test_compiled_functions_are_not_instantiated_to_test_whether_they_can_be_encoded() -> None:
    # an empty instance of the type of numpy's functions crashes the process when it is freed
    with pytest.raises(InferError, match="cannot be encoded because it appears to be a lambda or function"):
        to_json(np.sum)


@pytest.mark.parametrize("value", [int, np.int32, Exception])
def test_a_class_is_rejected_like_an_instance_that_cannot_be_created(value: type) -> None:
    with pytest.raises(InferError, match="perhaps because it's __new__ method cannot be called"):
        to_json(value)
