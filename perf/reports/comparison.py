"""Comparing: the differences between runs, whether they are comparable, and their ratios, level by level.

The other runs are compared with the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .document import Document, Level
from .findings import fault
from .formats import NOTHING
from .markup import flatten

_COMPARABLE = {"model": "models", "client batch": "client batches", "protocol": "protocols", "machine": "machines"}
"""What must be equal for a ratio to reflect the servers only, and its name in warnings."""

_IGNORED_OPTIONS = {"url", "csv", "json", "html", "export"}
"""Options that are reported elsewhere, or only name output files."""


@dataclass(frozen=True, slots=True)
class Run:
    """A document and its name in a comparison: that of its file."""

    name: str
    document: Document


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between runs: `values` in the order of the runs, a dash for a run without the value."""

    part: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """One load in one run, beside the same load in the first: ratios of the run to the first, None if unknown."""

    run: Run
    level: Level
    base: Level

    def ratio(self, figure: str) -> float | None:
        """Return a ratio: `throughput`, `cpu` (of the server, per request), `energy`, or a latency such as p99."""
        return _quotient(_figure(self.level, figure), _figure(self.base, figure))

    @property
    def doubt(self) -> str:
        """Why the ratios are unreliable; empty if both levels are sound."""
        return fault(self.level) or fault(self.base)


def _figure(level: Level, figure: str) -> float | None:
    match figure:
        case "throughput":
            return level.client.rows_per_s
        case "cpu":
            return level.server_cpu_s_per_1000
        case "energy":
            return level.energy_j_per_1000
        case _:
            return level.client.latency_us.get(figure)


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def runs(documents: Sequence[tuple[str, Document]]) -> list[Run]:
    """Give runs unique names, by numbering equal ones."""
    runs_found: list[Run] = []
    for name, document in documents:
        same_name_count = sum(each.name == name or each.name.startswith(f"{name} (") for each in runs_found)
        runs_found.append(Run(f"{name} ({same_name_count + 1})" if same_name_count else name, document))
    return runs_found


def _parts(document: Document) -> dict[str, dict[str, Any]]:
    model = document.model
    return {
        "model": {"name": model.name, "platform": model.platform, "inputs": model.inputs, "outputs": model.outputs},
        "model's version": {"": model.version},
        "configuration": {"fingerprint": model.fingerprint, **model.config},
        "client batch": {"": document.batch},
        "protocol": {"": document.protocol},
        "server": {"at": document.url, **document.server},
        "machine": document.machine,
        "versions": document.versions,
        "options": {name: each for name, each in document.options.items() if name not in _IGNORED_OPTIONS},
    }


def differences(compared: Sequence[Run]) -> list[Difference]:
    """Return what differs between the runs, in order of importance."""
    flattened = [{part: flatten(pairs) for part, pairs in _parts(run.document).items()} for run in compared]
    differences_found = []
    for part in flattened[0]:
        names = dict.fromkeys(name for each in flattened for name in each[part])
        for name in names:
            values = tuple(each[part].get(name, NOTHING) for each in flattened)
            if len(set(values)) > 1:
                differences_found.append(Difference(part, name, values))
    return differences_found


def warnings(compared: Sequence[Run]) -> list[str]:
    """Say why the runs cannot be compared, or only with care; empty if they can."""
    lines = []
    all_differences = differences(compared)
    for part, plural in _COMPARABLE.items():
        names = [each.name for each in all_differences if each.part == part]
        if names:
            which_ones = f" ({', '.join(filter(None, names))})" if any(names) else ""
            lines.append(f"The runs are of different {plural}{which_ones}: their ratios are not of the servers alone.")
    kinds = {level.offered.kind for run in compared for level in run.document.levels}
    if not pairs(compared) and len(compared) > 1:
        lines.append("No load is in the first run and in another: there is no ratio to give.")
    elif len(kinds) > 1:
        lines.append("Not all levels are of the same kind of load.")
    for run in compared:
        if run.document.failed or run.document.interrupted:
            reason = run.document.failed or "it was interrupted"
            lines.append(f"{run.name} ended before its time: {reason}.")
    return lines


def pairs(compared: Sequence[Run]) -> list[Pair]:
    """Return each level of a later run with the same load in the first, by load, then by run."""
    base: dict[tuple[str, float, str], Level] = {}
    for level in compared[0].document.levels:
        base.setdefault(_load(level), level)
    pairs_found = [
        Pair(run, level, base[_load(level)])
        for run in compared[1:]
        for level in run.document.levels
        if _load(level) in base
    ]
    return sorted(pairs_found, key=lambda pair: pair.level.offered.value)


def _load(level: Level) -> tuple[str, float, str]:
    return level.offered.kind, level.offered.value, level.offered.distribution
