"""The signature and summary documents of an API, and the bodies of errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.server.cortex.pages import (
    encode_json,
    error_page,
    error_response,
    onnx_signature,
    signature_page,
    summary_page,
    tensorflow_signature,
)


@dataclass
class Node:
    """As onnxruntime describes an input."""

    name: str
    shape: list[Any]
    type: str


def test_the_signature_of_an_onnx_model_has_numpy_type_names() -> None:
    nodes = [
        Node("b", [None, 4], "tensor(float)"),
        Node("a", ["N", 2], "tensor(string)"),
        Node("c", [], "tensor(int64)"),
    ]

    assert signature_page(onnx_signature(nodes)) == (
        b'{"signature":{"a":{"shape":["N",2],"type":"object"},"b":{"shape":[null,4],"type":"float32"},'
        b'"c":{"shape":[],"type":"int64"}}}\n'
    )


@pytest.mark.parametrize(
    ("code", "name"), [("tensor(double)", "float64"), ("tensor(bool)", "bool"), ("seq(x)", "seq(x)")]
)
def test_onnx_types_without_a_numpy_name_are_not_translated(code: str, name: str) -> None:
    assert onnx_signature([Node("x", [1], code)])["x"]["type"] == name


def test_the_summary_has_instructions_and_the_model_signature() -> None:
    assert summary_page(onnx_signature([Node("input", [1, 4], "tensor(float)")])) == (
        b'{"message":"make a prediction by sending a post request to this endpoint with a json sample",'
        b'"model_signature":{"input":{"shape":[1,4],"type":"float32"}}}\n'
    )


def test_the_signature_of_a_tensorflow_model_is_the_selected_one() -> None:
    def tensor(dtype: str, shape: Any) -> dict[str, Any]:
        return {"name": "x:0", "dtype": dtype, "tensorShape": shape}

    inputs = {
        "b": tensor("DT_DOUBLE", {"dim": [{"size": "-1"}, {"size": "4"}]}),
        "a": tensor("DT_STRING", {}),
        "c": tensor("DT_HALF", {"unknownRank": True}),
        "d": tensor("DT_INT64", {"dim": [{}]}),
    }
    described = {"signature_def": {"predict": {"inputs": inputs}, "other": {}}, "signature_key": "predict"}

    assert tensorflow_signature(described) == {
        "a": {"shape": [], "type": "string"},
        "b": {"shape": [-1, 4], "type": "float64"},
        "c": {"shape": None, "type": "float16"},
        "d": {"shape": [0], "type": "int64"},
    }
    assert tensorflow_signature(described | {"signature_key": "other"}) == {}


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_documents_are_compact_ascii_with_sorted_keys(value: dict[str, Any]) -> None:
    text = encode_json(value)

    assert text.isascii()
    assert text.endswith(b"\n")
    assert list(json.loads(text).items()) == sorted(value.items())


def test_the_error_of_a_failed_prediction_is_plain_text() -> None:
    status, body, content_type = error_response(InferError(Code.INVALID, 'error: missing key "é"'))

    assert (status, content_type) == (406, b"text/html; charset=utf-8")
    assert body == 'prediction failed: error: missing key "é"'.encode()


@pytest.mark.parametrize("code", list(Code))
def test_every_error_code_has_a_status_and_a_body(code: Code) -> None:
    status, body, _ = error_response(InferError(code, "a\ud800"))

    passing = code in {Code.NOT_FOUND, Code.NOT_READY, Code.OVERLOADED, Code.EXPIRED}
    assert status == (500 if code is Code.UNKNOWN else 503 if passing else 406)
    assert body == (b'{"error":"a\\ud800"}\n' if code is Code.UNKNOWN else b"prediction failed: a?")


def test_an_error_page_is_json() -> None:
    assert error_page("é") == b'{"error":"\\u00e9"}\n'
