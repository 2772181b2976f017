"""F20 to F22 and their cases: the inputs of a TensorFlow model, and its outputs as a flat prediction."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.cortex.conversions import conversions
from penstock.server.hooks.conversions import Conversions, ModelDescription
from tests.server.cortex.values import NONE, flowers, refused, settings, tensorflow

S = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}


def _one(kind: str, dims: list[int], value: Any, batched: bool = False) -> np.ndarray[Any, Any]:
    (array,) = tensorflow({"x": (kind, dims)}, None, batched).to_inputs({"x": value}, NONE)
    assert array is not None
    return array


class TestInputs:
    def test_f6_both_hooks_get_the_whole_signature_map(self) -> None:
        pre, post = flowers().signatures

        assert pre is post
        assert type(pre) is dict
        assert list(pre) == ["predict", "other"]
        assert pre["predict"]["inputs"]["sepal_width"] == {
            "name": "sepal_width:0", "dtype": "DT_DOUBLE", "tensorShape": {"dim": [{"size": "-1"}]},
        }  # fmt: skip

    def test_f6_a_hook_that_modifies_its_signature_does_not_affect_other_replicas(self) -> None:
        signature = Signature((TensorSpec("x", "FP32", (-1,)),), ())
        shared = {"signature_def": {"k": {"inputs": {"x": {"dtype": "DT_FLOAT"}}}}, "signature_key": "k"}
        first, other = (conversions(ModelDescription(signature, [], [], shared, settings("tensorflow"))) for _ in "ab")

        first.signatures[0]["k"]["inputs"].clear()

        assert first.signatures[1] == {"k": {"inputs": {}}}
        assert other.signatures[0] == {"k": {"inputs": {"x": {"dtype": "DT_FLOAT"}}}}
        assert first.to_inputs({"x": [1]}, NONE)[0] == [1.0]

    @pytest.mark.parametrize("batched", [True, False])
    def test_c25_f21_scalars_are_converted_to_one_row(self, batched: bool) -> None:
        found = flowers(batched).to_inputs(S, NONE)

        assert [array.tolist() for array in found if array is not None] == [[5.2], [3.6], [1.4], [0.3]]
        assert all(array is not None and array.dtype == np.float64 for array in found)

    def test_inputs_are_returned_in_the_order_of_the_model(self) -> None:
        found = flowers().to_inputs(OrderedDict(reversed(S.items())), NONE)

        assert [float(array[0]) for array in found if array is not None] == [5.2, 3.6, 1.4, 0.3]
        assert flowers().to_inputs(MappingProxyType(S), NONE)[0] == 5.2

    def test_f21_a_value_of_the_rank_of_the_input_keeps_its_number_of_rows(self) -> None:
        found = flowers().to_inputs({name: [value, value] for name, value in S.items()}, NONE)

        assert [array.shape for array in found if array is not None] == [(2,)] * 4

    def test_f21_inputs_with_different_numbers_of_rows_are_rejected(self) -> None:
        text = 'error: key "sepal_width": expected shape [-1]: got 2 rows where key "sepal_length" has 1'

        assert refused(flowers(), S | {"sepal_width": [1.0, 2.0]}) == text

    def test_c28_f20_a_missing_key_is_in_the_error(self) -> None:
        assert refused(flowers(), {"sepal_length": [5.2]}) == 'error: missing key "sepal_width"'

    @pytest.mark.parametrize(("name", "text"), [("zz", "'zz'"), (5, "5"), (None, "None")])
    def test_f20_the_error_for_an_unknown_key_is_the_bare_key(self, name: Any, text: str) -> None:
        assert refused(flowers(), S | {name: 1}) == text

    def test_f21_a_value_of_the_wrong_type_is_in_the_error(self) -> None:
        text = "error: key \"petal_width\": expected shape [-1]: Expected float64, got 'a' of type 'str' instead."

        assert refused(flowers(), S | {"petal_width": "a"}) == text
        assert refused(flowers(), S | {"petal_width": ["a"]}) == text

    def test_f20_members_are_checked_in_the_order_of_the_value(self) -> None:
        assert refused(flowers(), {"zz": 1} | S | {"petal_width": "a"}) == "'zz'"
        assert refused(flowers(), S | {"petal_width": "a", "zz": 1}).startswith("error: key")

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, "argument of type 'NoneType' is not iterable"),
            (5, "argument of type 'int' is not iterable"),
            (True, "argument of type 'bool' is not iterable"),
            ("abc", 'error: missing key "sepal_length"'),
            ([5.2, 3.6, 1.4, 0.3], 'error: missing key "sepal_length"'),
            (list(S), "'list' object has no attribute 'items'"),
            (" ".join(S), "'str' object has no attribute 'items'"),
        ],
    )
    def test_f20_a_sample_that_is_not_a_dict_fails_with_the_error_of_python(self, value: Any, text: str) -> None:
        assert refused(flowers(), value) == text

    @pytest.mark.parametrize("value", [[5, 6], (5, 6), np.array([5, 6])])
    def test_t5_a_bare_list_is_taken_as_the_only_input(self, value: Any) -> None:
        rules = tensorflow({"x": ("DT_FLOAT", [-1])})

        (array,) = rules.to_inputs(value, NONE)

        assert array is not None
        assert array.tolist() == [5.0, 6.0]

    def test_f21_lists_are_checked_and_arrays_are_cast(self) -> None:
        text = "Expected int32, got 1.5 of type 'float' instead."

        assert _one("DT_INT32", [-1], np.array([1.5])).tolist() == [1]
        assert _one("DT_FLOAT", [-1], [1, True]).tolist() == [1.0, 1.0]
        assert _one("DT_INT64", [-1], [True]).tolist() == [1]
        with pytest.raises(InferError, match=r"expected shape \[-1\]: " + text):
            _one("DT_INT32", [-1], [1.5])

    @pytest.mark.parametrize(
        ("dims", "value", "shape"),
        [
            ([], 5, (1,)),
            ([-1, 2], [[1, 2], [3, 4]], (2, 2)),
            ([-1, 2], [1, 2], (1, 2)),
            ([-1, 2], [1, 2, 3, 4], (2, 2)),
            ([2, 2], [1, 2, 3, 4], (2, 2)),
            ([1, 1], 5, (1, 1)),
            ([4], [[1, 2], [3, 4]], (4,)),
        ],
    )
    def test_f21_values_are_reshaped_to_the_rank_of_an_unbatched_input(
        self, dims: list[int], value: Any, shape: tuple[int, ...]
    ) -> None:
        assert _one("DT_FLOAT", dims, value).shape == shape

    @pytest.mark.parametrize(
        ("dims", "value", "shape"),
        [([-1], 5, (1,)), ([-1, 2], [1, 2], (1, 2)), ([-1, 2], [[1, 2], [3, 4]], (2, 2)), ([-1, 1], 5, (1, 1))],
    )
    def test_f21_a_value_without_the_row_axis_is_one_row_of_a_batched_input(
        self, dims: list[int], value: Any, shape: tuple[int, ...]
    ) -> None:
        assert _one("DT_FLOAT", dims, value, batched=True).shape == shape

    def test_a_value_that_cannot_be_reshaped_to_the_rank_is_rejected(self) -> None:
        text = 'error: key "x": expected shape [-1]: got shape [1, 2]'

        assert refused(tensorflow({"x": ("DT_FLOAT", [-1])}), {"x": [[1, 2]]}) == text

    @pytest.mark.parametrize(
        ("value", "shape"), [([[1]], "[1, 1]"), ([1, 2, 3, 4], "[1, 4]"), ([[], []], "[2, 0]"), ([[1], [2]], "[2, 1]")]
    )
    def test_rows_of_the_wrong_length_are_rejected_with_their_key_in_the_error(self, value: Any, shape: str) -> None:
        text = f'error: key "x": expected shape [-1, 2]: got shape {shape}'

        assert refused(tensorflow({"x": ("DT_FLOAT", [-1, 2])}, batched=True), {"x": value}) == text

    def test_strings_are_encoded_as_bytes_for_the_engine(self) -> None:
        assert _one("DT_STRING", [-1], ["a", "ñ", b"\xff\x00"]).tolist() == [b"a", "ñ".encode(), b"\xff\x00"]
        assert _one("DT_STRING", [-1], "a", batched=True).tolist() == [b"a"]
        assert _one("DT_STRING", [-1], np.array([b"a"], object)).tolist() == [b"a"]

    def test_a_string_that_utf8_cannot_encode_fails_with_the_error_of_python(self) -> None:
        text = "'utf-8' codec can't encode character '\\ud800' in position 1: surrogates not allowed"

        assert refused(tensorflow({"x": ("DT_STRING", [-1])}), {"x": ["a\ud800"]}).endswith(f": {text}")

    def test_numbers_are_converted_to_bfloat16_bits(self) -> None:
        array = _one("DT_BFLOAT16", [-1], [1.5, 3.140625, math.nan])

        assert array.dtype == np.uint16
        assert ((array[:2].astype("<u4") << 16).view("<f4")).tolist() == [1.5, 3.140625]
        assert math.isnan((array[2:].astype("<u4") << 16).view("<f4")[0])
        assert _one("DT_BFLOAT16", [-1], np.array([0x3FC0], np.uint16)).tolist() == [0x3FC0]

    def test_a_model_with_an_unsupported_input_type_is_rejected_at_load(self) -> None:
        with pytest.raises(InferError) as error:
            tensorflow({"x": ("DT_RESOURCE", [])})

        assert error.value.code is Code.UNSUPPORTED

    @given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)))
    def test_f21_a_list_is_converted_to_the_same_array_as_its_numpy_array(self, array: Any) -> None:
        dims = [-1] * array.ndim
        found = _one("DT_INT64", dims, array.tolist())

        assert found.tolist() == np.atleast_1d(array).tolist()
        assert np.array_equal(found, _one("DT_INT64", dims, array))


def _flat(kind: str, array: Any) -> Any:
    return tensorflow({}, {"y": (kind, [-1])}).to_prediction([np.asarray(array)], NONE)["y"]


class TestPrediction:
    def test_c25_f22_a_prediction_is_encoded_as_cortex_encoded_it(self) -> None:
        outputs = [
            np.array([[0]]),
            np.array([[b"0"]], object),
            np.array([[0.59498787, 0.387045, 0.017967064]], np.float32),
            np.array([[2.5000002, 2.0700002, -1.0000005]], np.float32),
            np.array([True]),
        ]
        rules = flowers()

        prediction = rules.to_prediction(outputs, NONE)

        assert type(prediction) is dict
        assert int(prediction["class_ids"][0]) == 0  # C26
        assert rules.encode_answer(prediction, NONE) == (
            b'{"class_ids":["0"],"classes":["MA=="],"isbig":[true],"logits":[2.5000002,2.0700002,-1.0000005],'
            b'"probabilities":[0.59498787,0.387045,0.017967064]}\n'
        )

    def test_f22_outputs_are_flattened(self) -> None:
        assert _flat("DT_INT32", np.arange(6, dtype=np.int32).reshape(2, 3)) == [0, 1, 2, 3, 4, 5]
        assert _flat("DT_DOUBLE", np.array(2.5)) == [2.5]
        assert _flat("DT_DOUBLE", np.arange(4.0).reshape(2, 2).T) == [0.0, 2.0, 1.0, 3.0]

    def test_f22_every_output_type_has_its_json_form(self) -> None:
        assert _flat("DT_INT64", np.array([2**62, -1])) == ["4611686018427387904", "-1"]
        assert _flat("DT_STRING", np.array([b"\xff", b""], object)) == ["/w==", ""]
        assert _flat("DT_HALF", np.array([1.5, -2], np.float16)) == [15872, 49152]
        assert _flat("DT_BOOL", np.array([True, False])) == [True, False]
        assert _flat("DT_COMPLEX64", np.array([0.1 + 2j], np.complex64)) == [0.1, 2.0]
        assert _flat("DT_COMPLEX128", np.array([0.1 + 2j])) == [0.1, 2.0]

    @pytest.mark.parametrize("size", [3, 300])
    @pytest.mark.parametrize(("kind", "dtype"), [("DT_FLOAT", np.float32), ("DT_DOUBLE", np.float64)])
    def test_f22_nan_and_infinity_are_strings(self, kind: str, dtype: Any, size: int) -> None:
        array = np.ones(size, dtype)
        array[:3] = [np.nan, np.inf, -np.inf]

        assert _flat(kind, array) == ["NaN", "Infinity", "-Infinity"] + [1.0] * (size - 3)

    @pytest.mark.parametrize(
        "kind", ["DT_UINT8", "DT_INT8", "DT_INT16", "DT_UINT16", "DT_UINT32", "DT_UINT64", "DT_BFLOAT16"]
    )
    def test_f22_an_output_of_an_unsupported_type_fails(self, kind: str) -> None:
        with pytest.raises(InferError) as error:
            _flat(kind, np.zeros(1, np.uint8))

        assert (error.value.code, error.value.message) == (Code.INVALID, f"'{kind}'")

    @pytest.mark.parametrize(
        ("kind", "text"), [("DT_FLOAT", "'floatVal'"), ("DT_INT64", "'int64Val'"), ("DT_STRING", "'stringVal'")]
    )
    def test_f22_an_output_without_elements_fails(self, kind: str, text: str) -> None:
        with pytest.raises(InferError) as error:
            _flat(kind, np.zeros((1, 0)))

        assert (error.value.code, error.value.message) == (Code.INVALID, text)

    @limits(max_examples=40)
    @given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=8), elements={"allow_subnormal": False}))
    def test_f22_float32_values_have_their_shortest_text_and_survive_a_round_trip(self, array: Any) -> None:
        found = _flat("DT_FLOAT", array)

        assert [each if isinstance(each, str) else float(str(np.float32(each))) for each in found] == found
        back = np.array([float(each) for each in found], np.float32).reshape(array.shape)
        assert np.array_equal(back, array, equal_nan=True)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_f21_any_json_value_is_converted_or_rejected(value: Any) -> None:
    rules: Conversions = tensorflow({"x": ("DT_FLOAT", [-1])})
    try:
        (array,) = rules.to_inputs({"x": value}, NONE)
    except InferError:
        assert refused(rules, {"x": value}).startswith('error: key "x": expected shape [-1]: ')
    else:
        assert array is not None
        assert array.dtype == np.float32
        assert array.ndim == 1


def test_a_model_kind_other_than_onnx_and_tensorflow_is_rejected() -> None:
    with pytest.raises(InferError):
        conversions(ModelDescription(Signature((), ()), [], [], {}, settings("pytorch")))
