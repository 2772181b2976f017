"""Workers that lie, and that harm themselves: each loses its calls and its life, and the server nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import InferError
from penstock.server.workers.order import Order, WorkerLost
from penstock.server.workers.worker import Worker
from tests.server.workers.scene import CALL, descriptors, ended, order, scene

pytestmark = pytest.mark.slow


def lying() -> Order:
    return order(service="lying")


def unfit(kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
    raise KeyError("what a worker has told")


@pytest.mark.parametrize(
    "lie",
    [b"garbage", b"error_that_is_none", b"error_without_a_code", b"answer_to_another", b"what_nobody_takes"],
)
def test_a_worker_that_lies_is_ended_and_whoever_waited_is_told(lie: bytes) -> None:
    async def work() -> None:
        worker = Worker(lying(), on_message=unfit)
        await worker.ready
        call = worker.call(CALL, lie)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(call, 5)
        await worker.ended

    scene(work())


def test_descriptors_that_nobody_has_asked_for_are_closed() -> None:
    async def work() -> None:
        worker = Worker(lying(), on_message=lambda *_: None)
        await worker.ready
        before = len(descriptors())
        assert (await worker.call(CALL, b"descriptors"))[0] == b"sent"
        assert len(descriptors()) == before
        worker.kill("enough")
        await worker.ended

    scene(work())


def test_memory_that_the_server_reads_cannot_be_taken_from_under_it() -> None:
    async def work() -> None:
        worker = Worker(lying())
        large = np.zeros(100_000)
        await worker.call(CALL, b"echo", [large])
        said, _ = await worker.call(CALL, b"truncated")
        # what tells which call had begun is mapped by the server, and it would die of reading what is not there
        assert said == str(errno.EPERM).encode()
        os.kill(worker.pid, 9)
        await worker.ended

    scene(work())


def test_a_child_that_goes_on_writing_for_a_dead_worker_does_not_hold_the_loop() -> None:
    async def work() -> float:
        worker = Worker(lying(), on_message=lambda *_: None)
        await worker.ready
        loop, slowest = asyncio.get_running_loop(), 0.0
        call = worker.call(CALL, b"orphan")
        while not worker.ended.done():
            before = loop.time()
            await asyncio.sleep(0.001)
            slowest = max(slowest, loop.time() - before)
        with pytest.raises(WorkerLost):
            await call
        return slowest

    assert scene(work()) < 10.0  # the child goes on for 15 s


def test_a_worker_whose_service_has_ended_ends_whatever_its_threads_do() -> None:
    async def work() -> None:
        worker = Worker(lying())
        await worker.ready
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(worker.call(CALL, b"lame"), 5)
        await worker.ended

    scene(work())


@pytest.mark.parametrize(
    ("act", "text"), [(b"speechless", "ValueError: lost words"), (b"unspeakable", "UnspeakableError")]
)
def test_an_error_that_cannot_be_written_down_is_an_error_all_the_same(act: bytes, text: str) -> None:
    async def work() -> None:
        worker = Worker(lying())
        with pytest.raises(InferError, match=text) as caught:
            await worker.call(CALL, act)
        assert not isinstance(caught.value, WorkerLost)
        assert (await worker.call(CALL, b"on"))[0] == b"on"
        await ended(worker)

    scene(work())


def test_code_that_changes_its_process_harms_nothing() -> None:
    async def work() -> None:
        worker = Worker(lying())
        await worker.call(CALL, b"at_home")
        large = np.arange(100_000.0)
        _, arrays = await worker.call(CALL, b"echo", [large])
        assert np.array_equal(arrays[0], large)  # type: ignore[arg-type]
        await ended(worker)

    scene(work())
