from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from penstock.batching.timer import KernelTimer, LoopTimer
from penstock.perf.generator.alarm import EarlyTimer

KINDS: list[Any] = [LoopTimer, KernelTimer, EarlyTimer]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def make_alarm(request: pytest.FixtureRequest) -> Callable[[Callable[[], None]], Any]:
    kind: Any = request.param
    return lambda ring: kind(asyncio.get_running_loop(), ring)


def test_an_alarm_rings_when_due_and_not_before(make_alarm: Callable[[Callable[[], None]], Any]) -> None:
    async def case() -> list[int]:
        rung: list[int] = []
        done = asyncio.Event()

        def ring() -> None:
            now_ns = time.monotonic_ns()
            if now_ns < at_ns:  # the loop's own timers are rounded
                alarm.set(at_ns)
                return
            rung.append(now_ns)
            alarm.disarm()
            done.set()

        alarm = make_alarm(ring)
        alarm.set(time.monotonic_ns() + 3_600_000_000_000)
        at_ns = time.monotonic_ns() + 2_000_000
        alarm.set(at_ns)
        await done.wait()
        alarm.close()
        return [at_ns, *rung]

    at_ns, rung_ns = uvloop.run(case())

    assert rung_ns >= at_ns


def test_an_alarm_set_in_the_past_rings_at_once(make_alarm: Callable[[Callable[[], None]], Any]) -> None:
    async def case() -> None:
        done = asyncio.Event()

        def ring() -> None:
            alarm.disarm()
            done.set()

        alarm = make_alarm(ring)
        alarm.set(-5)
        await done.wait()
        alarm.close()
        alarm.close()

    uvloop.run(case())


def test_a_silenced_alarm_does_not_ring(make_alarm: Callable[[Callable[[], None]], Any]) -> None:
    async def case() -> list[str]:
        rung: list[str] = []
        alarm = make_alarm(lambda: rung.append("rung"))
        alarm.set(time.monotonic_ns())
        alarm.disarm()
        for _ in range(20):
            await asyncio.sleep(0)
        alarm.close()
        return rung

    assert uvloop.run(case()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="timer files are Linux's")
def test_a_wake_up_for_a_revoked_time_does_not_ring() -> None:
    async def case() -> list[str]:
        rung: list[str] = []
        alarm = EarlyTimer(asyncio.get_running_loop(), lambda: rung.append("rung"))
        alarm.set(time.monotonic_ns() + 3_600_000_000_000)
        alarm._wake()  # the loop had heard of the time before
        alarm.close()
        return rung

    assert uvloop.run(case()) == []
