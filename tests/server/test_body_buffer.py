from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.listening.body_buffer import BodyBuffer

MIB = 1 << 20


class TestLanding:
    @given(st.integers(2, 3 * MIB), st.lists(st.tuples(st.booleans(), st.integers(1, MIB)), max_size=20))
    def test_what_is_put_and_what_is_written_becomes_the_body(self, size: int, steps: list[tuple[bool, int]]) -> None:
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
    def test_a_body_of_a_mebibyte_is_read_where_it_stays(self, size: int) -> None:
        buffer = BodyBuffer(size)

        assert len(buffer.free_space()) == size
        buffer.append(bytes(10))
        assert len(buffer.free_space()) == size - 10

    def test_a_length_that_is_only_said_reserves_no_more_than_a_mebibyte(self) -> None:
        buffer = BodyBuffer(1 << 50)

        assert len(buffer.free_space()) == MIB
        buffer.received_bytes = MIB
        assert len(buffer.free_space()) == MIB, "as much again as has come"

    def test_what_has_come_stays_when_it_grows(self) -> None:
        body = random.Random(1).randbytes(5 * MIB + 3)
        buffer = BodyBuffer(len(body))
        for at in range(0, len(body), 99_999):
            buffer.append(memoryview(body)[at : at + 99_999])

        assert buffer.finish() == body

    @pytest.mark.parametrize("size", [0, 1])
    def test_bytes_that_are_shared_are_never_written_to(self, size: int) -> None:
        with pytest.raises(ValueError, match="are shared"):
            BodyBuffer(size)
