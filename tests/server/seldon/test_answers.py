"""Results of components are written as Flask writes them, byte for byte."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import gc
import json
import uuid
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.seldon.inside.answers import JsonWriter
from penstock.server.seldon.inside.component import Component

from .component_calls import Answer, ask, failed


class Returns:
    def __init__(self, result: Any) -> None:
        self.result = result

    def predict(self, X: Any, names: Any) -> Any:
        return self.result


def returned(result: Any, *, kind: str = "ndarray", strict: bool = True) -> Answer:
    data = {"ndarray": [[1]], "tensor": {"values": [1], "shape": [1]}}
    return ask(Returns(result), {"data": {kind: data[kind]}}, strict=strict)


@pytest.mark.parametrize(
    ("result", "body"),
    [
        (np.array([[0.1]], np.float32), '{"data":{"names":["t:0"],"ndarray":[[0.10000000149011612]]},"meta":{}}'),
        (np.array([[float("nan"), float("-inf")]]),
         '{"data":{"names":["t:0","t:1"],"ndarray":[[NaN,-Infinity]]},"meta":{}}'),
        (np.array([[1e22, 1e-7, -0.0]]),
         '{"data":{"names":["t:0","t:1","t:2"],"ndarray":[[1e+22,1e-07,-0.0]]},"meta":{}}'),
        (np.zeros((1, 2, 2)), '{"data":{"names":["t:0","t:1"],"ndarray":[[[0.0,0.0],[0.0,0.0]]]},"meta":{}}'),
        (np.array(5), '{"data":{"names":[],"ndarray":5},"meta":{}}'),
        ([1, 2.5], '{"data":{"names":[],"ndarray":[1,2.5]},"meta":{}}'),
        ([[2**70, 1]], '{"data":{"names":["t:0","t:1"],"ndarray":[[1180591620717411303424,1]]},"meta":{}}'),
        ([{"b": 1, "a": 2}], '{"data":{"names":[],"ndarray":[{"a":2,"b":1}]},"meta":{}}'),
        ("é\ud83d", '{"meta":{},"strData":"\\u00e9\\ud83d"}'),
        (bytearray(b"\x00\xff"), '{"binData":"AP8=","meta":{}}'),
        ({"b": 1, "a": {"z": None, "y": [True]}}, '{"jsonData":{"a":{"y":[true],"z":null},"b":1},"meta":{}}'),
        ({"d": dt.date(2020, 1, 2), "t": dt.datetime(2020, 1, 2, 3, 4, 5)},  # noqa: DTZ001
         '{"jsonData":{"d":"Thu, 02 Jan 2020 00:00:00 GMT","t":"Thu, 02 Jan 2020 03:04:05 GMT"},"meta":{}}'),
        ({"d": decimal.Decimal("1.50"), "u": uuid.UUID(int=5)},
         '{"jsonData":{"d":"1.50","u":"00000000-0000-0000-0000-000000000005"},"meta":{}}'),
    ],
    ids=["float32", "not numbers", "floats", "three axes", "no axis", "a list", "large", "dicts", "text", "bytes",
         "a dict", "dates", "others"],
)  # fmt: skip
def test_results_are_written_byte_for_byte_as_flask_writes_them(result: Any, body: str) -> None:
    assert returned(result)[:2] == (200, body + "\n")


def test_only_numeric_results_are_returned_as_a_tensor() -> None:
    numbers = '{"data":{"names":["t:0","t:1"],"tensor":{"shape":[1,2],"values":[1,2]}},"meta":{}}\n'
    assert returned(np.array([[1, 2]]), kind="tensor").body == numbers
    truths = '{"data":{"names":["t:0"],"ndarray":[[true]]},"meta":{}}\n'
    assert returned([[True]], kind="tensor").body == truths


@pytest.mark.parametrize("result", [1.5, 1, None, (1, 2), {1}], ids=["float", "int", "None", "tuple", "set"])
def test_unsupported_result_types_are_rejected_with_the_result_in_the_error(result: Any) -> None:
    text = f"Unknown data type returned as payload (must be list or np array):{result}"
    assert returned(result)[:2] == (400, failed(text, "MICROSERVICE_BAD_DATA"))


@dataclasses.dataclass
class _Point:
    x: int = 1


class Frame:
    """The parts of pandas' DataFrame that Penstock uses."""

    columns = ("a", "b")

    def to_numpy(self) -> Any:
        return np.array([[1, 2]])

    def to_dict(self, orient: str) -> Any:
        assert orient == "records"
        return [{"a": np.int64(1), "b": 2}]


LENIENT = [
    ({"b": np.float32(1.5), "a": [np.arange(2)]}, '{"jsonData":{"a":[[0,1]],"b":1.5},"meta":{}}'),
    ({np.int64(3): np.True_}, '{"jsonData":{"3":true},"meta":{}}'),
    ([[np.float64(0.1)]], '{"data":{"names":["t:0"],"ndarray":[[0.1]]},"meta":{}}'),
    ([[np.int64(1)]], '{"data":{"names":["t:0"],"ndarray":[[1]]},"meta":{}}'),
    (np.float64(2.5), '{"data":{"names":[],"ndarray":2.5},"meta":{}}'),
    (Frame(), '{"data":{"names":["a","b"],"ndarray":[[1,2]]},"meta":{}}'),
    ({"frame": Frame()}, '{"jsonData":{"frame":[{"a":1,"b":2}]},"meta":{}}'),
]


@pytest.mark.parametrize(
    ("result", "body"), LENIENT, ids=["in a dict", "keys", "floats", "ints", "scalar", "frame", "frames"]
)
def test_numpy_and_pandas_values_are_written_when_strict_is_off(result: Any, body: str) -> None:
    assert returned(result, strict=False).body == body + "\n"


def test_a_numpy_value_in_a_dict_fails_when_strict_is_on() -> None:
    assert returned({"a": np.float32(1)}).body == failed("Object of type float32 is not JSON serializable")


def test_a_dataclass_is_written_as_an_object_of_its_fields() -> None:
    assert JsonWriter({}).write({"p": _Point()}) == b'{"p":{"x":1}}\n'


@pytest.mark.parametrize(
    ("environ", "body"),
    [
        ({}, '{"a":"\\u00e9","b":1}\n'),
        ({"FLASK_DEBUG": "1"}, '{\n  "a": "\\u00e9",\n  "b": 1\n}\n'),
        ({"FLASK_DEBUG": "yes"}, '{"a":"\\u00e9","b":1}\n'),
        ({"FLASK_DEBUG": "1", "FLASK_JSONIFY_PRETTYPRINT_REGULAR": "0"}, '{"a":"\\u00e9","b":1}\n'),
        ({"FLASK_ENV": "development"}, '{\n  "a": "\\u00e9",\n  "b": 1\n}\n'),
        ({"FLASK_JSON_SORT_KEYS": "false"}, '{"b":1,"a":"\\u00e9"}\n'),
        ({"FLASK_JSON_AS_ASCII": "0"}, '{"a":"é","b":1}\n'),
    ],
    ids=["nothing", "debug", "no debug", "plain", "development", "unsorted", "unicode"],
)
def test_flask_environment_variables_set_the_json_format(environ: dict[str, str], body: str) -> None:
    assert JsonWriter(environ).write({"b": 1, "a": "é"}) == body.encode()


_leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_values = st.recursive(_leaf, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each))


@given(_values)
def test_json_values_are_written_as_json_dumps_writes_them(value: Any) -> None:
    expected = json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"
    assert JsonWriter({}).write(value) == expected.encode()
    names = Component(Returns(None)).class_names(np.zeros((1, 1)))
    message = {"data": {"names": names, "ndarray": [[value]]}, "meta": {}}
    written = json.dumps(message, sort_keys=True, separators=(",", ":")) + "\n"
    assert JsonWriter({}).write(message) == written.encode()


@given(st.lists(st.lists(st.floats(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_float_arrays_are_written_as_json_dumps_writes_them(rows: Any) -> None:
    body = returned(np.array(rows)).body
    assert body == json.dumps(
        {"data": {"names": ["t:0", "t:1", "t:2"], "ndarray": rows}, "meta": {}}, separators=(",", ":")
    ) + "\n"  # fmt: skip


_floats = st.floats() | st.floats(1e-6, 1e-3) | st.floats(1e14, 1e18) | st.integers(-(2**70), 2**70) | st.booleans()


@given(st.lists(_floats | st.floats(-100, 100), min_size=64, max_size=90), st.sampled_from(("ndarray", "tensor")))
def test_long_arrays_are_written_as_json_dumps_writes_them(numbers: Any, kind: str) -> None:
    for rows in (numbers, [numbers], [[each] for each in numbers]):
        data = {"names": ["é"], kind: rows if kind == "ndarray" else {"values": rows, "shape": (1, len(numbers))}}
        message = {"data": data, "meta": {"tags": {"b": 1, "a": numbers[:1]}}}
        expected = json.dumps(message, sort_keys=True, separators=(",", ":")) + "\n"
        assert JsonWriter({}).write(message) == expected.encode()


@pytest.mark.parametrize("number", [9.9e-05, 0.0001, 9999999999999998.0, 1e16, -9.9e-05, -1e16], ids=str)
def test_long_arrays_of_one_repeated_number_are_written_as_json_dumps_writes_them(number: float) -> None:
    message = {"data": {"names": [], "ndarray": [number] * 64}, "meta": {}}
    assert JsonWriter({}).write(message) == (json.dumps(message, separators=(",", ":")) + "\n").encode()


def test_the_writer_keeps_no_reference_to_a_value_that_failed_to_serialize() -> None:
    class Unwritable:
        pass

    writer, value = JsonWriter({}), Unwritable()
    value_ref = weakref.ref(value)
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.write({"data": {"names": [[value]], "ndarray": []}, "meta": {}})
    del value
    gc.collect()
    assert value_ref() is None
    assert writer.write({"a": 1}) == b'{"a":1}\n'


@pytest.mark.parametrize(
    "message",
    [
        {"data": {"names": []}, "meta": {}}, {"data": {"names": [], "ndarray": [], "x": 1}, "meta": {}},
        {"data": {"names": [], "tensor": [1]}, "meta": {}},
        {"data": {"names": [], "tensor": {"shape": []}}, "meta": {}},
        {"data": {"names": [], "tensor": {"shape": [], "values": [], "x": 1}}, "meta": {}},
        {"data": {"names": None, "other": 1}, "meta": {}}, {"data": {"names": {}, "ndarray": None}, "meta": None},
        {"data": [], "meta": {}}, {"data": {"names": 1, "ndarray": 2}, "other": {}},
        {"data": {"names": 1, "ndarray": 2}},
        {"data": {"names": 5, "ndarray": {"b": 1, "a": 2}}, "meta": [1]},
        {"data": {"names": [], "ndarray": [[1] * 70, [1]]}, "meta": 0},
    ],
    ids=range(12),
)  # fmt: skip
def test_messages_that_resemble_array_messages_are_written_in_full(message: Any) -> None:
    expected = json.dumps(message, sort_keys=True, separators=(",", ":")) + "\n"
    assert JsonWriter({}).write(message) == expected.encode()


def test_a_message_is_written_after_it_failed_to_serialize_and_was_corrected() -> None:
    writer = JsonWriter({})
    names = Component(Returns(None)).class_names(np.zeros((1, 1)))
    rows: Any = [[object()]]
    for _ in range(2):
        with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
            writer.write({"data": {"names": names, "ndarray": rows}, "meta": {}})
    rows[0][0] = 1
    assert writer.write({"data": {"names": names, "ndarray": rows}, "meta": {}}).startswith(b'{"data":{"names":["t:0"]')
