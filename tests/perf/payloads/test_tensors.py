"""Tensors made at random, of zeros, of text and of JSON."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.datatypes import DATATYPES
from penstock.perf.payloads.tensors import (
    LETTERS,
    InputError,
    InputTensor,
    Values,
    check_size,
    elements_of,
    of_base64,
    of_json,
    random,
    serialized,
    strings,
    to_json,
    zeros,
)
from penstock.perf.profiling.model import Tensor
from tests.perf.payloads.strategies import SHAPES
from tests.server.v2.documents import elements

NUMBERS = [name for name in DATATYPES if name != "BYTES"]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def array_of(name: str, raw: bytes) -> Any:
    if name == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, DATATYPES[name].dtype)


@given(st.sampled_from(NUMBERS), SHAPES, st.integers(0, 2**32))
def test_random_numbers_fill_their_shape_and_are_determined_by_the_seed(name: str, shape: Any, seed: int) -> None:
    tensor = Tensor("x", name, shape)
    values = random(tensor, rng(seed))

    check_size(tensor, values, "")
    assert values == random(tensor, rng(seed))
    assert values.shape == shape


@pytest.mark.parametrize("name", ["FP16", "BF16", "FP32", "FP64"])
def test_random_floats_are_below_one_and_finite(name: str) -> None:
    values = array_of(name, random(Tensor("x", name, (5000,)), rng()).raw)

    assert values.min() >= 0
    assert values.max() <= 1
    assert 0.4 < float(values.astype(np.float64).mean()) < 0.6


def test_random_whole_numbers_cover_their_range_and_bools_are_zero_or_one() -> None:
    small = array_of("INT8", random(Tensor("x", "INT8", (5000,)), rng()).raw)
    flags = np.frombuffer(random(Tensor("x", "BOOL", (100,)), rng()).raw, np.uint8)

    assert (small.min(), small.max()) == (-128, 127)
    assert set(flags.tolist()) == {0, 1}


def test_zeros_are_zeros() -> None:
    assert zeros(Tensor("x", "INT64", (2, 3))) == Values((2, 3), bytes(48))


def test_strings_are_random_or_as_specified() -> None:
    tensor = Tensor("x", "BYTES", (2, 2))
    drawn = elements_of(strings(tensor, rng(), 9, None).raw, "")

    assert [len(each) for each in drawn] == [9] * 4
    assert len(set(drawn)) == 4
    assert set(b"".join(drawn).decode()) <= set(LETTERS)
    assert elements_of(strings(tensor, rng(), 9, "né").raw, "") == ["né".encode()] * 4
    assert elements_of(strings(tensor, rng(), 0, None).raw, "") == [b""] * 4


@given(st.lists(st.binary(max_size=5), max_size=5))
def test_strings_are_parsed_as_they_were_serialized(words: list[bytes]) -> None:
    assert elements_of(serialized(words), "") == words


@pytest.mark.parametrize("raw", [b"\1", b"\5\0\0\0abc"])
def test_truncated_strings_are_rejected(raw: bytes) -> None:
    with pytest.raises(InputError, match=r"^here: .*cut off"):
        elements_of(raw, "here")


@settings(max_examples=50)
@given(st.data(), st.sampled_from([name for name in DATATYPES if name != "BF16"]))
def test_json_values_become_their_bytes(data: st.DataObject, name: str) -> None:
    values = data.draw(st.lists(elements(name, finite=True), max_size=5))
    json_values = [value.decode() for value in values] if name == "BYTES" else values
    raw = of_json(Tensor("x", name, (-1,)), json_values, "")

    again = elements_of(raw, "") if name == "BYTES" else array_of(name, raw).tolist()
    assert again == values


@settings(max_examples=50)
@given(st.data(), st.sampled_from([name for name in DATATYPES if name not in ("FP16", "BF16")]))
def test_written_json_parses_back_to_the_same_bytes(data: st.DataObject, name: str) -> None:
    values = data.draw(st.lists(elements(name, finite=True), max_size=5))
    json_values = [value.decode() for value in values] if name == "BYTES" else values
    tensor = Tensor("x", name, (-1,))
    raw = of_json(tensor, json_values, "")

    assert of_json(tensor, json.loads(to_json(InputTensor("x", name, (len(values),), raw))), "") == raw


def test_bf16_is_the_upper_half_of_a_float() -> None:
    assert of_json(Tensor("x", "BF16", (2,)), [1, -2.5], "") == b"\x80\x3f\x20\xc0"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FP32", "1"), ("FP32", None), ("FP32", [1.0]), ("FP32", True), ("INT8", 1.0), ("INT8", 128), ("UINT8", -1),
        ("INT64", 2**63), ("BOOL", 1), ("BYTES", 1), ("FP64", 10**400), ("BYTES", "\ud800"), ("BF16", "x"),
    ],
)  # fmt: skip
def test_json_values_of_a_wrong_type_are_rejected_with_their_position(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=r"^here: "):
        of_json(Tensor("x", name, (1,)), [value], "here")


def test_a_float_too_large_for_its_type_becomes_infinite() -> None:
    assert math.isinf(array_of("FP16", of_json(Tensor("x", "FP16", (1,)), [1e9], ""))[0])


@given(st.binary(max_size=30))
def test_base64_is_decoded_and_may_contain_blanks(raw: bytes) -> None:
    text = base64.b64encode(raw).decode()

    assert of_base64(text[:5] + "\n " + text[5:], "") == raw


@pytest.mark.parametrize("text", ["a", "====", "ä", 7, None])
def test_invalid_base64_is_rejected(text: Any) -> None:
    with pytest.raises(InputError, match=r"^here: its b64"):
        of_base64(text, "here")


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [("INT16", b"\0" * 5, "it has 5 bytes, expected 6"), ("BYTES", b"\0" * 8, "it has 2 strings, expected 3")],
)
def test_bytes_of_a_wrong_length_are_rejected(name: str, raw: bytes, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_size(Tensor("x", name, (3,)), Values((3,), raw), "here")


def test_an_unknown_datatype_is_rejected() -> None:
    with pytest.raises(InputError, match="'x' is of datatype FP8"):
        zeros(Tensor("x", "FP8", (1,)))
