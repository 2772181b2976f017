from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.hooks.convert import datatype_of, to_inputs, to_prediction, to_tensors


def _one(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 4), *, optional: bool = False) -> Signature:
    return Signature((TensorSpec("x", datatype, shape, optional),), (TensorSpec("y", datatype, shape),), batched=True)


def _two() -> Signature:
    inputs = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("c", "INT64", (-1, 1)))
    return Signature(inputs, (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "BYTES", (-1,))), batched=True)


def _refusal(value: Any, signature: Signature) -> str:
    with pytest.raises(InferError) as refused:
        to_inputs(value, signature)
    assert refused.value.code is Code.INVALID
    return refused.value.message


def _array(value: Any, signature: Signature) -> np.ndarray[Any, Any]:
    (array,) = to_inputs(value, signature)
    assert array is not None
    return array


class TestInputs:
    @pytest.mark.parametrize(
        "value",
        [
            [1, 2, 3, 4],
            (1, 2, 3, 4),
            [[1, 2, 3, 4]],
            [[1], [2], [3], [4]],
            ["1", "2", "3", "4"],
            np.array([1, 2, 3, 4]),
            np.array([1, 2, 3, 4], np.float64),
            np.array([[1, 2], [3, 4]], np.int8),
            [np.float32(1), np.int64(2), np.array(3), True + 3],
            {"x": [1, 2, 3, 4], "surplus": object()},
        ],
    )
    @pytest.mark.parametrize("shape", [(-1, 4), (1, 4)])
    def test_one_row_in_any_form_is_converted_to_one_row(self, value: Any, shape: tuple[int, ...]) -> None:
        array = _array(value, _one(shape=shape))

        assert array.dtype == np.float32
        assert array.tolist() == [[1, 2, 3, 4]]

    def test_an_array_of_the_rank_of_the_model_keeps_its_number_of_rows(self) -> None:
        assert _array([[1, 2, 3, 4], [5, 6, 7, 8]], _one()).shape == (2, 4)
        assert _array(np.zeros((0, 4)), _one()).shape == (0, 4)
        assert _array([1, 2, 3], _one(shape=(-1,))).shape == (3,)

    def test_free_axes_accept_any_length(self) -> None:
        free = _one("INT64", (-1, -1))

        assert _array([5, 6, 7], free).shape == (1, 3)
        assert _array([[5, 6, 7]], free).shape == (1, 3)
        assert _array(5, free).shape == (1, 1)
        assert _array(np.zeros((3, 8, 9)), _one(shape=(-1, 3, -1, -1))).shape == (1, 3, 8, 9)

    def test_an_array_that_fits_is_not_copied(self) -> None:
        source = np.zeros((2, 4), np.float32)

        assert _array(source, _one()) is source

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ([1, 2], "input 'x' takes FP32 [-1,4]: found an array of shape [2]"),
            (None, "input 'x' takes FP32 [-1,4]: found None"),
            ({"x": [1, 2]}, "input 'x' takes FP32 [-1,4]: found an array of shape [2]"),
            ({"inputs": [1, 2, 3, 4], "y": 1}, 'missing key "x", found "inputs", "y"'),
            ({}, 'missing key "x", found none'),
            ({"x": None}, "input 'x' takes FP32 [-1,4]: found None"),
            ("abcd", "input 'x' takes FP32 [-1,4]: could not convert string to float: 'abcd'"),
            (np.array(["1"] * 4), "input 'x' takes FP32 [-1,4]: expected dtype 'float32' but found '<U1'"),
            (np.ones(4, bool), "input 'x' takes FP32 [-1,4]: expected dtype 'float32' but found 'bool'"),
        ],
    )
    def test_the_error_states_what_is_expected_and_what_was_found(self, value: Any, text: str) -> None:
        assert _refusal(value, _one()) == text

    @pytest.mark.parametrize("shape", [(5, 4, 3), (1, 5, 4, 3), (4, 3, 5)])
    def test_an_array_with_its_axes_in_another_order_is_rejected(self, shape: tuple[int, ...]) -> None:
        """Reshaping an image from height x width x channels would give another image and a wrong answer."""
        found = ",".join(map(str, shape))

        assert _refusal(np.zeros(shape), _one(shape=(-1, 3, 5, 4))) == (
            f"input 'x' takes FP32 [-1,3,5,4]: found an array of shape [{found}], whose axes are in another order"
        )
        assert _array(np.zeros((3, 5, 4)), _one(shape=(-1, 3, 5, 4))).shape == (1, 3, 5, 4)

    def test_several_inputs_are_taken_from_a_dictionary_by_name(self) -> None:
        a, c = to_inputs({"c": 5, "a": [1, 2]}, _two())

        assert a is not None
        assert c is not None
        assert (a.tolist(), c.tolist()) == ([[1, 2]], [[5]])
        assert _refusal([1, 2], _two()) == 'expected sample to be a dictionary with keys "a", "c"'
        assert _refusal({"a": [1, 2]}, _two()) == 'missing key "c", found "a"'
        assert _refusal({"a": [1], "c": 1}, _two()).startswith("input 'a' takes FP32 [-1,2]: found")

    def test_an_optional_input_can_be_absent(self) -> None:
        assert to_inputs({}, _one(optional=True)) == [None]

    def test_a_model_without_inputs_accepts_any_sample(self) -> None:
        assert to_inputs("whatever", Signature((), ())) == []

    def test_numbers_are_cast_as_numpy_casts(self) -> None:
        assert _array([6.9] * 4, _one("INT32")).tolist() == [[6] * 4]
        assert _array([True, 0, 1, False], _one("BOOL")).tolist() == [[True, False, True, False]]
        assert _array(np.array([1e300] * 4), _one()).tolist() == [[np.inf] * 4]
        assert "out of bounds" in _refusal([300] * 4, _one("UINT8"))

    def test_the_mask_of_a_masked_array_is_ignored(self) -> None:
        masked = np.ma.array([[1, 2, 3, 4]], mask=[[False, True, False, False]], dtype=np.float32)

        assert type(_array(masked, _one())) is np.ndarray
        assert _array(masked, _one()).tobytes() == np.array([1, 2, 3, 4], np.float32).tobytes()

    @pytest.mark.parametrize("value", [[[1, 2], [3]], object(), {"y": 1}, "abcd", [{}] * 4, [[[[[]]]]]])
    def test_a_value_that_is_not_an_array_is_rejected(self, value: Any) -> None:
        assert _refusal({"x": value}, _one()).startswith("input 'x' takes FP32 [-1,4]: ")

    def test_text_is_encoded_as_bytes(self) -> None:
        assert _array(["a", "ñ"], _one("BYTES", (-1, 2))).tolist() == [[b"a", "ñ".encode()]]
        assert _array("abc", _one("BYTES", (-1,))).tolist() == [b"abc"]
        assert _array(np.array(["a", "b"]), _one("BYTES", (-1, 2))).tolist() == [[b"a", b"b"]]
        assert _array([b"\xff", "b"], _one("BYTES", (-1, 2))).tolist() == [[b"\xff", b"b"]]
        assert "expected a string but found int" in _refusal([1, 2], _one("BYTES", (-1, 2)))

    def test_numbers_are_rounded_to_bfloat16_bits(self) -> None:
        numbers = [1.0, -2.5, 3.14159, float("inf")]
        bits = _array(numbers, _one("BF16"))

        assert bits.tolist() == [[0x3F80, 0xC020, 0x4049, 0x7F80]]
        assert _array(bits, _one("BF16")) is bits
        assert _array([1.00390625, 1.01171875, float("nan"), 0], _one("BF16")).tolist() == [[0x3F80, 0x3F82, 0x7FC0, 0]]

    def test_an_input_that_is_not_a_tensor_is_rejected(self) -> None:
        assert "seq(tensor(float))" in _refusal([1], _one("seq(tensor(float))"))

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2),
            max_leaves=12,
        ),
        st.sampled_from(sorted(DATATYPES)),
        st.sampled_from([(-1,), (-1, 4), (1, 4), (-1, -1), (), (2, 2)]),
    )
    def test_any_value_is_converted_to_the_type_and_rank_of_the_input_or_rejected(
        self, value: Any, datatype: str, shape: tuple[int, ...]
    ) -> None:
        try:
            array = _array(value, _one(datatype, shape))
        except InferError:
            _refusal(value, _one(datatype, shape))
            return

        assert array.dtype == DATATYPES[datatype].dtype
        assert len(array.shape) == len(shape)
        assert all(expected_dim in {-1, dim} for dim, expected_dim in zip(array.shape, shape, strict=True))

    @given(
        hnp.arrays(
            st.sampled_from([np.float32, np.float64, np.int8, np.int64]), hnp.array_shapes(min_dims=2, max_dims=2)
        )
    )
    def test_any_matrix_fits_free_axes_unchanged(self, matrix: np.ndarray[Any, Any]) -> None:
        with np.errstate(all="ignore"):
            expected = matrix.astype(np.float32)

        assert np.array_equal(_array(matrix, _one(shape=(-1, -1))), expected, equal_nan=True)


class TestPrediction:
    def test_a_prediction_holds_the_outputs_themselves_in_the_order_of_the_model(self) -> None:
        array, maps = np.zeros((1, 3)), [{"a": 0.5}]
        signature = Signature(
            (), (TensorSpec("p", "FP64", (-1, 3)), TensorSpec("m", "seq(map(string,tensor(float)))", ()))
        )

        prediction = to_prediction([array, maps], signature)

        assert prediction[0] is array
        assert prediction[1] is maps

    def test_valid_utf8_is_decoded_and_an_output_with_other_bytes_stays_bytes(self) -> None:
        def values_of(*elements: bytes | str) -> Any:
            (output,) = to_prediction(
                [np.array([list(elements)], object)], Signature((), (TensorSpec("s", "BYTES", (-1, 2)),))
            )
            return output.tolist()

        assert values_of("ñ".encode(), "b") == [["ñ", "b"]]
        assert values_of(b"a", b"\xff") == [[b"a", b"\xff"]]

    def test_bfloat16_outputs_are_widened_to_float32(self) -> None:
        bits = np.array([[0x3F80, 0xC020]], np.uint16)

        (output,) = to_prediction([bits], Signature((), (TensorSpec("b", "BF16", (-1, 2)),)))

        assert output.dtype == np.float32
        assert output.tolist() == [[1.0, -2.5]]


class TestTensors:
    @pytest.mark.parametrize(
        ("result", "expected"),
        [
            ("iris", {"y": ("BYTES", [b"iris"])}),
            (b"raw", {"y": ("BYTES", [b"raw"])}),
            (7, {"y": ("FP32", [7.0])}),
            (np.int8(7), {"y": ("INT8", [7])}),
            (np.zeros((2, 1)), {"y": ("FP64", [[0.0], [0.0]])}),
            ([[1.5], ["a", "b"]], {"y": ("FP32", [1.5]), "z": ("BYTES", [b"a", b"b"])}),
            (([1.5],), {"y": ("FP32", [1.5])}),
            ({"label": "a", "score": 0.5}, {"label": ("BYTES", [b"a"]), "score": ("FP64", [0.5])}),
            ({"n": 3, "b": True, "l": [1, 2]}, {"n": ("INT64", [3]), "b": ("BOOL", [True]), "l": ("INT64", [1, 2])}),
            ({"y": [1, 2]}, {"y": ("FP32", [1.0, 2.0])}),
            ({"y": np.array([1.5])}, {"y": ("FP64", [1.5])}),
            ({"u": np.array(["a", "ñ"])}, {"u": ("BYTES", [b"a", "ñ".encode()])}),
            ({"u": ["ñ", b"\xff"]}, {"u": ("BYTES", ["ñ".encode(), b"\xff"])}),
            ({"h": np.array([1], ">f2")}, {"h": ("FP16", [1.0])}),
            ({}, {}),
        ],
    )
    def test_hook_results_are_converted_to_named_tensors(
        self, result: Any, expected: dict[str, tuple[str, list[Any]]]
    ) -> None:
        tensors = to_tensors(result, _two())

        assert {name: (datatype_of(array), array.tolist()) for name, array in tensors.items()} == expected

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            (None, "'y' as a NoneType, which is not a tensor"),
            ({"label": {"a": 1}}, "'label' as a dict, which is not a tensor"),
            ({"label": [[1], [2, 3]]}, "'label' as a list, which is not a tensor"),
            ({"label": ["a", 1, None]}, "'label' as a list, which is not a tensor"),
            ({3: 1}, "the key 3; output names must be strings"),
            ([1, 2, 3], "a list of 3, and the model has 2 outputs"),
            ({"c": 1j}, "'c' as an array of complex128, which has no datatype"),
            ({"big": 2**70}, "'big' as a int"),
        ],
    )
    def test_a_result_that_is_not_a_tensor_is_rejected_and_predict_is_suggested(self, result: Any, text: str) -> None:
        with pytest.raises(InferError, match="use predict instead") as refused:
            to_tensors(result, _two())

        assert refused.value.code is Code.INVALID
        assert text in refused.value.message
