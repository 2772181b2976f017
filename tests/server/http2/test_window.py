"""ReceiveWindow alone: how much the peer may still send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http2.frames import DEFAULT_WINDOW, ErrorCode, Http2Error, read_word, window_update
from penstock.server.http2.window import ReceiveWindow

from .fakes import FakeOutbox

SIZE = 1 << 20


def window(size: int = SIZE) -> tuple[ReceiveWindow, FakeOutbox]:
    outbox: Any = FakeOutbox()
    return ReceiveWindow(size, outbox), outbox


def given_back(outbox: FakeOutbox) -> list[int]:
    return [read_word(update, 9) for update in outbox.written]


def test_a_window_begins_with_the_default_size_and_is_widened_once() -> None:
    flow_window, outbox = window()
    assert flow_window.remaining == DEFAULT_WINDOW

    flow_window.refill()
    flow_window.refill()

    assert flow_window.remaining == SIZE
    assert outbox.written == [window_update(0, SIZE - DEFAULT_WINDOW)]


def test_a_window_of_the_default_size_is_not_widened() -> None:
    flow_window, outbox = window(DEFAULT_WINDOW)
    flow_window.refill()

    assert outbox.written == []
    flow_window.consume(DEFAULT_WINDOW)
    assert given_back(outbox) == [DEFAULT_WINDOW]


def test_a_window_one_byte_above_the_default_size_is_widened() -> None:
    flow_window, outbox = window(DEFAULT_WINDOW + 1)
    flow_window.refill()

    assert given_back(outbox) == [1]


def test_a_window_is_refilled_completely_when_more_than_half_of_it_is_used() -> None:
    flow_window, outbox = window()
    flow_window.refill()
    outbox.written.clear()

    flow_window.consume(SIZE // 2)
    assert outbox.written == []
    flow_window.consume(1)
    assert given_back(outbox) == [SIZE // 2 + 1]
    assert flow_window.remaining == SIZE


def test_a_full_window_may_be_used_at_once_and_one_byte_more_ends_the_connection() -> None:
    flow_window, _ = window()
    flow_window.refill()
    flow_window.consume(SIZE)
    with pytest.raises(Http2Error) as error:
        flow_window.consume(SIZE + 1)

    assert error.value.code == ErrorCode.FLOW_CONTROL_ERROR


@given(st.integers(DEFAULT_WINDOW, SIZE), st.lists(st.integers(0, SIZE), max_size=40))
def test_a_peer_that_respects_the_window_is_never_rejected_or_starved(size: int, parts: list[int]) -> None:
    flow_window, outbox = window(size)
    flow_window.refill()
    sent = 0
    for part in parts:
        may = DEFAULT_WINDOW + sum(given_back(outbox)) - sent
        sent += min(part, may)
        flow_window.consume(min(part, may))

        may = DEFAULT_WINDOW + sum(given_back(outbox)) - sent
        assert size // 2 <= may == flow_window.remaining <= size
    assert 0 not in given_back(outbox)
