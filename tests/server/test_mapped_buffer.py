from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.listening.mapped_buffer import Body, LargeAnswerEncoder, MappedBuffer, join_mapped
from tests.fakes import PATIENCE_S

MIB = 1 << 20


@given(st.integers(1, 10_000), st.lists(st.binary(max_size=9000)), st.booleans())
def test_appended_parts_are_in_the_buffer_one_after_another(size: int, parts: list[bytes], at_once: bool) -> None:
    mapped = MappedBuffer(size)
    for part in [b"first", *parts]:
        mapped.append(memoryview(part) if at_once else part)

    assert mapped.finish() == b"".join([b"first", *parts])


def test_join_mapped_joins_parts_of_any_size() -> None:
    parts: list[Body] = [b"head", memoryview(bytes(range(256)) * 20_000), b"", b"end"]

    assert join_mapped(parts) == b"".join(parts)


def test_a_buffer_grows_when_more_bytes_are_appended_than_expected() -> None:
    mapped = MappedBuffer()
    for number in range(9):
        mapped.append(bytes([number]) * MIB)

    assert mapped.finish() == b"".join([bytes([number]) * MIB for number in range(9)])


def test_mapped_memory_is_freed_with_its_last_view() -> None:
    view = join_mapped([bytes(MIB)])
    part, memory = view[MIB - 1 :], weakref.ref(view.obj)
    assert len(view.obj) == MIB  # type: ignore[arg-type]  # what is counted of who takes a part only
    del view
    assert memory() is not None
    del part

    assert memory() is None


class TestLargeAnswers:
    @pytest.mark.parametrize(("json_bytes", "most"), [(0, 2), (9 * MIB, 1)])
    def test_large_answers_are_encoded_a_few_at_a_time_on_threads(self, json_bytes: int, most: int) -> None:
        threads = set()

        async def main() -> None:
            answers = LargeAnswerEncoder()
            await asyncio.gather(
                *(answers.encode(json_bytes, lambda: threads.add(threading.get_ident())) for _ in range(9))
            )

        asyncio.run(main())
        assert len(threads) <= most
        assert threading.get_ident() not in threads

    def test_answers_with_little_json_do_not_wait_for_an_answer_with_long_json(self) -> None:
        async def main() -> str:
            answers, free = LargeAnswerEncoder(), threading.Event()
            long = asyncio.ensure_future(answers.encode(9 * MIB, free.wait, PATIENCE_S))
            try:
                return await answers.encode(MIB - 1, lambda: "encoded")
            finally:
                assert not long.done()
                free.set()
                await long

        assert asyncio.run(main()) == "encoded"

    def test_encoding_stops_when_the_answer_is_cancelled(self) -> None:
        async def main() -> tuple[int, str]:
            answers, begun, go_on = LargeAnswerEncoder(), threading.Event(), threading.Event()
            mapped = MappedBuffer()

            def encode() -> None:
                mapped.append(b"first")
                begun.set()
                go_on.wait(PATIENCE_S)
                for _ in range(1000):
                    mapped.append(b"more")

            cancelled = asyncio.ensure_future(answers.encode(9 * MIB, encode))
            assert await asyncio.to_thread(begun.wait, PATIENCE_S)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            go_on.set()
            following = await answers.encode(9 * MIB, lambda: bytes(join_mapped((b"taken",))).decode())
            return mapped.size, following

        assert asyncio.run(main()) == (len(b"first"), "taken")
