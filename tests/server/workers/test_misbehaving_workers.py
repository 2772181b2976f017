"""Workers that send invalid messages or harm themselves lose their calls and are killed; the server is unaffected."""

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
from tests.server.workers.orders import CALL, descriptors, ended, order, scene

pytestmark = pytest.mark.slow


def lying() -> Order:
    return order(service="misbehaving_service")


def unfit(kind: int, number: int, body: bytes, arrays: list[Any]) -> None:
    raise KeyError("what a worker has told")


@pytest.mark.parametrize(
    "lie",
    [b"garbage", b"error_that_is_none", b"error_without_a_code", b"answer_to_another", b"what_nobody_takes"],
)
def test_an_invalid_message_ends_the_worker_and_fails_its_calls(lie: bytes) -> None:
    async def work() -> None:
        worker = Worker(lying(), on_message=unfit)
        await worker.ready
        call = worker.call(CALL, lie)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(call, 5)
        await worker.ended

    scene(work())


def test_unexpected_descriptors_from_a_worker_are_closed() -> None:
    async def work() -> None:
        worker = Worker(lying(), on_message=lambda *_: None)
        await worker.ready
        before = len(descriptors())
        assert (await worker.call(CALL, b"descriptors"))[0] == b"sent"
        assert len(descriptors()) == before
        worker.kill("enough")
        await worker.ended

    scene(work())


def test_a_worker_cannot_truncate_memory_that_the_server_reads() -> None:
    async def work() -> None:
        worker = Worker(lying())
        large = np.zeros(100_000)
        await worker.call(CALL, b"echo", [large])
        reply, _ = await worker.call(CALL, b"truncated")
        # the server maps the memory that records which call has begun, and reading it truncated would crash the server
        assert reply == str(errno.EPERM).encode()
        os.kill(worker.pid, 9)
        await worker.ended

    scene(work())


def test_a_child_that_writes_after_its_worker_died_does_not_block_the_loop() -> None:
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


def test_a_worker_ends_with_its_service_whatever_its_threads_do() -> None:
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
def test_an_error_that_cannot_be_serialized_is_still_an_error_of_its_call(act: bytes, text: str) -> None:
    async def work() -> None:
        worker = Worker(lying())
        with pytest.raises(InferError, match=text) as caught:
            await worker.call(CALL, act)
        assert not isinstance(caught.value, WorkerLost)
        assert (await worker.call(CALL, b"on"))[0] == b"on"
        await ended(worker)

    scene(work())


def test_user_code_that_changes_its_process_does_no_harm() -> None:
    async def work() -> None:
        worker = Worker(lying())
        await worker.call(CALL, b"at_home")
        large = np.arange(100_000.0)
        _, arrays = await worker.call(CALL, b"echo", [large])
        assert np.array_equal(arrays[0], large)  # type: ignore[arg-type]
        await ended(worker)

    scene(work())
