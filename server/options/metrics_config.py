"""MetricsConfig: --metrics-config. Parsed with the settings, so an invalid value prevents startup.

Source: Triton server, docs/user_guide/metrics.md (names, defaults and forms).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_QUANTILES: tuple[tuple[str, float], ...] = (
    ("0.5", 0.05),
    ("0.9", 0.01),
    ("0.95", 0.001),
    ("0.99", 0.001),
    ("0.999", 0.001),
)
"""Source: Triton core, metrics.h."""

MIN_ERROR = 0.0001
"""A smaller error is raised to this one."""
_NUMBER = re.compile(r"\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE)
_BOOLEANS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which latencies the page reports. `quantiles`: each quantile as written, and its allowed error."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[tuple[str, float], ...] = DEFAULT_QUANTILES

    @property
    def capacity(self) -> int:
        """How many values a Sketch must keep for the smallest error, at up to 80,000 requests/s."""
        return max(1024, math.ceil(4 / min(error for _, error in self.quantiles)))


def parse(entries: Iterable[str]) -> MetricsConfig:
    """Read the values of --metrics-config.

    Raises: ValueError.
    """
    switches: dict[str, bool] = {}
    quantiles = DEFAULT_QUANTILES
    for entry in entries:
        name, equals, text = (part.strip() for part in entry.partition("="))
        if name == "summary_quantiles" and equals:
            quantiles = _parse_quantiles(text)
        elif name in _SWITCHES and text.lower() in _BOOLEANS:
            switches[name] = _BOOLEANS[text.lower()]
        else:
            wanted = f"{'|'.join(_SWITCHES)}=true|false or summary_quantiles=QUANTILE:ERROR,..."
            raise ValueError(f"'{entry}' must have the form {wanted}")
    return MetricsConfig(**switches, quantiles=quantiles)


def _parse_quantiles(text: str) -> tuple[tuple[str, float], ...]:
    quantiles: dict[str, float] = {}
    for pair in text.strip("\"'").split(","):
        quantile, _, error = (part.strip() for part in pair.partition(":"))
        try:
            allowed = _parse_error(error)
            is_valid = 0 <= float(quantile) <= 1 and allowed <= 1
        except ValueError:
            is_valid = False
        if not is_valid or quantile in quantiles:
            raise ValueError(f"summary_quantiles must look like 0.5:0.05, not '{pair}'")
        quantiles[quantile] = allowed
    return tuple(quantiles.items())


def _parse_error(text: str) -> float:
    """Read the leading number of an error, as Triton does: its qa/L0_metrics has 0.0.1. Raises: ValueError."""
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(text)
    return max(float(match[0]), MIN_ERROR)
