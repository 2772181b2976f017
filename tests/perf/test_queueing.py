"""Queueing theory held against what a queue does, and the queue's own rule."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf import queueing
from penstock.perf.queueing import DETERMINISTIC, EXPONENTIAL, LAWS, Line, Md1, Mm1, departures, services_ns, theory

REQUESTS = 1_000_000
TIMES = st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**8)), min_size=1, max_size=50)


@functools.cache
def stays(law: str, load: float) -> queueing.Floats:
    """Let a queue of mean service 1 run for long, and say how long each request stayed."""
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(1e9 / load, REQUESTS)).astype(np.int64)
    departed = departures(arrivals, services_ns(law, 10**9, REQUESTS, seed=8))
    return np.asarray((departed - arrivals)[REQUESTS // 100 :] / 1e9)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("law", LAWS)
def test_a_long_simulation_agrees_with_theory(law: str, load: float) -> None:
    expected, simulated = theory(law, 1.0, load), stays(law, load)

    assert simulated.mean() == pytest.approx(expected.mean, rel=0.03)
    for share in (0.5, 0.9, 0.99):
        assert float(np.quantile(simulated, share)) == pytest.approx(expected.quantile(share), rel=0.05)


@pytest.mark.parametrize("load", [0.5, 0.7, 0.9])
def test_the_distribution_with_constant_service_agrees_with_a_simulation(load: float) -> None:
    expected, simulated = Md1(1.0, load), stays(DETERMINISTIC, load)
    for time in (0.5, 1.0, 1.5, 1.99, 2.0, 3.3, 10.0):
        assert expected.within(time) == pytest.approx(float((simulated <= time + 1e-9).mean()), abs=0.01)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.parametrize("law", LAWS)
def test_the_mean_is_the_area_above_the_distribution(law: str, load: float) -> None:
    expected, step = theory(law, 1.0, load), 0.25
    area = sum(1 - expected.within(time) for time in np.arange(step / 2, 12 * expected.mean, step))

    assert area * step == pytest.approx(expected.mean, rel=0.005)


@given(st.sampled_from(LAWS), st.floats(0.01, 0.98), st.floats(0.01, 0.999))
def test_a_quantile_is_exceeded_by_the_right_share(law: str, load: float, share: float) -> None:
    expected = theory(law, 3.0, load)
    time = expected.quantile(share)

    assert expected.within(time) >= share - 1e-9
    if time > 3.0:  # below are those of a constant service who find nobody there, all at once
        assert expected.within(time) == pytest.approx(share, abs=1e-6)


@given(st.sampled_from(LAWS), st.floats(0.01, 0.98), st.floats(0, 100), st.floats(0, 100))
def test_the_distribution_is_monotonic(law: str, load: float, one: float, other: float) -> None:
    expected = theory(law, 1.0, load)
    shares = [expected.within(time) for time in sorted((one, other))]

    assert 0 <= shares[0] <= shares[1] + 1e-12 <= 1 + 1e-9


def test_an_unloaded_queue_is_empty() -> None:
    present = Md1(1.0, 0.7).present(400)

    assert present[0] == pytest.approx(0.3)
    assert present[1] == pytest.approx(0.3 * math.expm1(0.7))  # Kendall (1951)
    assert present.sum() == pytest.approx(1)
    assert present @ np.arange(400) == pytest.approx(0.7 * Md1(1.0, 0.7).mean)  # Little (1961)


def test_the_tail_stays_accurate_where_alternating_sums_cancel() -> None:
    far = [1 - Md1(1.0, 0.9).within(time) for time in (50.0, 60.0, 70.0)]

    assert far[1] / far[0] == pytest.approx(far[2] / far[1], rel=1e-3)  # it falls as an exponential


def test_half_of_the_requests_at_half_load_do_not_wait() -> None:
    assert Md1(8.0, 0.5).quantile(0.5) == 8.0
    assert Mm1(8.0, 0.5).quantile(0.5) == pytest.approx(16 * math.log(2))


@given(TIMES)
def test_a_request_departs_one_service_after_its_arrival_or_the_previous_departure(
    times: list[tuple[int, int]],
) -> None:
    arrivals = np.array(sorted(at for at, _ in times), np.int64)
    services = np.array([service for _, service in times], np.int64)
    departed = 0
    for at, service, departure in zip(arrivals, services, departures(arrivals, services), strict=True):
        departed = max(int(at), departed) + int(service)
        assert departure == departed


@given(TIMES)
def test_departures_one_by_one_equal_those_computed_together(times: list[tuple[int, int]]) -> None:
    arrivals = np.array(sorted(at for at, _ in times), np.int64)
    services = np.array([service for _, service in times], np.int64)
    line = Line()
    departures_one_by_one = [
        line.departure(at, service) for at, service in zip(arrivals.tolist(), services.tolist(), strict=True)
    ]

    assert departures_one_by_one == departures(arrivals, services).tolist()


@pytest.mark.parametrize("law", LAWS)
def test_a_longer_draw_begins_with_the_same_service_times(law: str) -> None:
    few, many = services_ns(law, 1000, 5, seed=3), services_ns(law, 1000, 5000, seed=3)

    assert many[:5].tolist() == few.tolist()
    assert float(many.mean()) == pytest.approx(1000, rel=0.05)


def test_exponential_service_times_depend_on_the_seed() -> None:
    assert services_ns(EXPONENTIAL, 10**6, 5, seed=1).tolist() != services_ns(EXPONENTIAL, 10**6, 5, seed=2).tolist()
