"""A server's measurements of a model: the run times in its statistics, or in a list of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrivals import SHAPELESS
from .run_times import RunTimes

_P95 = 1.6448536269514722


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model's run times, as measured on a device. `max_rows`: the largest batch seen."""

    run_times: RunTimes
    max_rows: int


def read_costs(text: str) -> MeasuredModel:
    """Parse run times from statistics, or from a list of {"rows", "mean_ns", "p95_ns"}; `p95_ns` is optional.

    If there are several shapes, the one that ran most is used. Raises: ValueError.
    """
    try:
        entries = _entries(json.loads(text))
        means_ns = {int(entry["rows"]): float(entry["mean_ns"]) for entry in entries if int(entry["rows"]) > 0}
        p95s_ns = {int(entry["rows"]): float(entry.get("p95_ns") or entry["mean_ns"]) for entry in entries}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no run times in the costs: {type(error).__name__}: {error}") from error
    if not means_ns or min(means_ns.values()) <= 0:
        raise ValueError("no run times in the costs: the model has not run yet")
    # one noise for all sizes, the median: a few runs of a size say little about its tail
    noise = float(np.median([_noise(p95s_ns[rows] / mean) for rows, mean in means_ns.items()]))
    return MeasuredModel(RunTimes({SHAPELESS: means_ns}, noise), max(means_ns))


def _entries(document: Any) -> list[dict[str, Any]]:
    if isinstance(document, list):
        return document
    stats = document["model_stats"][-1] if "model_stats" in document else document
    run_times = stats.get("run_times")
    if run_times:
        runs: dict[str, int] = {}
        for entry in run_times:
            runs[_shape(entry)] = runs.get(_shape(entry), 0) + int(entry.get("runs", entry.get("count", 1)))
        most_used = max(runs, key=lambda shape: runs[shape])
        return [entry for entry in run_times if _shape(entry) == most_used]
    stages = ("compute_input", "compute_infer", "compute_output")
    return [
        {"rows": each["batch_size"], "mean_ns": sum(each[stage]["ns"] for stage in stages) / each[stages[1]]["count"]}
        for each in stats["batch_stats"]
        if each[stages[1]]["count"]
    ]


def _shape(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry.get("shapes", entry.get("key")))


def _noise(tail: float) -> float:
    """Return the sigma of a log-normal factor with mean 1 whose 95th percentile is `tail`."""
    if tail <= 1:
        return 0.0
    return _P95 - math.sqrt(max(_P95 * _P95 - 2 * math.log(tail), 0.0))
