"""Histograms of latencies: HdrHistogram's, from the `hdrhistogram` package, filled and read with arrays.

Three digits: a latency read back is never lower than it was, and at most a thousandth higher.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.perf.generator.orders import NO_TIMES, Times

from .extras import needed

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

MOST_NS = 3_600_000_000_000
DIGITS = 3


class HistogramError(ValueError):
    """A text is not a histogram."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The content of a histogram: `lowest_ns` and `highest_ns` of each bucket in use, ascending, and its `counts`."""

    lowest_ns: Times
    highest_ns: Times
    counts: Times

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def percentile_us(self, percentile: float) -> float:
        """Return the latency that a percentage does not exceed, rounding the rank up; NaN if there are none."""
        if not len(self.counts):
            return math.nan
        through = np.cumsum(self.counts)
        # rounded first: 99.9 of 1000 is 999, and not the least bit more
        rank = max(math.ceil(round(percentile / 100 * int(through[-1]), 6)), 1)
        return float(self.highest_ns[np.searchsorted(through, rank)]) / 1e3

    def share_within(self, us: float) -> float:
        """Return the fraction, 0 to 1, that took no longer, to three digits of the latency; NaN if there are none."""
        if not len(self.counts):
            return math.nan
        return int(self.counts[: np.searchsorted(self.lowest_ns, us * 1e3, side="right")].sum()) / self.total


def histogram(latencies_ns: Times) -> HdrHistogram:
    """Count latencies from 1 ns to an hour."""
    hdr: HdrHistogram = needed("hdrh.histogram").HdrHistogram(1, MOST_NS, DIGITS)
    # values of one bucket are counted alike: rounded to slightly more than three digits, few distinct ones remain
    clipped = np.clip(latencies_ns, 1, MOST_NS)
    shift = np.maximum(np.frexp(clipped)[1] - 12, 0)
    values, counts = np.unique((clipped >> shift) << shift, return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        hdr.record_value(value, count)
    return hdr


def text(latencies_ns: Times) -> str:
    """Format a histogram as a document stores it."""
    return str(histogram(latencies_ns).encode().decode("ascii"))


def read(encoded: str) -> HdrHistogram:
    """Parse what `text` returned. Raises: HistogramError."""
    hdrh, codec = needed("hdrh.histogram"), needed("hdrh.codec")
    decode_errors = (codec.HdrCookieException, codec.HdrLengthException, codec.HdrHistogramSettingsException)
    try:
        return hdrh.HdrHistogram.decode(encoded)
    except (ValueError, TypeError, IndexError, MemoryError, zlib.error, *decode_errors) as error:
        raise HistogramError(f"not a histogram: {error or type(error).__name__}") from error


def distribution(encoded: str) -> Distribution:
    """Parse a histogram into arrays; an empty text is an empty one. Raises: HistogramError."""
    if not encoded:
        return Distribution(NO_TIMES, NO_TIMES, NO_TIMES)
    hdr = read(encoded)
    counts = np.ctypeslib.as_array(hdr.counts)
    index = np.flatnonzero(counts)
    # HdrHistogram's layout: `half` cells in a bucket, twice as wide as in the previous; the first has twice as many
    half = hdr.sub_bucket_half_count
    bucket = np.maximum(index // half - 1, 0)
    lowest = (index - bucket * half) << (bucket + hdr.unit_magnitude)
    width = np.int64(1) << (bucket + hdr.unit_magnitude)
    return Distribution(lowest, lowest + width - 1, counts[index].astype(np.int64))


def share_within(encoded: str, us: float) -> float:
    """Return the fraction of a histogram's text that took no longer. Raises: HistogramError."""
    return distribution(encoded).share_within(us)
