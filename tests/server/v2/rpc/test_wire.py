"""Fields of protobuf's wire format, compared with protobuf's own classes."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import unknown_fields
from google.protobuf.empty_pb2 import Empty

from penstock.server.v2.rpc.wire import field, field_head, has_more_elements, has_more_fields
from tests.server.v2.rpc.calls import pb


@pytest.mark.parametrize("number", [1, 15, 16, 2047, 2048])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384])
def test_a_field_round_trips_through_protobuf(number: int, size: int) -> None:
    value = b"x" * size

    written = field(number, value)

    (read,) = unknown_fields.UnknownFieldSet(Empty.FromString(written))
    assert (read.field_number, read.wire_type, read.data) == (number, 2, value)
    assert written == field_head(number, size) + value


@pytest.mark.parametrize(
    "one",
    [
        b"\x08\x01",
        b"\x09" + b"x" * 8,
        b"\x0d" + b"x" * 4,
        b"\x2a\x00",
        b"\xfa\x01\x80\x01" + b"x" * 128,
        b"\x08\x80\x00",
    ],
)
def test_fields_of_every_wire_type_are_counted(one: bytes) -> None:
    assert Empty.FromString(one * 3)
    assert [has_more_fields(one * 3, most) for most in (2, 3, 4)] == [True, False, False]


def test_the_start_and_end_of_a_group_each_count_as_a_field() -> None:
    assert Empty.FromString(b"\x0b\x0c" * 3)
    assert has_more_fields(b"\x0b\x0c" * 3, 5)


@pytest.mark.parametrize("broken", [b"\x2a", b"\x2a\x05x", b"\x0e", b"\xff" * 4, b"\x09x"])
def test_a_malformed_message_is_left_to_the_parser(broken: bytes) -> None:
    assert not has_more_fields(b"\x2a\x00" + broken, 3)


class ReadUpTo10(bytes):
    """Bytes that raise an error when read beyond the longest valid varint."""

    def __getitem__(self, at: Any) -> Any:
        assert at < 10
        return super().__getitem__(at)


def test_an_endless_varint_is_not_read_to_its_end() -> None:
    assert not has_more_fields(ReadUpTo10(b"\xff" * 1000), 3)


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        ({"name": "x", "datatype": "FP32"}, 8),
        ({"shape": [1, 300, 70_000]}, 4 + 3),
        ({"contents": {"int64_contents": [1, -1, 0]}}, 4 + 4 + 3),
        ({"contents": {"bool_contents": [True] * 9}}, 4 + 4 + 9),
        ({"contents": {"bytes_contents": [b"", b"abc"]}}, 4 + 4 + 4),
        ({"contents": {"fp32_contents": [1.5] * 100}}, 4 + 4),
        ({"parameters": {"a": {"int64_param": 1}, "b": {"bool_param": True}}}, 4 + 4),
    ],
)
def test_the_elements_of_tensors_are_counted(tensor: Any, elements: int) -> None:
    message = pb.ModelInferRequest(
        model_name="m", id="x" * 200, inputs=[tensor, {}], outputs=[{"name": "y"}], raw_input_contents=[b"\1" * 500]
    ).SerializeToString()
    more = [has_more_elements(message, most) for most in (elements + 3, elements + 4)]

    assert more == [True, False]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_truncated_message_is_left_to_the_parser(cut: int) -> None:
    message = pb.ModelInferRequest(inputs=[{"contents": {"bytes_contents": [b"abc"]}}]).SerializeToString()

    assert not has_more_elements(message[:-cut], 100)
