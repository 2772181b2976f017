"""Rows put together to requests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.payloads.batches import alone, check_batch, in_order
from penstock.perf.payloads.inputs import Row
from penstock.perf.payloads.tensors import InputError, InputTensor, Step, Values
from penstock.perf.profiling.model import UNKNOWN_BATCH_SIZE, ModelDescription, Tensor
from tests.perf.payloads.strategies import model_of

X = Tensor("x", "UINT8", (-1,))
MAYBE = Tensor("maybe", "UINT8", (1,), optional=True)
SHAPE = Tensor("shape", "UINT8", (1,), shape_tensor=True)


def rows(*contents: bytes, name: str = "x") -> tuple[Row, ...]:
    return tuple({name: Values((len(each),), each)} for each in contents)


def sent(step: Step) -> list[int]:
    return list(step[0].raw)


def test_batches_take_consecutive_rows_and_wrap_around() -> None:
    requests = alone(model_of(X), rows(b"\1", b"\2", b"\3", b"\4"), 3)

    assert list(map(sent, requests)) == [[1, 2, 3], [4, 1, 2], [3, 4, 1], [2, 3, 4]]
    assert requests[0][0].shape == (3, 1)


@given(st.integers(1, 12), st.integers(1, 12))
def test_all_requests_together_contain_each_row_equally_often(count: int, batch: int) -> None:
    requests = alone(model_of(X), rows(*(bytes([n]) for n in range(count))), batch)

    flat = [number for step in requests for number in sent(step)]
    assert flat == [n % count for n in range(math.lcm(count, batch))]


def test_requests_of_a_sequence_begin_with_each_row() -> None:
    requests = in_order(model_of(X), rows(b"\1", b"\2", b"\3"), 2)

    assert list(map(sent, requests)) == [[1, 2], [2, 3], [3, 1]]


def test_requests_to_a_model_without_rows_have_none() -> None:
    (step,) = alone(model_of(X, rows=0), rows(b"\1\2"), 1)

    assert step == (InputTensor("x", "UINT8", (2,), b"\1\2"),)


def test_steps_of_different_shapes_do_not_share_a_batch() -> None:
    mixed = rows(b"\1", b"\1\2")

    assert [step[0].shape for step in alone(model_of(X), mixed, 1)] == [(1, 1), (1, 2)]
    with pytest.raises(InputError, match=r"^-b 2: input 'x' has steps of the shapes \[1\] and \[2\]"):
        alone(model_of(X), mixed, 2)


def test_a_shape_tensor_has_one_value_per_batch_and_no_rows() -> None:
    same, differing = rows(b"\1", b"\1", name="shape"), rows(b"\1", b"\2", name="shape")

    assert alone(model_of(SHAPE), same, 2) == ((InputTensor("shape", "UINT8", (1,), b"\1"),),)
    with pytest.raises(InputError, match=r"^-b 2: input 'shape' is a shape tensor"):
        alone(model_of(SHAPE), differing, 2)


def test_an_optional_input_must_be_in_all_steps_of_a_batch_or_in_none() -> None:
    model = model_of(X, MAYBE)
    without, having = rows(b"\1")[0], {**rows(b"\1")[0], "maybe": Values((1,), b"\7")}

    assert [len(step) for step in alone(model, (without, having), 1)] == [1, 2]
    with pytest.raises(InputError, match=r"^-b 2: optional input 'maybe'"):
        alone(model, (without, having), 2)


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (model_of(X), 0, "one row at least"),
        (model_of(X, rows=0), 2, "does not batch"),
        (model_of(X, rows=8), 9, "8 rows at most"),
    ],
)
def test_a_batch_above_the_limit_of_the_model_is_rejected(model: ModelDescription, batch: int, text: str) -> None:
    with pytest.raises(InputError, match=f"^-b {batch}: .*{text}"):
        check_batch(model, batch)


@pytest.mark.parametrize(("most", "batch"), [(0, 1), (8, 8), (UNKNOWN_BATCH_SIZE, 1000)])
def test_a_batch_within_the_limit_of_the_model_is_accepted(most: int, batch: int) -> None:
    check_batch(model_of(X, rows=most), batch)
