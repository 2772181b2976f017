"""A Desk with a fake worker: every call is answered within a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.deepaas.desk import Desk
from penstock.server.deepaas.messages import METADATA, ModelDescription
from penstock.server.workers import restarting
from penstock.server.workers.order import NotStartedError, Order
from tests.server.carrying.crews import NoBackoff

from .fake_trainers import done, turns


class FakeWorker:
    """A worker that answers each call with its number, unless calls are held. `killed`: whether it was killed."""

    def __init__(self, desk: FakeDesk, lost: Callable[[Any], None]) -> None:
        self.desk, self._lost = desk, lost
        self.serving, self.killed, self.pid, self.in_flight_count = True, False, 1, 0
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ready.set_result((ModelDescription(trains=False).write(), []))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        desk.workers.append(self)

    async def call(self, kind: int, body: bytes = b"", *, limit_s: float) -> tuple[bytes, list[Any]]:
        if not self.desk.holds:
            return b"%d" % len(self.desk.workers), []
        self.in_flight_count += 1
        return await self.held, []

    def end(self) -> None:
        """End, as a process does."""
        self.serving = False
        if not self.ended.done():
            if not self.held.done():
                self.held.set_exception(NotStartedError())
                self.held.exception()
            self.ended.set_result(None)
            self._lost(self)

    def kill(self, why: str) -> None:
        self.killed = True
        self.end()

    def stop(self) -> None:
        self.end()


class FakeDesk:
    """What the workers of one Desk have in common."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workers: list[FakeWorker] = []
        self.holds = False
        monkeypatch.setattr(restarting, "Worker", lambda order, lost, _on_message: FakeWorker(self, lost))
        monkeypatch.setattr(restarting, "Backoff", NoBackoff)
        monkeypatch.setattr(NoBackoff, "forgotten", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDesk:
    return FakeDesk(monkeypatch)


def new_desk() -> Desk:
    return Desk(Order("", {}, "model 'm'", {}))


def test_the_desk_has_the_description_that_its_worker_sent(fake: FakeDesk) -> None:
    async def work() -> None:
        desk = new_desk()
        trains = [desk.description.trains]
        await desk.start()
        await turns()
        trains.append(desk.description.trains)
        assert trains == [True, False]
        await desk.close()

    done(work())


def test_a_worker_that_ends_after_answering_does_not_count_as_a_failure(fake: FakeDesk) -> None:
    async def work() -> None:
        desk = new_desk()
        await desk.start()
        assert NoBackoff.forgotten == 0
        assert await desk.call(METADATA) == b"1"
        assert NoBackoff.forgotten == 1
        fake.workers[0].end()
        assert await desk.call(METADATA) == b"2"
        await desk.close()

    done(work())


def test_a_call_during_a_worker_restart_fails_as_not_ready(fake: FakeDesk) -> None:
    async def work() -> None:
        desk = new_desk()
        await desk.start()
        fake.holds = True
        asking = asyncio.ensure_future(desk.call(METADATA))
        await turns()
        fake.workers[0].end()
        with pytest.raises(InferError, match="is being restarted") as refused:
            await asking
        assert refused.value.code is Code.NOT_READY
        await desk.close()

    done(work())


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_closing_a_desk_does_not_wait_for_an_answer(fake: FakeDesk, busy: bool) -> None:
    async def work() -> None:
        desk = new_desk()
        await desk.start()
        fake.holds = busy
        asking = asyncio.ensure_future(desk.call(METADATA))
        await turns()
        await desk.close()
        assert fake.workers[0].killed is busy
        await asyncio.gather(asking, return_exceptions=True)

    done(work())


def test_a_call_waiting_for_a_worker_fails_at_once_when_the_desk_is_closed(fake: FakeDesk) -> None:
    async def work() -> None:
        desk = new_desk()
        await desk.start()
        fake.workers[0].serving = False  # its end is not noticed yet
        asking = asyncio.ensure_future(desk.call(METADATA))
        await turns()
        await desk.close()
        with pytest.raises(InferError, match="is stopped"):
            await asyncio.wait_for(asking, 1)

    done(work())
