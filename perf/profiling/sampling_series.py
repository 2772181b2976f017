"""Series: readings at moments of a run, and the samples derived from them. Pure.

Names of values are those of the document's Samples, and of counters, which only grow: `server.cpu_s`, `cpu.busy_s` and
`cpu.all_s` (of all cores), `gpu.<uuid>.energy_total_j` (NVML's, since its driver was loaded) and `gpu.<uuid>.energy_j`
(a metrics page's, since it was first read).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from statistics import fmean

from penstock.perf.reports.document import Samples

GPU = "gpu."
_SHORTEST_S = 0.05
"""Over shorter times, counters with steps of 10 ms give no rate."""
_COUNTERS = ("cpu_s", "busy_s", "all_s", "energy_total_j", "energy_j")
_SUMS: dict[str, Callable[[list[float]], float]] = {
    "utilization": fmean,
    "power_w": fmean,
    "memory_bytes": max,
    "memory_total_bytes": itemgetter(0),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The values read at one moment. Units: `at_s` of the monotonic clock."""

    at_s: float
    values: Mapping[str, float] = field(default_factory=dict)


def samples(readings: Sequence[Reading]) -> Samples:
    """Make the samples of a level. The first reading is not a sample but the start of the time and the counters."""
    rows = [_sample_row(before, after) for before, after in pairwise(readings)]
    names = dict.fromkeys(name for row in rows for name in row)
    return Samples(
        at_s=[round(reading.at_s - readings[0].at_s, 3) for reading in readings[1:]],
        series={name: [row.get(name) for row in rows] for name in names},
    )


def _sample_row(before: Reading, after: Reading) -> dict[str, float]:
    row = {name: value for name, value in after.values.items() if not name.endswith(_COUNTERS)}
    took_s = after.at_s - before.at_s
    if took_s < _SHORTEST_S:
        return row
    cpu_s = counter_growth(before, after, "server.cpu_s")
    if cpu_s is not None:
        row["server.cores"] = cpu_s / took_s
    for prefix in ("", "client."):
        busy_s, all_s = (counter_growth(before, after, f"{prefix}cpu.{each}_s") for each in ("busy", "all"))
        if busy_s is not None and all_s:
            row[f"{prefix}cpu.utilization"] = min(busy_s / all_s, 1.0)
    return row


def counter_growth(before: Reading, after: Reading, name: str) -> float | None:
    """Return the growth of a counter; None if it was not read both times, or was reset."""
    before_value, after_value = before.values.get(name), after.values.get(name)
    return (
        None
        if before_value is None or after_value is None or after_value < before_value
        else after_value - before_value
    )


def known(readings: Iterable[Reading], name: str) -> list[float]:
    """Return the values that were read."""
    return [reading.values[name] for reading in readings if name in reading.values]


def devices(readings: Iterable[Reading]) -> list[str]:
    """Return the UUIDs of the GPUs that were read."""
    uuids = {
        name[len(GPU) :].rpartition(".")[0] for reading in readings for name in reading.values if name.startswith(GPU)
    }
    return sorted(uuids)


def gpus(readings: Sequence[Reading]) -> dict[str, dict[str, float]]:
    """Summarize GPUs as perf_analyzer does: mean utilization and power, maximum memory, the first total."""
    summaries = {}
    for uuid in devices(readings):
        values = {name: known(readings, f"{GPU}{uuid}.{name}") for name in _SUMS}
        summaries[uuid] = {name: float(_SUMS[name](each)) for name, each in values.items() if each}
    return summaries
