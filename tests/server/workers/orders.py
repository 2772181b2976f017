"""Helpers for the tests of workers: orders for `scripted_service.py`, and checks that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from penstock.server.workers.order import Order
from penstock.server.workers.worker import Worker
from tests.processes import children, lives

T = TypeVar("T")
HERE = str(Path(__file__).parent)
CALL = 32
GUARD_S = 20.0


def order(**members: Any) -> Order:
    """Return an order for the service; the keywords are its fields, and `settings`."""
    return Order(
        **{"service": "scripted_service", "settings": {}, "label": "the test's worker", "path": (HERE,), **members}
    )


def scene(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop, and check that nothing is left of it."""
    uvloop.run(asyncio.sleep(0))  # the first loop of a process opens descriptors that it never closes
    before, others = descriptors(), children()  # for example the resource tracker of other tests

    async def guarded() -> T:
        return await asyncio.wait_for(work, GUARD_S)

    result = uvloop.run(guarded())
    open_count = descriptors() - before
    assert not open_count, open_count
    assert not children() - others, children()
    return result


async def ended(worker: Worker) -> None:
    """Stop a worker, and wait until it has ended."""
    worker.stop()
    await worker.ended


def descriptors() -> set[str]:
    """Return the open descriptors of this process that workers could leave behind."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this folder itself
            found.add(f"{path.name} {path.readlink()}")
    return {each for each in found if "/proc/" not in each}


def group_members(group: int) -> set[int]:
    """Return the processes that run in a process group."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member_of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(member_of) == group and state not in "ZX":
            found.add(int(path.parent.name))
    return found


def ends_within(pid: int, limit_s: float) -> bool:
    """Poll until a process is gone; there is no event to wait for."""
    end = time.monotonic() + limit_s
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.005)
    return not lives(pid)
