"""Whether a call releases the GIL: while the call holds it, no other thread advances, since Python does not switch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRIES = 20


def is_left_by(run: Callable[[], object]) -> bool:
    """Return whether another thread advances during a call, in any of several tries."""
    with _no_switches():
        return any(_another_thread_steps_during(run) for _ in range(TRIES))


@contextmanager
def _no_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _another_thread_steps_during(run: Callable[[], object]) -> bool:
    gate = threading.Lock()
    gate.acquire()
    steps: list[str] = []

    def step() -> None:
        with gate:
            steps.append("taken")

    thread = threading.Thread(target=step)
    thread.start()
    gate.release()
    run()
    stepped = bool(steps)
    thread.join()
    return stepped
