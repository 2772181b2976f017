"""Payloads are read as in seldon-core 1.17.1."""

# ruff: noqa: N803 - X is what seldon-core calls it

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.seldon.inside.payloads import datadef, loads, split_message
from penstock.server.seldon.messages import Endpoint

from .component_calls import ask, ask_service, inside


class Says:
    """Returns the types of its arguments."""

    def predict(self, X: Any, names: Any, meta: Any) -> Any:
        return [type(X).__name__, str(getattr(X, "dtype", X)), repr(names), repr(meta)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"data": {"ndarray": [[1, 2]]}}, ["ndarray", "int64", "[]", "None"]),
        ({"data": {"ndarray": [[1, 2.5]], "names": ["a"]}}, ["ndarray", "float64", "['a']", "None"]),
        ({"data": {"ndarray": [[True]], "names": None}}, ["ndarray", "bool", "None", "None"]),
        ({"data": {"ndarray": [["a", 1.5]]}}, ["ndarray", "<U32", "[]", "None"]),
        ({"data": {"ndarray": [[2**63]]}}, ["ndarray", "uint64", "[]", "None"]),
        ({"data": {"ndarray": [[2**64]]}}, ["ndarray", "object", "[]", "None"]),
        ({"data": {"ndarray": [[None]]}}, ["ndarray", "object", "[]", "None"]),
        ({"data": {"tensor": {"shape": [1, 1], "values": [5]}}}, ["ndarray", "int64", "[]", "None"]),
        ({"data": {}, "meta": {"puid": "p"}}, ["ndarray", "float64", "[]", "{'puid': 'p'}"]),
        ({"strData": "s", "binData": "MTIz"}, ["str", "s", "[]", "None"]),
        ({"binData": "!!!"}, ["bytes", "b''", "[]", "None"]),
        ({"jsonData": {"a": [1]}, "strData": "s"}, ["dict", "{'a': [1]}", "[]", "None"]),
        ({"jsonData": 5}, ["int", "5", "[]", "None"]),
    ],
    ids=["ints", "floats", "bools", "mixed", "uint64", "beyond", "null", "tensor", "empty", "text", "lenient", "json",
         "5"],
)  # fmt: skip
def test_each_payload_kind_reaches_predict_as_the_type_of_seldon_core(message: Any, expected: list[str]) -> None:
    answer = ask(Says(), message)
    assert answer.decoded["data"]["ndarray"] == expected


def test_the_data_field_takes_precedence_over_other_payload_fields() -> None:
    parts = split_message({"binData": "MTIz", "strData": "s", "jsonData": 1, "data": {"ndarray": [1]}})
    assert (parts[0].tolist(), parts[3]) == ([1], "data")


@pytest.mark.parametrize("kind", ["tensor", "ndarray"])
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.booleans(), min_size=2, max_size=2), min_size=1))
def test_arrays_are_read_back_as_they_were_written(kind: str, rows: Any) -> None:
    array = np.array(rows)
    message = {"data": json.loads(json.dumps(datadef(kind, array, ["a", "b"])))}
    features, meta, data, _ = split_message(message)
    np.testing.assert_array_equal(features, array)
    assert (features.dtype, meta, data["names"]) == (array.dtype, None, ["a", "b"])


def test_a_tftensor_is_read_without_tensorflow() -> None:
    array = np.array([[1.5, 2.0]])
    message = {"data": datadef("tftensor", array, [])}
    np.testing.assert_array_equal(split_message(message)[0], array)


class Everything:
    """Returns its input."""

    def predict(self, X: Any, names: Any) -> Any:
        return X

    def aggregate(self, Xs: Any, names: Any) -> Any:
        return Xs[0]

    def route(self, X: Any, names: Any) -> Any:
        return 0


_EVERYTHING = inside(Everything())
_leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_json = st.recursive(_leaf, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=3), each))
_names = st.sampled_from(("data", "jsonData", "strData", "binData", "meta", "seldonMessages"))
_inner = st.sampled_from(("ndarray", "tensor", "names", "values", "shape", "tags", "metrics", "puid", "requestPath"))
_near = st.dictionaries(_names, _json | st.dictionaries(_inner, _json | st.dictionaries(_inner, _json)))


@settings(max_examples=25)
@given(_json | _near | st.lists(_near))
def test_any_json_message_is_answered_with_json(message: Any) -> None:
    for endpoint in (Endpoint.PREDICT, Endpoint.TRANSFORM_INPUT, Endpoint.ROUTE, Endpoint.AGGREGATE, Endpoint.FEEDBACK):
        answer = ask_service(_EVERYTHING, message, endpoint)
        assert answer.status in {200, 400, 500}
        assert answer.body.endswith("\n")
        json.loads(answer.body)


@given(_json)
def test_json_is_read_as_pythons_json_module_reads_json(value: Any) -> None:
    body = json.dumps(value).encode()
    assert repr(loads(body)) == repr(json.loads(body))


@pytest.mark.parametrize(
    "body",
    [
        b"[123456789012345678901234567890]", b"[-9223372036854775809]", b"[0.1234567890123456789012345]", b"1e400",
        b"-0",
        b"[NaN, Infinity]", b'"\\ud800"', b'{"a": 1, "a": 2}', '"é"'.encode("utf-16"), b"\xef\xbb\xbf5",
        b"[1234567890123456789.0, 1234567890123456789]",
    ],
    ids=["large", "small", "long", "infinite", "minus 0", "words", "surrogate", "twice", "utf-16", "mark", "both"],
)  # fmt: skip
def test_json_that_orjson_reads_differently_is_read_as_pythons_json_module_reads_json(body: bytes) -> None:
    assert repr(loads(body)) == repr(json.loads(body))
