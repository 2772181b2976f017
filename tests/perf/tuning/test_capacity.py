from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.perf.tuning.capacity import CLOSE_RATIO, MAX_PROBES, Probe, find_capacity

TARGET_US = 1000.0


class Queue:
    """Latency grows without bound towards what it can serve, as in a queue; `asked`: the loads it was probed with."""

    def __init__(self, most: float, service_us: float = 100.0) -> None:
        self.most, self.service_us, self.rates = most, service_us, list[float]()

    def __call__(self, load: float) -> Probe:
        self.rates.append(load)
        latency_us = self.service_us / (1 - load / self.most) if load < self.most else 1e9
        return Probe(load, latency_us <= TARGET_US, latency_us)


@given(st.floats(2, 1e6), st.floats(0.3, 3))
def test_the_capacity_is_found_within_a_few_percent_from_any_start(most: float, off: float) -> None:
    queue, true = Queue(most), most * 0.9

    capacity = find_capacity(queue, true * off, (true / 100, true * 100), TARGET_US)

    assert capacity == pytest.approx(true, rel=0.05)
    assert len(queue.rates) <= MAX_PROBES


def test_a_start_near_the_capacity_saves_probes() -> None:
    near, far = Queue(1000), Queue(1000)
    find_capacity(near, 880, (1, 1e5), TARGET_US)
    find_capacity(far, 100, (1, 1e5), TARGET_US)

    assert len(near.rates) <= 4 < len(far.rates)


def test_a_server_that_never_meets_the_target_has_no_capacity() -> None:
    assert find_capacity(Queue(1000, service_us=5000), 100, (1, 1e4), TARGET_US) == 0


def test_the_upper_bound_is_returned_if_it_is_handled() -> None:
    assert find_capacity(Queue(1e9), 100, (10, 200), TARGET_US) == 200


@given(st.integers(1, 64), st.integers(1, 64))
@example(39, 1)  # a long climb leaves too few probes to come closer
def test_integer_loads_are_whole_numbers_and_end_close_to_the_capacity_or_with_the_last_probe(
    most: int, start: int
) -> None:
    probed = []

    def probe(load: float) -> Probe:
        probed.append(load)
        return Probe(load, load <= most, load * 10)

    capacity = find_capacity(probe, start, (1, 64), TARGET_US, integer=True)

    assert all(load == int(load) and 1 <= load <= 64 for load in probed)
    assert capacity <= most
    assert len(probed) == MAX_PROBES or capacity >= most / CLOSE_RATIO - 1
