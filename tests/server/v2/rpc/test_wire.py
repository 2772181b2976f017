"""Fields of protobuf's wire format, as its own classes write them."""

from __future__ import annotations

import pytest
from google.protobuf import unknown_fields
from google.protobuf.empty_pb2 import Empty

from penstock.server.v2.rpc.wire import field, field_head


@pytest.mark.parametrize("number", [1, 15, 16, 2047, 2048])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384])
def test_a_field_is_read_as_it_was_written(number: int, size: int) -> None:
    value = b"x" * size

    written = field(number, value)

    (read,) = unknown_fields.UnknownFieldSet(Empty.FromString(written))
    assert (read.field_number, read.wire_type, read.data) == (number, 2, value)
    assert written == field_head(number, size) + value
