"""F12 to F19 and their cases: the inputs of an ONNX model, and its outputs as a handler sees them."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.backends.errors import InferError
from penstock.server.cortex.onnx_values import TYPES
from penstock.server.hooks.conversions import Conversions
from tests.server.cortex.values import NONE, Dims, model_m, onnx, refused

FAILED = "failed to convert to numpy array"


def _array(rules: Conversions, value: Any) -> np.ndarray[Any, Any]:
    (array,) = rules.to_inputs(value, NONE)
    assert array is not None
    return array


class TestOneInput:
    @pytest.mark.parametrize("rows", [1, None, "N"])
    @pytest.mark.parametrize("batched", [False, True])
    @pytest.mark.parametrize(
        "value",
        [
            [5, 6, 7, 8],
            [[5, 6, 7, 8]],
            [[5], [6], [7], [8]],
            (5, 6, 7, 8),
            ["5", "6", "7", "8.0"],
            [True + 4, np.float32(6), np.int64(7), np.array(8)],
            np.array([5.0, 6, 7, 8]),
            np.array([5, 6, 7, 8]),
            np.array([[5, 6], [7, 8]], np.uint8),
            np.array([5, 6, 7, 8], ">f4"),
            np.array([5, 6, 7, 8 + 0j]),
            np.ma.array([5, 6, 7, 8]),
        ],
    )
    def test_c7_c12_f14_a_value_in_any_form_is_converted_to_one_row(self, value: Any, rows: Any, batched: bool) -> None:
        rules = model_m(rows, batched=batched)

        for wrapped in (value, {"input": value}, OrderedDict(input=value, surplus=object())):
            array = _array(rules, wrapped)
            assert array.dtype == np.dtype("<f4")
            assert array.tolist() == [[5, 6, 7, 8]]

    def test_f5_the_signature_is_the_runtimes_list(self) -> None:
        inputs, given_back = model_m("N").signatures

        assert [(node.name, node.type, node.shape) for node in inputs] == [("input", "tensor(float)", ["N", 4])]
        assert [node.name for node in given_back] == ["label", "probabilities"]

    @pytest.mark.parametrize("rows", [1, None, "N"])
    def test_f14_two_rows_are_rejected_even_if_the_row_axis_is_free(self, rows: Any) -> None:
        text = f"{FAILED}: cannot reshape array of size 8 into shape (1,4)"
        two = [[1, 2, 3, 4], [5, 6, 7, 8]]

        assert refused(model_m(rows, batched=True), two) == f'error: key "input": {text}'
        assert refused(model_m(rows), {"input": two}) == f"error: {text}"

    def test_c8_the_error_for_a_bare_value_of_the_wrong_size_names_its_key(self) -> None:
        text = f'error: key "input": {FAILED}: cannot reshape array of size 2 into shape (1,4)'

        assert refused(model_m(), [1, 2]) == text

    @pytest.mark.parametrize("value", [{"inputs": [1, 2, 3, 4]}, {"input": None}, {}])
    def test_c9_f12_a_missing_key_is_in_the_error(self, value: Any) -> None:
        assert refused(model_m(), value) == 'error: missing key "input"'

    def test_c10_null_is_rejected_for_its_size(self) -> None:
        text = f'error: key "input": {FAILED}: cannot reshape array of size 1 into shape (1,4)'

        assert refused(model_m(), None) == text

    def test_c13_f16_an_array_of_another_kind_is_rejected(self) -> None:
        found = [np.array(["1", "2", "3", "4"]), np.array([True] * 4), np.array([None] * 4), np.zeros(4, "M8[D]")]

        assert [refused(model_m(None), array) for array in found] == [
            f"error: key \"input\": {FAILED}: expected dtype 'float32' but found '{name}'"
            for name in ("<U1", "bool", "object", "datetime64[D]")
        ]
        assert refused(onnx([("x", "tensor(string)", [1])]), np.zeros(1)) == (
            f"error: key \"x\": {FAILED}: expected dtype 'object' but found 'float64'"
        )
        assert refused(onnx([("x", "tensor(bool)", [1])]), {"x": np.zeros(1, np.int8)}) == (
            f"error: {FAILED}: expected dtype 'bool' but found 'int8'"
        )

    def test_f15_list_elements_are_cast_as_numpy_casts(self) -> None:
        def one(kind: str, value: Any) -> Any:
            return _array(onnx([("x", f"tensor({kind})", [1])]), [value]).tolist()[0]

        assert [one("float", "5"), one("int32", 6.9), one("int32", "7"), one("uint8", 300)] == [5.0, 6, 7, 44]
        assert [one("bool", 0), one("bool", 2), one("bool", "False"), one("double", Decimal("1.5"))] == [
            False, True, True, 1.5,
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (["a"] * 4, "could not convert string to float: 'a'"),
            ([[1, 2], [3]], "setting an array element with a sequence."),
            ([{}] * 4, "float() argument must be a string or a number, not 'dict'"),
            ([1j] * 4, "can't convert complex to float"),
            ([10**400] * 4, "int too large to convert to float"),
            ("", "could not convert string to float: "),
        ],
    )
    def test_f18_cast_errors_have_the_wording_of_numpy_1_17(self, value: Any, text: str) -> None:
        assert refused(model_m(), value) == f'error: key "input": {FAILED}: {text}'

    def test_f18_the_error_for_a_dict_member_does_not_name_its_key(self) -> None:
        text = f"error: {FAILED}: could not convert string to float: 'a'"

        assert refused(model_m(), {"input": ["a"]}) == text

    @pytest.mark.parametrize("kind", ["tensor(bfloat16)", "seq(tensor(float))", "tensor(complex64)"])
    def test_f17_the_error_for_an_unsupported_input_type_is_the_bare_type(self, kind: str) -> None:
        rules = onnx([("x", kind, [1])])

        assert refused(rules, [1]) == refused(rules, {"x": [1]}) == f"'{kind}'"

    @pytest.mark.parametrize(("kind", "dtype"), [each for each in TYPES.items() if each[1] != "object"])
    def test_f17_every_supported_type_is_converted_to_its_numpy_dtype(self, kind: str, dtype: str) -> None:
        array = _array(onnx([("x", kind, [2])]), [1, 0])

        assert array.dtype == np.dtype(dtype)
        assert array.tolist() == [1, 0]

    def test_f14_a_free_axis_in_the_middle_has_length_one(self) -> None:
        rules = onnx([("x", "tensor(float)", ["N", 3, None, 2])])

        assert _array(rules, list(range(6))).shape == (1, 3, 1, 2)
        assert refused(rules, list(range(12))).endswith("cannot reshape array of size 12 into shape (1,3,1,2)")

    def test_a_scalar_input_is_given_one_axis_for_the_engine(self) -> None:
        rules = onnx([("x", "tensor(float)", [])])

        assert _array(rules, 5).tolist() == _array(rules, [[5]]).tolist() == [5.0]
        assert refused(rules, [1, 2]).endswith("cannot reshape array of size 2 into shape ()")

    def test_a_hook_that_modifies_a_signature_shape_does_not_affect_conversion(self) -> None:
        rules = model_m("N")
        rules.signatures[0][0].shape[0] = 2

        assert _array(rules, [1, 2, 3, 4]).shape == (1, 4)


class TestTextInputs:
    rules = onnx([("x", "tensor(string)", [2])])

    @pytest.mark.parametrize("value", [["x", "ñ"], ("x", "ñ"), np.array(["x", "ñ"]), np.array(["x", "ñ"], object)])
    def test_c19_strings_are_encoded_as_bytes_for_the_engine(self, value: Any) -> None:
        array = _array(self.rules, value)

        assert array.dtype == np.object_
        assert array.tolist() == [b"x", "ñ".encode()]

    def test_elements_that_are_not_strings_are_formatted_as_the_runtime_did(self) -> None:
        assert _array(self.rules, [5, None]).tolist() == [b"5", b"None"]
        assert _array(self.rules, [True, 1.5]).tolist() == [b"True", b"1.5"]
        assert _array(self.rules, np.array([True, False])).tolist() == [b"True", b"False"]
        assert _array(self.rules, [["a"], ["b", "c"]]).tolist() == [b"['a']", b"['b', 'c']"]

    def test_text_that_utf8_cannot_encode_fails_with_the_error_of_the_runtime(self) -> None:
        with pytest.raises(InferError, match=r"^Unable to extract string contents! \(encoding issue\)$"):
            self.rules.to_inputs(["\ud800", "x"], NONE)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("1\ud800", "character '\\ud800' in position 1: surrogates not allowed"),
            ("a\ud800\ud801b", "characters in position 1-2: surrogates not allowed"),
        ],
    )
    def test_text_that_utf8_cannot_encode_is_rejected_as_a_number(self, text: str, message: str) -> None:
        with pytest.raises(InferError) as caught:
            model_m("N").to_inputs({"input": [1, 2, 3, text]}, NONE)

        assert caught.value.message == f"error: failed to convert to numpy array: 'utf-8' codec can't encode {message}"

    def test_bytes_are_not_changed(self) -> None:
        assert _array(self.rules, np.array([b"\xff", b""], object)).tolist() == [b"\xff", b""]

    def test_c20_bools_are_converted_to_a_bool_array(self) -> None:
        assert _array(onnx([("x", "tensor(bool)", [2])]), [True, 0]).tolist() == [True, False]


class TestSeveralInputs:
    rules = onnx([("a", "tensor(float)", [1, 2]), ("c", "tensor(int64)", [1]), ("i", "tensor(string)", [1])])

    def test_f13_each_input_is_taken_by_name_in_the_order_of_the_model(self) -> None:
        found = self.rules.to_inputs({"i": "x", "surplus": 1, "c": 7, "a": (1, 2)}, NONE)

        assert [array.tolist() for array in found if array is not None] == [[[1.0, 2.0]], [7], [b"x"]]

    @pytest.mark.parametrize("value", [[1, 2], None, "a", 5, np.zeros(2)])
    def test_c17_a_sample_that_is_not_a_dict_is_rejected(self, value: Any) -> None:
        assert refused(self.rules, value) == 'error: expected sample to be a dictionary with keys "a", "c", "i"'

    def test_f13_the_first_missing_key_in_the_order_of_the_model_is_in_the_error(self) -> None:
        assert refused(self.rules, {"a": [1, 2], "i": "x", "c": None}) == 'error: missing key "c"'
        assert refused(self.rules, {"a": [1]}) == (
            f'error: key "a": {FAILED}: cannot reshape array of size 1 into shape (1,2)'
        )

    def test_a_model_without_inputs_accepts_any_sample(self) -> None:
        assert onnx([]).to_inputs(None, NONE) == onnx([]).to_inputs({"a": 1}, NONE) == []


class TestRelaxedShapes:
    def test_the_number_of_rows_follows_from_the_value(self) -> None:
        rules = model_m("N", batched=True, relaxed_shapes=True)

        assert _array(rules, [[1, 2, 3, 4], [5, 6, 7, 8]]).shape == (2, 4)
        assert _array(rules, [1, 2, 3, 4]).shape == (1, 4)
        assert _array(rules, list(range(12))).shape == (3, 4)
        assert refused(rules, [1, 2, 3]).endswith("cannot reshape array of size 3 into shape (4)")

    def test_several_free_axes_get_their_lengths_from_the_value(self) -> None:
        rules = onnx([("x", "tensor(int64)", ["batch", "length"])], relaxed_shapes=True)

        assert _array(rules, [[5, 6, 7], [8, 9, 10]]).shape == (2, 3)
        assert _array(rules, [5, 6, 7]).shape == (1, 3)
        assert _array(rules, 5).shape == (1, 1)

    def test_fixed_axes_stay_fixed(self) -> None:
        text = f'error: key "input": {FAILED}: cannot reshape array of size 8 into shape (1,4)'

        assert refused(model_m(1, relaxed_shapes=True), [[1, 2, 3, 4], [5, 6, 7, 8]]) == text


@settings(max_examples=50)
@given(
    hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.uint8]),
        hnp.array_shapes(max_dims=4, max_side=4),
        elements={"min_value": 0, "max_value": 100},
    ),
    st.lists(st.one_of(st.integers(1, 4), st.none(), st.just("N")), max_size=4),
)
def test_f14_any_array_is_reshaped_to_the_target_shape_or_rejected_for_its_size(array: Any, dims: Dims) -> None:
    rules = onnx([("x", "tensor(float)", dims)])
    target = [dim if isinstance(dim, int) else 1 for dim in dims]

    for value in (array, array.tolist()):
        if array.size == int(np.prod(target)):
            found = _array(rules, value)
            assert list(found.shape) == (target or [1])
            assert found.ravel().tolist() == array.astype(np.float32).ravel().tolist()
        else:
            assert f"cannot reshape array of size {array.size} into shape" in refused(rules, value)


class TestPrediction:
    def test_f19_the_prediction_is_the_list_of_all_outputs_in_order(self) -> None:
        label, probabilities = np.array([0]), np.array([[0.5, 0.25, 0.25]], np.float32)
        rules = model_m(batched=True)

        found = rules.to_prediction([label, probabilities], NONE)

        assert type(found) is list
        assert found[0] is label
        assert found[1] is probabilities

    def test_f19_c19_text_outputs_are_decoded_to_str(self) -> None:
        rules = onnx([], [("y", "tensor(string)", [2])])
        (found,) = rules.to_prediction([np.array([b"x", "ñ".encode()], object)], NONE)

        assert found.dtype == np.object_
        assert found.tolist() == ["x", "ñ"]
        assert rules.to_prediction([np.array([b"\xff", b"a"], object)], NONE)[0].tolist() == [b"\xff", "a"]

    def test_f19_c21_map_outputs_are_lists_of_dicts(self) -> None:
        maps = [{0: 0.5, 1: 0.25}]

        assert onnx([], [("y", "seq(map(int64,tensor(float)))", [])]).to_prediction([maps], NONE) == [maps]

    def test_a_scalar_output_loses_the_axis_that_the_engine_added(self) -> None:
        (found,) = onnx([], [("y", "tensor(float)", [])]).to_prediction([np.array([5], np.float32)], NONE)
        (row,) = onnx([], [("y", "tensor(float)", [1])]).to_prediction([np.array([5], np.float32)], NONE)
        (unknown,) = onnx([], [("y", "tensor(float)", [])]).to_prediction([np.zeros((2, 3), np.float32)], NONE)

        assert [found.shape, row.shape, unknown.shape] == [(), (1,), (2, 3)]
