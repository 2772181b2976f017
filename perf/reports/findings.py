"""Findings: conclusions from the levels of a run: which count, the best, the knee, and goodput at a target.

Throughput is inferences/s, the rows of all successful requests, as in perf_analyzer; latencies are in us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .document import Document, Level, Offered
from .formats import count, per_s
from .histograms import distribution

FEW_ERRORS = 0.001
"""Up to this fraction of errors a level still counts, since its other figures are valid; it is marked."""
GENERATOR_LATE = 0.1
SHORT_OF_OFFERED = 0.95
MET = 0.99
"""The fraction within the target from which a level is said to meet it."""


def load(offered: Offered) -> str:
    """Name a load in a few characters: 8, or 1,000/s."""
    if offered.kind == "concurrency":
        return f"{offered.value:g}"
    return per_s(offered.value) if offered.value else offered.kind


def load_words(offered: Offered) -> str:
    """Name a load in words."""
    if offered.kind == "concurrency":
        return f"concurrency {offered.value:g}"
    if offered.kind == "rate":
        return f"{per_s(offered.value)} due" + (f" ({offered.distribution})" if offered.distribution else "")
    return "recorded intervals" + (f", {per_s(offered.value)}" if offered.value else "")


def failures(level: Level) -> int:
    """Count a level's failed requests."""
    return sum(level.client.errors.values())


def fault(level: Level) -> str:
    """Say why a level is not part of the curve; empty if it is."""
    if not level.client.requests:
        return level.ended or "no request was answered well"
    if not level.stable:
        return level.ended if level.ended not in {"", "unstable"} else "not stable"
    failed = failures(level)
    if failed > FEW_ERRORS * (failed + level.client.requests):
        return f"{count(failed)} errors beside {count(level.client.requests)} answers"
    return ""


def sound(levels: Sequence[Level]) -> list[Level]:
    """Return the levels of the curve, in order of load."""
    return sorted((level for level in levels if not fault(level)), key=lambda level: level.offered.value)


def best(levels: Sequence[Level]) -> Level | None:
    """Return the sound level with the highest throughput."""
    return max(sound(levels), key=lambda level: level.client.rows_per_s, default=None)


def power(level: Level) -> float:
    """Return Kleinrock's power: throughput divided by mean latency.

    Source: L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
    communications", ICC 1979.
    """
    mean = level.client.latency_us.get("mean", 0.0)
    return level.client.rows_per_s / mean if mean > 0 else 0.0


def knee(levels: Sequence[Level]) -> Level | None:
    """Return the sound level with the greatest power; None if there are fewer than two."""
    curve = sound(levels)
    return max(curve, key=power) if len(curve) > 1 else None


def goodput(level: Level, target_ms: float) -> float:
    """Return the inferences/s within a target, from the level's histogram. Raises: HistogramError."""
    share_in_target = distribution(level.client.histogram).share_within(target_ms * 1e3)
    return level.client.rows_per_s * share_in_target if math.isfinite(share_in_target) else 0.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """A run's goodput at a target: `most`, at level `at`; `meeting`: the busiest level with 99% within the target."""

    target_ms: float
    most: float
    at: Level
    meeting: Level | None


def goodput_of(levels: Sequence[Level], target_ms: float) -> Goodput | None:
    """Find the goodput of a run; None if no level is sound. Raises: HistogramError."""
    goodputs = [(goodput(level, target_ms), level) for level in sound(levels) if level.client.histogram]
    if not goodputs:
        return None
    best_goodput, best_level = max(goodputs, key=lambda pair: pair[0])
    met = [level for rows_per_s, level in goodputs if rows_per_s >= MET * level.client.rows_per_s]
    return Goodput(
        target_ms, best_goodput, best_level, max(met, key=lambda level: level.client.rows_per_s, default=None)
    )


def target_ms(document: Document, requested_ms: float | None = None) -> float | None:
    """Choose the target: as requested, the run's own, or p99 at the knee, rounded up to two digits."""
    if requested_ms or document.target_ms:
        return requested_ms or document.target_ms
    level = knee(document.levels) or best(document.levels)
    tail = level.client.latency_us.get("p99", 0.0) / 1e3 if level else 0.0
    if not tail > 0:
        return None
    step = 10.0 ** (math.floor(math.log10(tail)) - 1)
    return float(f"{math.ceil(round(tail / step, 6)) * step:.2g}")


def cautions(document: Document) -> list[str]:
    """Return warnings about the figures, the most serious first."""
    lines = [f"The run ended before its time: {document.failed}."] if document.failed else []
    if document.interrupted:
        lines.append("The run was interrupted: levels that were still to come are missing.")
    if not document.levels:
        lines.append("No level was measured.")
    for level in document.levels:
        name = load_words(level.offered)
        level_text = name[:1].upper() + name[1:]
        if reason := fault(level):
            lines.append(f"Not part of the curve: {name}: {reason}.")
        elif failed := failures(level):
            lines.append(f"{level_text}: {count(failed)} errors; they are in no other figure.")
        lines += [f"{level_text}: {warning}" for warning in _warnings(level)]
    return lines


def _warnings(level: Level) -> list[str]:
    client, lines = level.client, []
    if not client.requests:
        return []
    offered = level.offered.value
    if level.offered.kind != "concurrency" and client.requests_per_s < SHORT_OF_OFFERED * offered:
        lines.append(f"{per_s(offered)} were due, {per_s(client.requests_per_s)} were answered well.")
    late_p99_us, median_us = (client.late_us or {}).get("p99", 0.0), client.latency_us.get("p50", 0.0)
    if median_us and late_p99_us > GENERATOR_LATE * median_us:
        lines.append(
            f"the generator itself was late: 1% of requests left more than {late_p99_us:,.0f} us after they were due."
        )
    return lines
