"""TensorProtos without TensorFlow, as its make_tensor_proto and make_ndarray write and read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from penstock.backends.backend import Array
from penstock.server.seldon.inside.proto_bytes import pb
from penstock.server.seldon.inside.tftensors import array_of_tftensor, tftensor_of_array

NUMBERS = ["f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", "c16"]


def tftensor(**members: Any) -> Any:
    return json_format.ParseDict(members, pb.DefaultData().tftensor)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 2)], ids=str)
def test_arrays_of_numbers_survive_a_round_trip(kind: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, kind)
    found = array_of_tftensor(tftensor_of_array(array))
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, shape, array.tolist())
    assert found.flags.writeable


def test_several_numbers_are_written_as_bytes_and_a_single_number_as_a_value() -> None:
    assert json_format.MessageToDict(tftensor_of_array(np.array([1.0, 2.0], ">f4"))) == {
        "dtype": "DT_FLOAT", "tensorShape": {"dim": [{"size": "2"}]}, "tensorContent": "AACAPwAAAEA=",
    }  # fmt: skip
    assert json_format.MessageToDict(tftensor_of_array(np.array([[3]]))) == {
        "dtype": "DT_INT64", "tensorShape": {"dim": [{"size": "1"}, {"size": "1"}]}, "int64Val": ["3"],
    }  # fmt: skip


@pytest.mark.parametrize("array", [
    np.array([["a", "é"]]), np.array([[b"a", "é"]], "O"), np.array([[b"a", "é".encode()]], "O"),
], ids=["texts", "mixed", "bytes"])  # fmt: skip
def test_texts_are_read_back_as_bytes(array: Array) -> None:
    found = array_of_tftensor(tftensor_of_array(array))
    assert (found.dtype, found.tolist()) == (np.dtype("O"), [[b"a", "é".encode()]])


def test_missing_values_are_filled_with_the_last_value() -> None:
    shape = {"dim": [{"size": 2}, {"size": 2}]}
    assert array_of_tftensor(tftensor(dtype="DT_INT32", tensorShape=shape, intVal=[1, 2])).tolist() == [[1, 2], [2, 2]]
    assert array_of_tftensor(tftensor(dtype="DT_INT32", tensorShape=shape)).tolist() == [[0, 0], [0, 0]]
    assert (
        array_of_tftensor(tftensor(dtype="DT_STRING", tensorShape=shape, stringVal=["YQ=="])).tolist()
        == [[b"a"] * 2] * 2
    )


def test_a_shape_larger_than_any_message_is_rejected() -> None:
    for kind, length in (("DT_FLOAT", 1 << 29), ("DT_STRING", 1 << 28)):
        with pytest.raises(ValueError, match="larger than any message"):
            array_of_tftensor(tftensor(dtype=kind, tensorShape={"dim": [{"size": length}]}))


def test_more_values_than_the_shape_holds_are_an_error() -> None:
    shape = {"dim": [{"size": 1}]}
    with pytest.raises(ValueError, match="index can't contain negative values"):
        array_of_tftensor(tftensor(dtype="DT_INT32", tensorShape=shape, intVal=[1, 2]))
    with pytest.raises(ValueError, match=r"cannot reshape array of size 2 into shape \(1,\)"):
        array_of_tftensor(tftensor(dtype="DT_STRING", tensorShape=shape, stringVal=["YQ==", "YQ=="]))


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["2020"], "datetime64[Y]")], ids=["object", "date"])
def test_arrays_of_unsupported_dtypes_are_a_type_error(array: Array) -> None:
    with pytest.raises(TypeError, match="Unrecognized data type"):
        tftensor_of_array(array)


def test_an_unsupported_tensor_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="Unsupported tensor type: 14"):
        array_of_tftensor(tftensor(dtype="DT_BFLOAT16"))
