from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.listening.body_buffer import BodyBuffer

MIB = 1 << 20


class TestBodyBuffer:
    @given(st.integers(2, 3 * MIB), st.lists(st.tuples(st.booleans(), st.integers(1, MIB)), max_size=20))
    def test_appended_and_directly_written_bytes_form_the_body(self, size: int, steps: list[tuple[bool, int]]) -> None:
        body = random.Random(size).randbytes(size)
        buffer = BodyBuffer(size)
        for put, most in [*steps, *[(False, size)] * 8]:
            at = buffer.received_bytes
            if not buffer.missing_bytes:
                break
            if put:
                buffer.append(body[at : at + most])
            else:
                room = buffer.free_space()
                part = body[at : at + min(most, len(room))]
                room[: len(part)] = part
                buffer.received_bytes += len(part)
            assert buffer.missing_bytes == size - buffer.received_bytes

        assert buffer.finish() == body
        assert type(buffer.finish()) is bytes

    @pytest.mark.parametrize("size", [300_000, MIB])
    def test_a_body_of_up_to_one_mebibyte_is_received_into_its_final_memory(self, size: int) -> None:
        buffer = BodyBuffer(size)

        assert len(buffer.free_space()) == size
        buffer.append(bytes(10))
        assert len(buffer.free_space()) == size - 10

    def test_an_announced_length_reserves_at_most_one_mebibyte(self) -> None:
        buffer = BodyBuffer(1 << 50)

        assert len(buffer.free_space()) == MIB
        buffer.received_bytes = MIB
        assert len(buffer.free_space()) == MIB, "as much again as has come"

    def test_received_bytes_are_kept_when_the_buffer_grows(self) -> None:
        body = random.Random(1).randbytes(5 * MIB + 3)
        buffer = BodyBuffer(len(body))
        for at in range(0, len(body), 99_999):
            buffer.append(memoryview(body)[at : at + 99_999])

        assert buffer.finish() == body

    @pytest.mark.parametrize("size", [0, 1])
    def test_a_size_whose_bytes_object_python_shares_is_a_value_error(self, size: int) -> None:
        with pytest.raises(ValueError, match="are shared"):
            BodyBuffer(size)
