"""Knobs: the tunable parts of a model's configuration, which settings make sense, and how they are written. Pure.

A Setting has only the knobs that differ from what is served, with their values, in the order of KNOBS. Configurations
are the JSON of Triton's ModelConfig, as a server reports it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

INSTANCES, THREADS = "instance_count", "intra_op_threads"
ROWS, DELAY, PREFERRED = "max_batch_size", "max_queue_delay", "preferred_batch_size"
KNOBS = (INSTANCES, THREADS, ROWS, DELAY, PREFERRED)
Setting = tuple[tuple[str, int], ...]
ORIGINAL: Setting = ()
AXES = ((INSTANCES, THREADS), (DELAY, PREFERRED), (ROWS,))
"""Knobs that interact are tried together."""
_DELAYS_US = (0, 100, 500, 2000)
_GPU_INSTANCES = (1, 2, 3, 4)
_PARAMETERS = {"onnxruntime": "intra_op_thread_count", "tensorflow": "TF_NUM_INTRA_THREADS"}
_NATIVE = {
    INSTANCES: ("instances", "count = {}"),
    THREADS: ("runtime", "intra_op_threads = {}"),
    ROWS: ("batching", "max_batch_size = {}"),
    DELAY: ("batching", "max_queue_delay_us = {}"),
    PREFERRED: ("batching", "preferred = [{}]"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of sensible settings: the server's `cores`, `rows` of a request, `rows_in_flight` (0: unknown)."""

    cores: int
    rows: int = 1
    rows_in_flight: int = 0
    target_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that differ from the search's current one in knobs that belong together."""

    name: str
    settings: tuple[Setting, ...]


def with_values(setting: Setting, values: Iterable[tuple[str, int]]) -> Setting:
    """Return a setting with other values."""
    values_by_knob = {**dict(setting), **dict(values)}
    return tuple((knob, values_by_knob[knob]) for knob in KNOBS if knob in values_by_knob)


def _only_changes(config: dict[str, Any], setting: Setting) -> Setting:
    return tuple(each for each in setting if value_of(config, ORIGINAL, each[0]) != each[1])


def unavailable_knobs(config: dict[str, Any]) -> dict[str, str]:
    """Return the knobs that this model does not have, with the reasons."""
    reasons = {}
    if len(_groups(config)) > 1:
        reasons[INSTANCES] = "it has several instance groups"
    if _backend(config) not in _PARAMETERS:
        reasons[THREADS] = f"its backend is {_backend(config) or 'not known'}, which has no such parameter"
    elif not _on_cpu(config):
        reasons[THREADS] = "its instances are on a GPU"
    if config.get("sequence_batching") is not None:
        reasons |= dict.fromkeys((ROWS, DELAY, PREFERRED), "it is a model of sequences")
    elif int(config.get("max_batch_size") or 0) < 2:
        reasons |= dict.fromkeys((ROWS, DELAY, PREFERRED), "its requests run alone: max_batch_size is below 2")
    return reasons


def axes(config: dict[str, Any], wanted_knobs: Iterable[str], bounds: Bounds, incumbent: Setting) -> Iterator[Axis]:
    """Yield what makes sense to try from the setting `incumbent`."""
    tunable = {*wanted_knobs} - unavailable_knobs(config).keys()
    for knobs in AXES:
        free = [knob for knob in knobs if knob in tunable]
        if not free:
            continue
        current = {knob: value_of(config, incumbent, knob) for knob in KNOBS}
        settings = []
        for values in product(*(_candidate_values(config, knob, bounds, incumbent) for knob in free)):
            values_by_knob = [(knob, value) for knob, value in zip(free, values, strict=True) if value is not None]
            candidate = current | dict(values_by_knob)
            if candidate != current and _is_sensible(config, candidate, bounds):
                settings.append(_only_changes(config, with_values(incumbent, values_by_knob)))
        if settings:
            yield Axis(" and ".join(free), tuple(dict.fromkeys(settings)))


def _candidate_values(config: dict[str, Any], knob: str, bounds: Bounds, incumbent: Setting) -> list[int | None]:
    current = value_of(config, incumbent, knob)
    rows = value_of(config, incumbent, ROWS) or 0
    values: set[int] = set()
    if knob == INSTANCES:
        values = _doublings(1, bounds.cores) if _on_cpu(config) else {*_GPU_INSTANCES}
    elif knob == THREADS:
        values = _doublings(1, bounds.cores)
        values -= {bounds.cores} if current is None else set()  # the default
    elif knob == ROWS:  # only more: fewer would reject requests that were served
        values = {2 * rows, 4 * rows}
    elif knob == DELAY:
        values = {each for each in _DELAYS_US if not bounds.target_us or each <= bounds.target_us / 2}
    elif knob == PREFERRED:
        # a size that equals all requests in flight would only look good: closed-loop clients fill it
        max_size = min(rows - 1, bounds.rows_in_flight // 2 or rows)
        values = {each for each in _doublings(4, max_size) if each >= bounds.rows and each & (each - 1) == 0}
    return [current, *sorted(values - {current})]


def _is_sensible(config: dict[str, Any], candidate: dict[str, int | None], bounds: Bounds) -> bool:
    if not _on_cpu(config):
        return True
    return (candidate[INSTANCES] or 1) * (candidate[THREADS] or bounds.cores) <= 2 * bounds.cores


def _doublings(first: int, last: int) -> set[int]:
    values = {last} if last >= first else set()
    while first <= last:
        values.add(first)
        first *= 2
    return values


def value_of(config: dict[str, Any], setting: Setting, knob: str) -> int | None:
    """Return the value of a knob; None if it is not set."""
    if knob in dict(setting):
        return dict(setting)[knob]
    batching = config.get("dynamic_batching") or {}
    if knob == INSTANCES:
        return sum(int(group.get("count") or 1) for group in _groups(config)) or 1
    if knob == THREADS:
        parameter = (config.get("parameters") or {}).get(_PARAMETERS.get(_backend(config), ""), {})
        text: str = parameter.get("string_value", "")
        return int(text) or None if text.isdigit() else None
    if knob == ROWS:
        return int(config.get("max_batch_size") or 0)
    if knob == DELAY:
        return int(batching.get("max_queue_delay_microseconds") or 0)
    sizes = batching.get("preferred_batch_size") or []
    return max(map(int, sizes)) if sizes else None


def reloadable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that can be loaded again, without what servers complete themselves.

    If no preferred size is set, every server reports the largest batch as such. Setting it explicitly would have an
    effect: Penstock would stop choosing sizes itself.
    """
    result = copy.deepcopy(config)
    batching = result.get("dynamic_batching") or {}
    sizes = [int(each) for each in batching.get("preferred_batch_size") or []]
    if sizes == [int(result.get("max_batch_size") or 0)]:
        del batching["preferred_batch_size"]
    return result


def apply_setting(config: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the complete configuration of a setting. `config` is one returned by `reloadable`."""
    result = copy.deepcopy(config)
    for knob, value in setting:
        if knob == INSTANCES:
            groups = _groups(result)
            if not groups:
                result["instance_group"] = groups = [{}]
            for group in groups:
                group["count"] = value
        elif knob == THREADS:
            result.setdefault("parameters", {})[_PARAMETERS[_backend(result)]] = {"string_value": str(value)}
        elif knob == ROWS:
            result["max_batch_size"] = value
        else:
            batching = result.setdefault("dynamic_batching", {})
            if knob == DELAY:
                batching["max_queue_delay_microseconds"] = value
            else:
                batching["preferred_batch_size"] = [value]
    return result


def to_penstock_toml(setting: Setting) -> str:
    """Return the equivalent lines of penstock.toml."""
    tables: dict[str, list[str]] = {}
    for knob, value in setting:
        table, line = _NATIVE[knob]
        tables.setdefault(table, []).append(line.format(value))
    return "\n\n".join("\n".join((f"[{table}]", *lines)) for table, lines in tables.items()) + "\n"


def describe(setting: Setting) -> str:
    """Format a setting."""
    units = {DELAY: " us"}
    return ", ".join(f"{knob} {value}{units.get(knob, '')}" for knob, value in setting) or "as it is"


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in config.get("instance_group") or [] if not group.get("passive")]


def _backend(config: dict[str, Any]) -> str:
    return str(config.get("backend") or str(config.get("platform") or "").partition("_")[0])


def _on_cpu(config: dict[str, Any]) -> bool:
    return all(group.get("kind") != "KIND_GPU" and not group.get("gpus") for group in _groups(config))
