"""Metrics: validation of custom ones. Source: seldon-core 1.17.1, metrics.py, validate_metrics."""

from __future__ import annotations

from typing import Any


def are_valid(metrics: Any) -> bool:
    """Return whether metrics are a list of {"type", "key", "value"}, each with a known type and a number."""
    if not isinstance(metrics, list):
        return False
    for metric in metrics:
        if not ("key" in metric and "value" in metric and "type" in metric):
            return False
        if metric["type"] not in ("COUNTER", "GAUGE", "TIMER"):
            return False
        try:
            metric["value"] + 1
        except TypeError:
            return False
    return True
