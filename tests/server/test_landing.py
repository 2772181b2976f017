from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.listening.landing import Landing

MIB = 1 << 20


class TestLanding:
    @given(st.integers(2, 3 * MIB), st.lists(st.tuples(st.booleans(), st.integers(1, MIB)), max_size=20))
    def test_what_is_put_and_what_is_written_becomes_the_body(self, size: int, steps: list[tuple[bool, int]]) -> None:
        body = random.Random(size).randbytes(size)
        landing = Landing(size)
        for put, most in [*steps, *[(False, size)] * 8]:
            at = landing.have
            if not landing.missing:
                break
            if put:
                landing.put(body[at : at + most])
            else:
                room = landing.room()
                part = body[at : at + min(most, len(room))]
                room[: len(part)] = part
                landing.have += len(part)
            assert landing.missing == size - landing.have

        assert landing.whole() == body
        assert type(landing.whole()) is bytes

    @pytest.mark.parametrize("size", [300_000, MIB])
    def test_a_body_of_a_mebibyte_is_read_where_it_stays(self, size: int) -> None:
        landing = Landing(size)

        assert len(landing.room()) == size
        landing.put(bytes(10))
        assert len(landing.room()) == size - 10

    def test_a_length_that_is_only_said_reserves_no_more_than_a_mebibyte(self) -> None:
        landing = Landing(1 << 50)

        assert len(landing.room()) == MIB
        landing.have = MIB
        assert len(landing.room()) == MIB, "as much again as has come"

    def test_what_has_come_stays_when_it_grows(self) -> None:
        body = random.Random(1).randbytes(5 * MIB + 3)
        landing = Landing(len(body))
        for at in range(0, len(body), 99_999):
            landing.put(memoryview(body)[at : at + 99_999])

        assert landing.whole() == body

    @pytest.mark.parametrize("size", [0, 1])
    def test_bytes_that_are_shared_are_never_written_to(self, size: int) -> None:
        with pytest.raises(ValueError, match="are shared"):
            Landing(size)
