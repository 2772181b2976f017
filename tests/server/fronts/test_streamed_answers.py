"""Streamed answers from the engine to a front end: limits and backpressure."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from penstock.backends.errors import InferError
from penstock.batching.stream import StreamedAnswer
from penstock.server.fronts import engine_service
from penstock.server.fronts.engine_service import PAUSE_UNSENT_BYTES, RemoteAnswers
from penstock.server.fronts.message_kinds import ANSWER
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message
from tests.server.fronts.pair import until

LARGE = StreamedAnswer({"y": np.zeros(4 * PAUSE_UNSENT_BYTES, np.uint8)})


class Front:
    """An engine's Link without shared memory, and a front end that reads when told to."""

    def __init__(self) -> None:
        here, self._there = socket.socketpair()
        self.link = Link(here, lambda _: None, lambda _: None, arena_bytes=0)
        self.messages: list[Message] = []

    async def reads(self, count: int) -> None:
        link = Link(self._there, self.messages.extend, lambda _: None)
        await until(lambda: len(self.messages) == count and not self.link.unsent_bytes)
        link.close()

    def close(self) -> None:
        self.link.close()
        self._there.close()


def test_a_streaming_request_waits_while_its_front_end_is_slow_to_read() -> None:
    async def scene() -> None:
        front = Front()
        one, other = RemoteAnswers(front.link, 1), RemoteAnswers(front.link, 2)
        went_on: list[int] = []

        assert one.send(LARGE) is None
        await asyncio.sleep(0)  # the answer is written at the end of the turn
        room = other.send(LARGE)
        assert room is not None
        room(lambda: went_on.append(2))
        await asyncio.sleep(0)
        assert not went_on

        await front.reads(2)
        assert went_on == [2]
        assert [message[:2] for message in front.messages] == [(ANSWER, 1), (ANSWER, 2)]
        assert other.send(LARGE) is None
        front.close()

    asyncio.run(scene())


def test_unread_answers_to_a_front_end_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "MAX_UNSENT_BYTES", PAUSE_UNSENT_BYTES)

    async def scene() -> None:
        front = Front()
        answers = RemoteAnswers(front.link, 1)
        answers.send(LARGE)
        await asyncio.sleep(0)
        with pytest.raises(InferError, match="does not read them"):
            answers.send(LARGE)
        answers.cancelled = True
        assert answers.send(LARGE) is None
        front.close()

    asyncio.run(scene())
