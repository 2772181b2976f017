from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.scheduling.request_checks import Shape, check_shapes, format_shape, make_request
from penstock.batching.shapes.padding import Padding
from penstock.batching.spec import ModelSpec, PaddedAxis
from tests.fakes import fake_model

PAIR = Signature(
    (TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, -1, 3), optional=True)),
    (TensorSpec("y", "FP32", (-1, 4)),),
    batched=True,
)
WHOLE = Signature((TensorSpec("a", "FP32", (2, -1)), TensorSpec("b", "FP32", (1,))), (), batched=False)


def refusal(signature: Signature, *shapes: Shape | None, max_rows: int = 8) -> str:
    with pytest.raises(InferError) as caught:
        check_shapes("m", signature, max_rows, shapes)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def test_rows_are_separated_from_the_rest_of_the_shape() -> None:
    assert check_shapes("m", PAIR, 8, [(2, 4), (2, 7, 3)]) == (2, ((4,), (7, 3)))


def test_an_absent_input_is_absent_in_the_key() -> None:
    assert check_shapes("m", PAIR, 8, [(2, 4), None]) == (2, ((4,), None))


def test_a_model_without_rows_has_whole_shapes_for_a_key() -> None:
    assert check_shapes("m", WHOLE, 1, [(2, 9), (1,)]) == (1, ((2, 9), (1,)))


def test_requests_without_rows_are_accepted() -> None:
    assert check_shapes("m", PAIR, 8, [(0, 4), (0, 0, 3)]) == (0, ((4,), (0, 3)))


def test_requests_of_up_to_the_maximum_batch_size_are_accepted() -> None:
    assert check_shapes("m", PAIR, 8, [(8, 4), None])[0] == 8
    assert refusal(PAIR, (9, 4), None) == "inference request batch-size must be <= 8 for 'm'"


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1)])
def test_a_mismatched_shape_is_reported_with_the_expected_one(shape: Shape) -> None:
    text = refusal(PAIR, shape, None)

    expected = (
        f"unexpected shape for input 'a' for model 'm'. Expected [-1,4], got {format_shape(shape)}. NOTE: Setting"
    )
    assert text.startswith(expected)


def test_only_the_error_of_a_batched_model_mentions_the_row_axis() -> None:
    expected = "unexpected shape for input 'a' for model 'm'. Expected [2,-1], got [3,1]. "
    assert refusal(WHOLE, (3, 1), (1,)) == expected


def test_a_shape_without_a_row_axis_is_refused() -> None:
    expected = "input 'a' has no shape but model requires batch dimension for 'm'"
    assert refusal(PAIR, (), None) == expected


def test_inputs_with_different_row_counts_are_rejected() -> None:
    assert refusal(PAIR, (2, 4), (3, 7, 3)) == "input 'b' batch size does not match other inputs for 'm'"


def test_shapes_in_errors_are_formatted_as_by_triton() -> None:
    assert format_shape((-1, 4)) == "[-1,4]"
    assert format_shape(()) == "[]"


DIMS = st.lists(st.integers(-1, 5), max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 6), max_size=5).map(tuple)


@settings(deadline=None, max_examples=50)
@given(DIMS, st.data())
def test_a_matching_shape_is_accepted_with_any_length_of_a_free_axis(dims: Shape, data: st.DataObject) -> None:
    signature = Signature((TensorSpec("x", "FP32", (-1, *dims)),), (), batched=True)
    tail = tuple(data.draw(st.integers(0, 6)) if dim == -1 else dim for dim in dims)
    rows = data.draw(st.integers(0, 8))

    assert check_shapes("m", signature, 8, [(rows, *tail)]) == (rows, (tail,))


@settings(deadline=None, max_examples=50)
@given(DIMS, SHAPES)
def test_a_mismatched_shape_is_always_rejected(dims: Shape, shape: Shape) -> None:
    signature = Signature((TensorSpec("x", "FP32", (-1, *dims)),), (), batched=True)
    expected = (-1, *dims)
    fits = len(shape) == len(expected) and all(w in {-1, s} for s, w in zip(shape, expected, strict=True))
    if fits:
        assert check_shapes("m", signature, 8, [shape]) == (shape[0], (shape[1:],))
    else:
        refusal(signature, shape)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.lists(st.integers(0, 8), min_size=2, max_size=2))
def test_requests_share_a_key_if_their_shapes_differ_only_in_rows(widths: list[int], rows: list[int]) -> None:
    keys = [check_shapes("m", PAIR, 8, [(n, 4), (n, width, 3)])[1] for n, width in zip(rows, widths, strict=True)]

    assert (keys[0] == keys[1]) == (widths[0] == widths[1])


def test_with_padding_the_key_has_the_padded_lengths_and_the_rows_sent() -> None:
    signature = Signature((TensorSpec("x", "FP32", (-1, -1, 3)),), (), batched=True)
    padded = (PaddedAxis("x", 0, buckets=(4, 8), outputs={}),)
    padding = Padding(ModelSpec("m", 1, Path("m"), padding=padded), signature)

    assert check_shapes("m", signature, 8, [(2, 5, 3)], padding) == (2, ((8, 3),))
    assert check_shapes("m", signature, 8, [(2, 9, 3)], padding) == (2, ((9, 3),))


def test_a_request_made_by_the_server_has_the_parameters_it_was_given() -> None:
    request = make_request(fake_model(), [np.zeros((1, 4), np.float32)], parameters={"lang": "en"})

    assert request.parameters == {"lang": "en"}
