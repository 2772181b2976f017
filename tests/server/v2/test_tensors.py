from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.server.v2.tensors import from_binary, from_json, json_pieces, to_binary, to_json
from tests.server.v2.documents import ANYTHING, nested, same, tensors

ALL = list(DATATYPES)
IN_JSON = [name for name in ALL if name not in {"FP16", "BF16"}]
INTEGERS = [name for name in ALL if DATATYPES[name].dtype.kind in "iu" and name != "BF16"]
WRONG_SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def spec(datatype: str) -> TensorSpec:
    return TensorSpec("x", datatype, (-1,))


def read_json(datatype: str, shape: list[int], values: Any) -> Array:
    return from_json(spec(datatype), shape, math.prod(shape), values)


def read_binary(datatype: str, shape: list[int], raw: bytes) -> Array:
    return from_binary("m", spec(datatype), shape, math.prod(shape), memoryview(raw))


def refused_json(datatype: str, shape: list[int], values: Any) -> str:
    with pytest.raises(InferError) as caught:
        read_json(datatype, shape, values)
    assert caught.value.code is Code.INVALID
    return caught.value.message


def refused_binary(datatype: str, shape: list[int], raw: bytes) -> str:
    with pytest.raises(InferError) as caught:
        read_binary(datatype, shape, raw)
    assert caught.value.code is Code.INVALID
    return caught.value.message


class TestRoundTrip:
    @pytest.mark.parametrize("datatype", IN_JSON)
    @given(data=st.data())
    @settings(max_examples=20)
    def test_flat_and_nested_json_round_trips(self, datatype: str, data: st.DataObject) -> None:
        array = data.draw(tensors(datatype))
        shape = list(array.shape)
        values = json.loads(to_json(datatype, "x", array))

        assert same(read_json(datatype, shape, values), array)
        assert same(read_json(datatype, shape, nested(values, shape)), array)

    @pytest.mark.parametrize("datatype", ALL)
    @given(data=st.data())
    @settings(max_examples=20)
    def test_binary_data_round_trips_at_any_offset(self, datatype: str, data: st.DataObject) -> None:
        array = data.draw(tensors(datatype))
        before = data.draw(st.binary(max_size=9))
        raw = before + bytes(to_binary(datatype, array))
        found = from_binary("m", spec(datatype), list(array.shape), array.size, memoryview(raw)[len(before) :])

        assert same(found, array)

    @pytest.mark.parametrize("datatype", IN_JSON)
    @pytest.mark.parametrize("count", [63, 64, 65, 1000])
    def test_json_round_trips_for_few_and_for_many_values(self, datatype: str, count: int) -> None:
        array = np.arange(count).astype(DATATYPES[datatype].dtype)
        if datatype == "BYTES":
            array[:] = [b"%d" % number for number in range(count)]
        if datatype in {"FP32", "FP64"}:
            array /= 3
        values = json.loads(to_json(datatype, "x", array))

        assert same(read_json(datatype, [count], values), array)

    @pytest.mark.parametrize("datatype", ["FP32", "FP64"])
    @pytest.mark.parametrize("count", [3, 300])
    def test_nan_and_infinity_are_written_as_pythons_json_module_reads_them(self, datatype: str, count: int) -> None:
        array = np.zeros(count, DATATYPES[datatype].dtype)
        array[:3] = [math.nan, math.inf, -math.inf]

        assert to_json(datatype, "x", array).startswith(b"[NaN,Infinity,-Infinity")
        assert same(read_json(datatype, [count], json.loads(to_json(datatype, "x", array))), array)

    def test_fp32_values_are_written_with_the_digits_of_their_double(self) -> None:
        assert to_json("FP32", "x", np.array([0.1], np.float32)) == b"[0.10000000149011612]"
        assert to_json("FP32", "x", np.full(64, 0.1, np.float32)).startswith(b"[0.10000000149011612,")

    @pytest.mark.parametrize("datatype", ["FP32", "INT16", "BOOL"])
    def test_a_noncontiguous_array_is_written_in_row_order(self, datatype: str) -> None:
        array = np.arange(200).reshape(10, 20).astype(DATATYPES[datatype].dtype).T

        assert json.loads(to_json(datatype, "x", array)) == array.ravel().tolist()
        assert bytes(to_binary(datatype, array)) == array.tobytes()

    @pytest.mark.parametrize("count", [(1 << 14) - 1, 1 << 14, (1 << 14) + 1, 3 << 14])
    def test_the_pieces_of_a_long_array_make_one_json_list(self, count: int) -> None:
        array = np.arange(count, dtype=np.int32).reshape(1, count)

        assert to_json("INT32", "x", array) == json.dumps(list(range(count)), separators=(",", ":")).encode()

    @pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES"])
    def test_a_long_array_is_written_in_bounded_pieces(self, datatype: str) -> None:
        array = np.full(100_000, b"x" if datatype == "BYTES" else 1, DATATYPES[datatype].dtype)
        pieces = list(json_pieces(datatype, "x", array))

        assert b"".join(pieces) == to_json(datatype, "x", array)
        assert max(piece.count(b",") for piece in pieces) < 1 << 14

    @pytest.mark.parametrize("count", [0, 1, 63, 64])
    def test_a_short_array_is_written_in_pieces_too(self, count: int) -> None:
        array = np.arange(count, dtype=np.float32).reshape(1, count)

        assert b"".join(json_pieces("FP32", "x", array)) == to_json("FP32", "x", array)

    def test_one_nan_among_a_million_numbers_does_not_multiply_the_peak_memory(self) -> None:
        array = np.ones(1_000_000, np.float32)
        array[-1] = np.nan
        tracemalloc.start()
        try:
            text = to_json("FP32", "x", array)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert text.endswith(b",1.0,1.0,NaN]")
        # the text has 4 MB; as Python strings and floats, all values together would take 100 MB
        assert peak < 40_000_000


def outcome(datatype: str, values: list[Any], data: Any) -> Any:
    try:
        return read_json(datatype, [len(values)], data)
    except InferError as error:
        return error.code, error.message


class TestNumberArrays:
    @pytest.mark.parametrize("datatype", [name for name in IN_JSON if name != "BYTES"])
    @given(data=st.data())
    @settings(max_examples=20)
    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_an_array_of_numbers_is_decoded_like_a_list_of_them(self, datatype: str, data: st.DataObject) -> None:
        signed, unsigned = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)
        floats = st.floats(allow_nan=False, allow_infinity=False)
        drawn, dtype = data.draw(st.sampled_from([(signed, np.int64), (unsigned, np.uint64), (floats, np.float64)]))
        if datatype in {"FP32", "FP64"}:
            # these datatypes receive only floats, see parsing
            drawn, dtype = signed | unsigned | floats, np.float64
        values = data.draw(st.lists(drawn | st.sampled_from([0, 1]), max_size=5))
        found, expected = outcome(datatype, values, np.array(values, dtype)), outcome(datatype, values, values)

        if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
            assert same(found, expected)
        elif dtype is not np.float64:
            assert found == expected


class TestInvalidJson:
    @pytest.mark.parametrize("datatype", ALL)
    @given(shape=st.lists(st.integers(0, 5) | st.integers(0, 2**63 - 1), max_size=33), values=ANYTHING)
    @settings(max_examples=20)
    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_arbitrary_json_values_are_decoded_or_rejected(self, datatype: str, shape: list[int], values: Any) -> None:
        try:
            array = read_json(datatype, shape, values)
        except InferError as error:
            assert error.code is Code.INVALID  # noqa: PT017 - what is read is looked at below
        else:
            assert list(array.shape) == shape
            assert array.dtype == DATATYPES[datatype].dtype

    @pytest.mark.parametrize("datatype", IN_JSON)
    @pytest.mark.parametrize("values", [None, 1, 1.5, True, "1", {}, {"0": 1}])
    def test_data_that_is_not_a_list_is_rejected(self, datatype: str, values: Any) -> None:
        assert refused_json(datatype, [1], values) == (
            "Unable to parse 'data': attempt to access JSON non-array as array"
        )

    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_half_floats_are_rejected_as_json(self, datatype: str) -> None:
        assert refused_json(datatype, [1], [1.0]) == (
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input 'x'"
        )

    @pytest.mark.parametrize("datatype", IN_JSON)
    @pytest.mark.parametrize("shape", [[0], [2], [1, 0], [2, 2], [3]])
    def test_a_number_of_values_that_does_not_match_the_shape_is_rejected(
        self, datatype: str, shape: list[int]
    ) -> None:
        one = ["a"] if datatype == "BYTES" else [1]

        assert refused_json(datatype, shape, one) == WRONG_SHAPE

    @pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES"])
    @pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**63 - 1, 0], [1] * 65 + [0]])
    def test_an_empty_tensor_with_an_unrepresentable_shape_is_rejected(self, datatype: str, shape: list[int]) -> None:
        assert refused_json(datatype, shape, []) == WRONG_SHAPE

    def test_the_error_for_more_than_64_bits_of_elements_has_the_shape(self) -> None:
        assert refused_json("FP32", [2**32, 2**32], [1.0]) == (
            "shape [4294967296,4294967296] of input 'x' causes total element count to exceed maximum size of "
            "9223372036854775807"
        )

    @pytest.mark.parametrize("datatype", [*INTEGERS, "FP32", "FP64", "BOOL"])
    @pytest.mark.parametrize("value", [None, "1", {}, "x" * 1000])
    def test_a_value_that_is_not_a_number_is_rejected(self, datatype: str, value: Any) -> None:
        text = f"input 'x' takes {datatype} values"
        if datatype == "BOOL":
            text = "attempt to access JSON non-boolean as boolean"
        for values in ([value], [1, value], [[1], [value]]):
            assert refused_json(datatype, [len(values)], values) == f"Unable to parse 'data': {text}"

    @pytest.mark.parametrize(
        ("datatype", "values"),
        [
            ("INT32", [1.0]), ("INT64", [1e300]), ("UINT8", [True]), ("FP32", [True]), ("FP64", [1.5, False]),
            ("BOOL", [2]), ("BOOL", [-1]), ("BOOL", [1.0]),
        ],
    )  # fmt: skip
    def test_a_number_of_the_wrong_kind_is_rejected(self, datatype: str, values: list[Any]) -> None:
        text = "non-boolean as boolean" if datatype == "BOOL" else f"takes {datatype} values"
        assert refused_json(datatype, [len(values)], values).endswith(text)

    @pytest.mark.parametrize("datatype", INTEGERS)
    @pytest.mark.parametrize("step", [-1, 1])
    def test_an_integer_outside_the_range_of_its_datatype_is_rejected(self, datatype: str, step: int) -> None:
        bounds = np.iinfo(DATATYPES[datatype].dtype.str)
        edge = int(bounds.max if step > 0 else bounds.min)

        assert read_json(datatype, [1], [edge]).tolist() == [edge]
        assert refused_json(datatype, [1], [edge + step]) == (
            f"Unable to parse 'data': a value of input 'x' is out of range for {datatype}"
        )

    def test_booleans_may_be_written_as_numbers(self) -> None:
        assert read_json("BOOL", [3], [0, 1, True]).tolist() == [False, True, True]

    @pytest.mark.parametrize("values", [[1], [None], [["a"], [1]], [{}], [True]])
    def test_a_value_of_a_string_tensor_that_is_not_a_string_is_rejected(self, values: list[Any]) -> None:
        assert refused_json("BYTES", [len(values)], values) == (
            "Unable to parse 'data': attempt to access JSON non-string as string"
        )

    def test_a_long_string_among_many_values_is_rejected_with_little_memory(self) -> None:
        values = ["x" * 10_000, *[""] * 10_000]
        tracemalloc.start()
        try:
            refused_json("INT32", [len(values)], values)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        # numpy would make a matrix as wide as the longest string: 400 MB
        assert peak < 1_000_000

    @pytest.mark.parametrize("values", [[[1, 2], [3]], [1, [2, [3]]], [[[]], [1, 2, 3]], [[[[1]]], 2, [3]]])
    def test_the_nesting_of_data_is_ignored_as_in_triton(self, values: list[Any]) -> None:
        assert read_json("INT32", [3], values).tolist() == [1, 2, 3]


class TestInvalidBinaryData:
    @pytest.mark.parametrize("datatype", ALL)
    @given(shape=st.lists(st.integers(0, 4) | st.integers(0, 2**63 - 1), max_size=33), raw=st.binary(max_size=40))
    @settings(max_examples=20)
    def test_arbitrary_bytes_are_decoded_or_rejected(self, datatype: str, shape: list[int], raw: bytes) -> None:
        try:
            array = read_binary(datatype, shape, raw)
        except InferError as error:
            assert error.code is Code.INVALID  # noqa: PT017 - what is read is looked at below
        else:
            assert list(array.shape) == shape
            assert array.dtype == DATATYPES[datatype].dtype

    @pytest.mark.parametrize("datatype", [name for name in ALL if name != "BYTES"])
    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_byte_size_that_does_not_match_the_shape_is_rejected(self, datatype: str, off: int) -> None:
        size = 6 * DATATYPES[datatype].size_bytes

        assert refused_binary(datatype, [2, 3], bytes(size + off)) == (
            f"input byte size mismatch for input 'x' for model 'm'. Expected {size}, got {size + off}"
        )

    def test_a_shape_whose_product_exceeds_64_bits_is_rejected(self) -> None:
        assert refused_binary("FP32", [2**31, 2**31], b"1234").startswith("byte size overflow for input 'x'")
        assert "causes total element count to exceed maximum size of" in refused_binary("FP32", [2**32, 2**32], b"1234")

    def test_any_nonzero_byte_is_true(self) -> None:
        assert read_binary("BOOL", [3], b"\x00\x01\xff").tolist() == [False, True, True]

    @pytest.mark.parametrize(
        ("raw", "text"),
        [
            (b"\x01", "incomplete string length indicator for {}, expecting 4 bytes but only 1 bytes available"),
            (
                b"\x05\0\0\0abc",
                "incomplete string data for {}, expecting string of length 5 but only 3 bytes available",
            ),
            (
                b"\xff\xff\xff\xff",
                "incomplete string data for {}, expecting string of length 4294967295 but only 0 bytes available",
            ),
            (bytes(8), "expected 1 strings for {}, got more"),
            (b"", "expected 1 strings for {}, got 0"),
        ],
    )
    def test_strings_whose_length_prefixes_do_not_fit_are_rejected(self, raw: bytes, text: str) -> None:
        assert refused_binary("BYTES", [1], raw) == text.format("inference input 'x' for model 'm'")

    def test_a_binary_string_may_contain_any_bytes(self) -> None:
        raw = bytes(to_binary("BYTES", np.array([b"\xff\x00", b""], np.object_)))

        assert read_binary("BYTES", [2], raw).tolist() == [b"\xff\x00", b""]


class TestEncoding:
    @pytest.mark.parametrize("datatype", ["FP16", "BF16"])
    def test_half_floats_are_rejected_as_json(self, datatype: str) -> None:
        with pytest.raises(InferError) as caught:
            to_json(datatype, "y", np.zeros(1, DATATYPES[datatype].dtype))

        assert caught.value.code is Code.INVALID
        assert caught.value.message == (
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output 'y'"
        )

    def test_bytes_that_are_not_utf8_are_rejected_as_json(self) -> None:
        with pytest.raises(InferError) as caught:
            to_json("BYTES", "y", np.array([b"\xff"], np.object_))

        assert caught.value.code is Code.INVALID

    def test_strings_from_a_runtime_are_encoded_as_utf8(self) -> None:
        array = np.array(["é", b"a"], np.object_)

        assert to_json("BYTES", "y", array) == '["é","a"]'.encode()
        assert to_binary("BYTES", array) == b"\x02\x00\x00\x00\xc3\xa9\x01\x00\x00\x00a"

    @pytest.mark.parametrize(("length", "count", "times"), [(6, 200_000, 4), (4096, 20_000, 1.5)])
    def test_many_strings_are_encoded_with_little_extra_memory(self, length: int, count: int, times: float) -> None:
        array = np.array([b"%0*d" % (length, number) for number in range(count)], np.object_)
        tracemalloc.start()
        try:
            written = to_binary("BYTES", array)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert written == b"".join(length.to_bytes(4, "little") + text for text in array)
        assert most < times * len(written)

    @pytest.mark.parametrize("datatype", ALL)
    def test_an_empty_array_is_encoded_as_no_bytes(self, datatype: str) -> None:
        assert bytes(to_binary(datatype, np.zeros((0, 3), DATATYPES[datatype].dtype))) == b""
