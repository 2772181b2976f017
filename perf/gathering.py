"""Gathering: the time NumPy and Penstock take to gather rows, alone and beside a thread that computes.

`python -m penstock.perf.gathering`. The other thread stands in for the event loop of a busy server; the thread switch
interval is the server's. Medians, in turns.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from penstock.backends.gathering import gather
from penstock.server.process import SWITCH_S

CASES = ((16, (512,)), (64, (512,)), (128, (128,)), (64, (3, 224, 224)))
"""The number of rows in a batch, one per request, and their shape."""
_TURNS, _TURN_S = 7, 0.15


def main() -> None:
    """Print a line for each case."""
    sys.setswitchinterval(SWITCH_S)
    print(f"{'rows':>5} {'of':>14} {'numpy us':>10} {'ours':>10} {'numpy, busy':>12} {'ours, busy':>12}")
    for rows, shape in CASES:
        calls = _calls(rows, shape)
        alone = _medians_us(calls)
        with _busy():
            beside = _medians_us(calls)
        figures = " ".join(f"{us:>{width},.1f}" for us, width in zip((*alone, *beside), (10, 10, 12, 12), strict=True))
        print(f"{rows:>5} {shape!s:>14} {figures}")


def _calls(rows: int, shape: tuple[int, ...]) -> list[Callable[[], object]]:
    parts = [np.random.default_rng(row).random((1, *shape), np.float32) for row in range(rows)]
    buffer = np.empty((rows, *shape), np.float32)
    return [partial(np.concatenate, parts, out=buffer), partial(gather, parts, buffer)]


def _medians_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    turns: list[list[float]] = [[] for _ in calls]
    for _ in range(_TURNS):
        for call, seen in zip(calls, turns, strict=True):
            begin, count = time.perf_counter(), 0
            while (took := time.perf_counter() - begin) < _TURN_S or not count:
                call()
                count += 1
            seen.append(took / count * 1e6)
    return [statistics.median(seen) for seen in turns]


@contextmanager
def _busy() -> Iterator[None]:
    """Keep another thread computing."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(2000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
