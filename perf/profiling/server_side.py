"""The server's side: its statistics over a time, from responses of the statistics extension before and after. Pure.

Source: the v2 protocol's statistics extension. The choice of version and the divisors are perf_analyzer's: times are
means over the requests that were timed, and a request's time beyond queue, compute and cache is overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.perf.reports.document import ServerSide

Answer = Mapping[str, Sequence[Mapping[str, Any]]]
"""`model_stats` at one moment, by the requested model name."""
_Counters = dict[str, int]

_TIMED = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_WHOLE = ("inference_count", "execution_count")
_ROWS = "rows "


def statistics_between(
    answers: Sequence[Answer], model: str, version: str = "", composing: Iterable[tuple[str, str]] = ()
) -> tuple[ServerSide | None, str]:
    """Return what was counted from the first response to the last, and why this is missing or incomplete.

    `answers`: ascending in time, two or more; those in between show whether the server was restarted meanwhile.
    `version`: if empty, the highest that had a request. `composing`: an ensemble's models.
    """
    side, reason = _of_model(answers, model, version)
    if side is None:
        return None, reason
    for name, composing_version in composing:
        composing_side, missing = _of_model(answers, name, composing_version)
        if composing_side is None:
            reason = reason or missing
        else:
            side.composing[name] = composing_side
    return (_ensemble(side) if side.composing else side), reason


def _of_model(answers: Sequence[Answer], model: str, version: str) -> tuple[ServerSide | None, str]:
    readings = [{str(each.get("version", "")): each for each in answer.get(model, ())} for answer in answers]
    if len(readings) < 2 or not readings[0] or not readings[-1]:
        return None, f"{model}: the server gives no statistics"
    readings = [each for each in readings if each]  # a failed query says nothing
    chosen, reason = (version, "") if version else _choose_version(model, readings[0], readings[-1])
    if not chosen:
        return None, reason
    if chosen not in readings[-1]:
        return None, f"{model}: no statistics of version {chosen}, which was unloaded, or is not there"
    counters = [_counters(each.get(chosen, {})) for each in readings]
    if not all(_kept_counting(before, after) for before, after in pairwise(counters)):
        return None, f"{model}: its statistics began anew meanwhile: the server or the model was started again"
    return _make_side(chosen, _difference(counters[0], counters[-1])), reason


def _choose_version(model: str, first_answer: Mapping[str, Any], last_answer: Mapping[str, Any]) -> tuple[str, str]:
    """Choose the highest version that took a request, or else one that failed one. Also return a note."""
    for counter in ("queue.count", "fail.count"):
        versions_moved = [
            version
            for version, entry in last_answer.items()
            if _counters(entry).get(counter, 0) != _counters(first_answer.get(version, {})).get(counter, 0)
        ]
        if versions_moved:
            highest = max(versions_moved, key=lambda version: (int(version) if version.isdecimal() else -1, version))
            return highest, f"{model}: {len(versions_moved)} versions had requests, this is {highest}" if len(
                versions_moved
            ) > 1 else ""
    return "", f"{model}: no version of it counted a request"


def _counters(entry: Mapping[str, Any]) -> _Counters:
    """Flatten the counters. Values that are absent or not whole numbers are left out, since servers differ."""
    counters = {name: _parse_count(entry.get(name)) for name in _WHOLE}
    timed = entry.get("inference_stats")
    for name in _TIMED:
        duration = timed.get(name) if isinstance(timed, Mapping) else None
        if isinstance(duration, Mapping):
            counters |= {f"{name}.{figure}": _parse_count(duration.get(figure)) for figure in ("count", "ns")}
    for batch in entry.get("batch_stats") or ():
        duration = batch.get("compute_infer") if isinstance(batch, Mapping) else None
        if isinstance(duration, Mapping):
            counters[f"{_ROWS}{batch.get('batch_size')}"] = _parse_count(duration.get("count"))
    return {name: value for name, value in counters.items() if value is not None}


def _parse_count(value: Any) -> int | None:
    """Parse a count; protobuf's own JSON writes 64-bit integers as text."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count >= 0 else None


def _kept_counting(before: _Counters, after: _Counters) -> bool:
    return all(after.get(name, 0) >= value for name, value in before.items())


def _difference(before: _Counters, after: _Counters) -> _Counters:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def _make_side(version: str, counter_growth: _Counters) -> ServerSide:
    def mean_us(*names: str) -> float:
        count = counter_growth.get(f"{names[0]}.count", 0)
        return sum(counter_growth.get(f"{name}.ns", 0) for name in names) / count / 1e3 if count else 0.0

    hits = counter_growth.get("cache_hit.count", 0)
    served = counter_growth.get("compute_infer.count", 0) + hits
    spent_ns = sum(counter_growth.get(f"{name}.ns", 0) for name in (*_COMPUTE, "cache_hit", "cache_miss"))
    executions, inferences = counter_growth.get("execution_count", 0), counter_growth.get("inference_count", 0)
    request_us, queue_us = mean_us("success"), mean_us("queue")
    batches = {
        name.removeprefix(_ROWS): value for name, value in counter_growth.items() if name.startswith(_ROWS) and value
    }
    return ServerSide(
        inferences=inferences,
        executions=executions,
        requests=counter_growth.get("success.count", 0),
        queue_us=queue_us,
        compute_input_us=mean_us("compute_input"),
        compute_infer_us=mean_us("compute_infer"),
        compute_output_us=mean_us("compute_output"),
        overhead_us=max(request_us - queue_us - (spent_ns / served / 1e3 if served else 0.0), 0.0),
        rows_per_batch=inferences / executions if executions else 0.0,
        cache_hits=hits,
        failed=counter_growth.get("fail.count", 0),
        batches=dict(sorted(batches.items(), key=lambda item: (len(item[0]), item[0]))),
        version=version,
        request_us=request_us,
        cache_misses=counter_growth.get("cache_miss.count", 0),
        cache_hit_us=mean_us("cache_hit"),
        cache_miss_us=mean_us("cache_miss"),
    )


def _ensemble(side: ServerSide) -> ServerSide:
    """Give an ensemble the sums of its models' times, since it has none of its own. The rest is overhead."""
    parts = side.composing.values()
    queue_us = sum(part.queue_us for part in parts)
    each = {name: sum(getattr(part, f"{name}_us") for part in parts) for name in _COMPUTE}
    cached_us = sum(
        part.cache_hit_us * _hit_share(part) + part.cache_miss_us * (1 - _hit_share(part)) for part in parts
    )
    return replace(
        side,
        queue_us=queue_us,
        compute_input_us=each["compute_input"],
        compute_infer_us=each["compute_infer"],
        compute_output_us=each["compute_output"],
        overhead_us=max(side.request_us - queue_us - sum(each.values()) - cached_us, 0.0),
    )


def _hit_share(side: ServerSide) -> float:
    """Return the fraction of cache hits."""
    lookups = side.cache_hits + side.cache_misses
    return side.cache_hits / lookups if lookups else 0.0
