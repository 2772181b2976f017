"""Shared by the tests of trainings: Trainers that the test controls, and a clock that stands still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from penstock.backends.errors import Code, InferError
from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.store import Store
from penstock.server.deepaas.trainings import Trainings

T = TypeVar("T")
NOON = datetime(2026, 11, 23, 12, 0, 0, 250)  # noqa: DTZ001 - as the original's dates


class Clock:
    """A clock that moves only when a test advances it."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        """Tell the time."""
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)


class FakeTrainer:
    """A Trainer that the test ends. `request`: the request that it runs, None before."""

    def __init__(self, name: str, uuid: str, line: Callable[[str], None]) -> None:
        self.name, self.uuid, self.line = name, uuid, line
        self.training = False
        self.request: bytes | None = None
        self.ended = False
        self._end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def run(self, request: bytes) -> bytes:
        """Wait for the test."""
        self.request, self.training = request, True
        try:
            return await self._end
        finally:
            self.ended = True

    def kill(self, why: str) -> None:
        """End it as a real trainer."""
        self.fail(why)

    def give(self, output: Any) -> None:
        """Have the training succeed."""
        if not self._end.done():
            self._end.set_result(json.dumps({"output": output}).encode())

    def raise_(self, words: str) -> None:
        """Have the training raise."""
        if not self._end.done():
            self._end.set_result(json.dumps({"error": words}).encode())

    def fail(self, why: str) -> None:
        """Have its process end."""
        if not self._end.done():
            self._end.set_exception(InferError(Code.NOT_READY, why))


class Bench:
    """Trainings with FakeTrainers: `trainers`, in the order in which they started."""

    def __init__(self, at_once: int = 1, file: Path | None = None) -> None:
        self.clock = Clock()
        self.trainers: list[FakeTrainer] = []
        self.runs = Trainings(self._make, Store(file), at_once, self.clock)

    def _make(self, name: str, uuid: str, line: Callable[[str], None]) -> FakeTrainer:
        self.trainers.append(FakeTrainer(name, uuid, line))
        return self.trainers[-1]

    async def add(self, name: str = "m", request: bytes = b"asked") -> str:
        """Add a training. Returns: its uuid, once it runs or waits."""
        run = await self.runs.add(name, {"epochs": 3}, request)
        await turns()
        return run.record.uuid


async def turns(count: int = 20) -> None:
    """Let the loop run all pending callbacks."""
    for _ in range(count):
        await asyncio.sleep(0)


def shown(answer: bytes) -> Any:
    """Read a JSON answer with status 200."""
    status, kind, _, body = read_answer(answer)
    assert (status, kind.partition(b"\r\n")[0]) == (200, b"application/json; charset=utf-8")
    return json.loads(body)


def done(work: Coroutine[Any, Any, T]) -> T:
    """Run it within a test's time limit."""

    async def guarded() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(guarded())
