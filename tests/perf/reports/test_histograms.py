"""Histograms hold three digits of every latency."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.reports import histograms
from penstock.perf.reports.extras import MissingExtraError
from penstock.perf.reports.histograms import MOST_NS, HistogramError, distribution

EXACT = 1e-3
_LATENCIES = st.lists(
    st.integers(1, MOST_NS) | st.integers(1, 5000) | st.integers(10**5, 10**7), min_size=1, max_size=60
).map(lambda each: np.array(each, np.int64))


@settings(deadline=None)
@given(_LATENCIES, st.floats(0, 100) | st.sampled_from([0.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_every_percentile_is_within_a_thousandth_of_the_exact_one(latencies: np.ndarray, percentile: float) -> None:
    measured = distribution(histograms.text(latencies)).percentile_us(percentile) * 1e3

    rank = max(math.ceil(Fraction(percentile) * len(latencies) / 100 - Fraction(1, 10**6)), 1)
    true = int(np.sort(latencies)[rank - 1])
    assert true <= measured * (1 + 1e-12)
    assert measured <= true * (1 + EXACT)


def test_percentiles_of_many_requests_agree_with_numpy() -> None:
    latencies = np.random.default_rng(1).lognormal(14, 0.7, 200_000).astype(np.int64)
    measured = distribution(histograms.text(latencies))

    for percentile in (1, 10, 50, 75, 90, 95, 99, 99.95, 99.99):
        true = float(np.percentile(latencies, percentile)) / 1e3
        assert measured.percentile_us(percentile) == pytest.approx(true, rel=EXACT)


@settings(deadline=None)
@given(_LATENCIES, st.integers(1, 10**10))
def test_the_share_within_a_target_is_exact_to_a_thousandth_of_the_target(
    latencies: np.ndarray, target_ns: int
) -> None:
    measured = distribution(histograms.text(latencies)).share_within(target_ns / 1e3)

    assert np.mean(latencies <= target_ns) <= measured + 1e-12
    assert measured <= np.mean(latencies <= target_ns * (1 + EXACT) + 1) + 1e-12


@settings(deadline=None, max_examples=5)  # the package's own iterator is slow
@given(_LATENCIES)
def test_the_reference_implementation_reads_the_same_values(latencies: np.ndarray) -> None:
    written = histograms.text(latencies)
    counts_by_value = {each.value_iterated_to: each.count_added_in_this_iter_step for each in histograms.read(written)}
    measured = distribution(written)

    assert dict(zip(measured.highest_ns.tolist(), measured.counts.tolist(), strict=True)) == counts_by_value


def test_an_empty_histogram_has_no_percentile() -> None:
    for written in ("", histograms.text(np.empty(0, np.int64))):
        assert distribution(written).total == 0
        assert math.isnan(distribution(written).percentile_us(50))
        assert math.isnan(histograms.share_within(written, 1.0))


def test_latencies_out_of_range_are_clipped() -> None:
    measured = distribution(histograms.text(np.array([-5, 0, 2 * MOST_NS])))

    assert measured.total == 3
    assert measured.percentile_us(50) == 1e-3
    assert measured.percentile_us(100) == pytest.approx(MOST_NS / 1e3, rel=EXACT)


@settings(deadline=None)
@given(st.text(max_size=40) | st.binary(max_size=60).map(lambda each: each.hex()))
def test_invalid_text_is_rejected(written: str) -> None:
    try:
        histograms.read(written)
    except HistogramError as refused:
        assert "not a histogram" in str(refused)  # noqa: PT017 (either is right)


@pytest.mark.parametrize("cut", [10, 40, 100])
def test_truncated_text_is_rejected(cut: int) -> None:
    with pytest.raises(HistogramError):
        histograms.read(histograms.text(np.arange(1, 5000) * 1000)[:cut])


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdrh.histogram", None)

    with pytest.raises(MissingExtraError, match=r"needs hdrh.*: pip install 'penstock\[perf\]'"):
        histograms.text(np.array([1]))
