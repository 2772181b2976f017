from __future__ import annotations

import numpy as np
import onnx
import pytest
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from penstock.backends.datatypes import (
    ALIGNMENT_BYTES,
    BY_CONFIG_NAME,
    BY_ONNX_NAME,
    DATATYPES,
    Datatype,
    bf16_to_fp32,
    bytes_tensor,
    fp32_to_bf16,
    parse_bytes_elements,
)
from penstock.server.protobuf import model_config_pb2

CONFIG_NAMES = set(model_config_pb2().DataType.keys())


@pytest.mark.parametrize("row", DATATYPES.values(), ids=lambda row: row.name)
class TestEveryDatatype:
    def test_a_datatype_has_the_number_of_its_onnx_type(self, row: Datatype) -> None:
        names = {"BYTES": "STRING", "FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16"}

        assert onnx.TensorProto.DataType.Name(row.onnx_code) == names.get(row.name, row.name)

    def test_arrays_of_a_datatype_are_allocated_at_aligned_addresses(self, row: Datatype) -> None:
        slabs = [row.allocate_aligned(3) for _ in range(8)]

        assert all((slab.shape, slab.dtype) == ((3,), row.dtype) for slab in slabs)
        assert row.dtype.hasobject or not any(slab.ctypes.data % ALIGNMENT_BYTES for slab in slabs)

    def test_a_datatype_is_a_type_of_model_config(self, row: Datatype) -> None:
        assert row.config_name in CONFIG_NAMES

    def test_a_datatype_has_the_numpy_type_of_tritonclient(self, row: Datatype) -> None:
        if row.name == "BF16":
            assert row.dtype == np.uint16  # the client takes float32 and truncates it
            return
        assert np.dtype(triton_to_np_dtype(row.name)) == row.dtype
        assert np_to_triton_dtype(row.dtype) == row.name

    def test_a_datatype_is_found_by_each_of_its_names(self, row: Datatype) -> None:
        assert BY_CONFIG_NAME[row.config_name] is BY_ONNX_NAME[row.onnx_name] is DATATYPES[row.name] is row


def test_the_table_of_datatypes_has_every_type_of_model_config() -> None:
    assert CONFIG_NAMES - {"TYPE_INVALID"} == BY_CONFIG_NAME.keys()


def test_raw_bytes_are_viewed_without_copying_and_any_nonzero_byte_is_true() -> None:
    raw = bytes((0, 1, 2, 255))

    assert DATATYPES["BOOL"].view(raw, 3).tolist() == [False, True, True]
    assert DATATYPES["UINT16"].view(raw).tolist() == [256, 65282]
    assert np.shares_memory(DATATYPES["UINT16"].view(raw), np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", ([], 0)), (b"\1\0\0\0a\0\0\0\0", ([b"a", b""], 9)), (b"\1\0\0\0a\2\0\0\0b", ([b"a", b"b"], 11)),
        (b"\0\0\0\0\0\0\0\0\0\0\0\0", ([b"", b"", b""], 12)), (b"\1\0\0\0a\2", ([b"a"], 5)),
    ],
)  # fmt: skip
def test_strings_are_parsed_up_to_the_end_or_an_incomplete_element(raw: bytes, found: tuple[list[bytes], int]) -> None:
    assert parse_bytes_elements(raw, 3) == found
    assert bytes_tensor(found[0]).tolist() == found[0]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bf16_conversions_keep_any_shape(shape: tuple[int, ...]) -> None:
    numbers = np.full(shape, 1.5)

    assert fp32_to_bf16(numbers).shape == shape
    assert bf16_to_fp32(fp32_to_bf16(numbers)).tolist() == numbers.tolist()
