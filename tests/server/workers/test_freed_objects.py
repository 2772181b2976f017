"""The server's objects for a worker are freed when it ends, without waiting for the garbage collector."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref

import numpy as np
import pytest

from penstock.server.workers.worker import Worker
from tests.server.workers.orders import CALL, GUARD_S, ended, order, scene

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_collector")]
LARGE = np.zeros(1 << 16, np.float32)


async def _used() -> Worker:
    worker = Worker(order())
    await worker.ready
    await worker.call(CALL, b"echo", [LARGE])
    return worker


def _parts(worker: Worker) -> list[weakref.ref[object]]:
    return [weakref.ref(each) for each in (worker, worker._link, worker._process, worker._output)]


async def _until_gone(parts: list[weakref.ref[object]]) -> None:
    async with asyncio.timeout(GUARD_S):
        while any(part() is not None for part in parts):  # noqa: ASYNC110 - the process's thread ends when it does
            await asyncio.sleep(0)


def test_a_killed_worker_leaves_no_objects() -> None:
    async def main() -> None:
        worker = await _used()
        parts = _parts(worker)
        os.kill(worker.pid, signal.SIGKILL)
        await worker.ended
        del worker
        await _until_gone(parts)

    scene(main())


def test_a_stopped_worker_leaves_no_objects() -> None:
    async def main() -> None:
        worker = await _used()
        parts = _parts(worker)
        await ended(worker)
        del worker
        await _until_gone(parts)

    scene(main())


def test_a_worker_that_failed_to_open_leaves_no_objects() -> None:
    async def main() -> None:
        worker = Worker(order(service="no_such_service"))
        parts = _parts(worker)
        await worker.ended
        del worker
        await _until_gone(parts)

    scene(main())
