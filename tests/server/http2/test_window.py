"""ReceiveWindow alone: what the peer may still send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.frames import DEFAULT_WINDOW, ErrorCode, Http2Error, read_word, window_update
from penstock.server.http2.window import ReceiveWindow

from .parts import FakeOutbox

SIZE = 1 << 20


def window(size: int = SIZE) -> tuple[ReceiveWindow, FakeOutbox]:
    outbox: Any = FakeOutbox()
    return ReceiveWindow(size, outbox), outbox


def given_back(outbox: FakeOutbox) -> list[int]:
    return [read_word(update, 9) for update in outbox.written]


def test_it_begins_with_what_every_connection_has_and_is_widened_once() -> None:
    made, outbox = window()
    assert made.remaining == DEFAULT_WINDOW

    made.refill()
    made.refill()

    assert made.remaining == SIZE
    assert outbox.written == [window_update(0, SIZE - DEFAULT_WINDOW)]


def test_one_that_is_no_larger_than_that_is_not_widened() -> None:
    made, outbox = window(DEFAULT_WINDOW)
    made.refill()

    assert outbox.written == []
    made.consume(DEFAULT_WINDOW)
    assert given_back(outbox) == [DEFAULT_WINDOW]


def test_one_that_is_larger_by_a_byte_is() -> None:
    made, outbox = window(DEFAULT_WINDOW + 1)
    made.refill()

    assert given_back(outbox) == [1]


def test_nothing_is_given_back_until_more_than_half_is_used_and_then_all_of_it() -> None:
    made, outbox = window()
    made.refill()
    outbox.written.clear()

    made.consume(SIZE // 2)
    assert outbox.written == []
    made.consume(1)
    assert given_back(outbox) == [SIZE // 2 + 1]
    assert made.remaining == SIZE


def test_all_of_it_may_be_sent_at_once_and_one_byte_more_ends_the_connection() -> None:
    made, _ = window()
    made.refill()
    made.consume(SIZE)
    with pytest.raises(Http2Error) as error:
        made.consume(SIZE + 1)

    assert error.value.code == ErrorCode.FLOW_CONTROL_ERROR


@given(st.integers(DEFAULT_WINDOW, SIZE), st.lists(st.integers(0, SIZE), max_size=40))
def test_a_peer_that_keeps_to_what_it_was_given_is_never_refused_nor_left_without(size: int, parts: list[int]) -> None:
    made, outbox = window(size)
    made.refill()
    sent = 0
    for part in parts:
        may = DEFAULT_WINDOW + sum(given_back(outbox)) - sent
        sent += min(part, may)
        made.consume(min(part, may))

        may = DEFAULT_WINDOW + sum(given_back(outbox)) - sent
        assert size // 2 <= may == made.remaining <= size
    assert 0 not in given_back(outbox)
