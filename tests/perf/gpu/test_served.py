"""Served: what is said of a load below the knee."""

from __future__ import annotations

import numpy as np

from penstock.perf.generator.orders import Window
from penstock.perf.gpu.served import _sizes, _usual_ms

MS = 1_000_000


def test_a_brief_stall_does_not_change_the_usual_latency() -> None:
    starts_ns = np.arange(1000, dtype=np.int64) * MS
    took_ns = np.full(1000, 5 * MS)
    took_ns[420:450] = 150 * MS
    window = Window(0, 1000 * MS, starts_ns, starts_ns + took_ns)

    assert _usual_ms(window, 0.99) == 5
    assert np.quantile(window.latencies_ns, 0.99) == 150 * MS


def test_the_batches_of_a_load_are_the_difference_of_two_statistics() -> None:
    before = {1: (3, 3 * MS), 4: (10, 90 * MS)}
    after = {1: (5, 5 * MS), 4: (10, 90 * MS), 8: (2, 7 * MS)}

    assert _sizes(after, before) == "2 sizes in 4 batches: 1 x2 of 1.00, 8 x2 of 3.50 ms"
