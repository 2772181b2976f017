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
AS_IT_IS: Setting = ()
AXES = ((INSTANCES, THREADS), (DELAY, PREFERRED), (ROWS,))
"""Knobs that interact are tried together."""
_DELAYS_US = (0, 100, 500, 2000)
_ON_GPU = (1, 2, 3, 4)
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
    """The limits of sensible settings: the server's `cores`, `rows` of a request, `rows_under_way` (0: unknown)."""

    cores: int
    rows: int = 1
    rows_under_way: int = 0
    target_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that differ from the search's current one in knobs that belong together."""

    name: str
    settings: tuple[Setting, ...]


def turned(setting: Setting, values: Iterable[tuple[str, int]]) -> Setting:
    """Return a setting with other values."""
    said = {**dict(setting), **dict(values)}
    return tuple((knob, said[knob]) for knob in KNOBS if knob in said)


def _without_what_is(config: dict[str, Any], setting: Setting) -> Setting:
    return tuple(each for each in setting if value_of(config, AS_IT_IS, each[0]) != each[1])


def unable(config: dict[str, Any]) -> dict[str, str]:
    """Return the knobs that this model does not have, with the reasons."""
    found = {}
    if len(_groups(config)) > 1:
        found[INSTANCES] = "it has several instance groups"
    if _backend(config) not in _PARAMETERS:
        found[THREADS] = f"its backend is {_backend(config) or 'not known'}, which has no such parameter"
    elif not _on_cpu(config):
        found[THREADS] = "its instances are on a GPU"
    if config.get("sequence_batching") is not None:
        found |= dict.fromkeys((ROWS, DELAY, PREFERRED), "it is a model of sequences")
    elif int(config.get("max_batch_size") or 0) < 2:
        found |= dict.fromkeys((ROWS, DELAY, PREFERRED), "its requests run alone: max_batch_size is below 2")
    return found


def axes(config: dict[str, Any], over: Iterable[str], bounds: Bounds, at: Setting) -> Iterator[Axis]:
    """Yield what makes sense to try from the setting `at`."""
    wanted = {*over} - unable(config).keys()
    for knobs in AXES:
        free = [knob for knob in knobs if knob in wanted]
        if not free:
            continue
        here = {knob: value_of(config, at, knob) for knob in KNOBS}
        settings = []
        for values in product(*(_values(config, knob, bounds, at) for knob in free)):
            said = [(knob, value) for knob, value in zip(free, values, strict=True) if value is not None]
            there = here | dict(said)
            if there != here and _sensible(config, there, bounds):
                settings.append(_without_what_is(config, turned(at, said)))
        if settings:
            yield Axis(" and ".join(free), tuple(dict.fromkeys(settings)))


def _values(config: dict[str, Any], knob: str, bounds: Bounds, at: Setting) -> list[int | None]:
    here = value_of(config, at, knob)
    rows = value_of(config, at, ROWS) or 0
    found: set[int] = set()
    if knob == INSTANCES:
        found = _doublings(1, bounds.cores) if _on_cpu(config) else {*_ON_GPU}
    elif knob == THREADS:
        found = _doublings(1, bounds.cores)
        found -= {bounds.cores} if here is None else set()  # the default
    elif knob == ROWS:  # only more: fewer would reject requests that were served
        found = {2 * rows, 4 * rows}
    elif knob == DELAY:
        found = {each for each in _DELAYS_US if not bounds.target_us or each <= bounds.target_us / 2}
    elif knob == PREFERRED:
        # a size that equals all requests in flight would only look good: closed-loop clients fill it
        most = min(rows - 1, bounds.rows_under_way // 2 or rows)
        found = {each for each in _doublings(4, most) if each >= bounds.rows and each & (each - 1) == 0}
    return [here, *sorted(found - {here})]


def _sensible(config: dict[str, Any], there: dict[str, int | None], bounds: Bounds) -> bool:
    if not _on_cpu(config):
        return True
    return (there[INSTANCES] or 1) * (there[THREADS] or bounds.cores) <= 2 * bounds.cores


def _doublings(first: int, last: int) -> set[int]:
    found = {last} if last >= first else set()
    while first <= last:
        found.add(first)
        first *= 2
    return found


def value_of(config: dict[str, Any], setting: Setting, knob: str) -> int | None:
    """Return the value of a knob; None if it is not set."""
    if knob in dict(setting):
        return dict(setting)[knob]
    batching = config.get("dynamic_batching") or {}
    if knob == INSTANCES:
        return sum(int(group.get("count") or 1) for group in _groups(config)) or 1
    if knob == THREADS:
        said = (config.get("parameters") or {}).get(_PARAMETERS.get(_backend(config), ""), {}).get("string_value", "")
        return int(said) or None if said.isdigit() else None
    if knob == ROWS:
        return int(config.get("max_batch_size") or 0)
    if knob == DELAY:
        return int(batching.get("max_queue_delay_microseconds") or 0)
    sizes = batching.get("preferred_batch_size") or []
    return max(map(int, sizes)) if sizes else None


def base(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that can be loaded again, without what servers complete themselves.

    If no preferred size is set, every server reports the largest batch as such. Setting it explicitly would have an
    effect: Penstock would stop choosing sizes itself.
    """
    made = copy.deepcopy(config)
    batching = made.get("dynamic_batching") or {}
    sizes = [int(each) for each in batching.get("preferred_batch_size") or []]
    if sizes == [int(made.get("max_batch_size") or 0)]:
        del batching["preferred_batch_size"]
    return made


def written(config: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Return the complete configuration of a setting. `config` is one returned by `base`."""
    made = copy.deepcopy(config)
    for knob, value in setting:
        if knob == INSTANCES:
            groups = _groups(made)
            if not groups:
                made["instance_group"] = groups = [{}]
            for group in groups:
                group["count"] = value
        elif knob == THREADS:
            made.setdefault("parameters", {})[_PARAMETERS[_backend(made)]] = {"string_value": str(value)}
        elif knob == ROWS:
            made["max_batch_size"] = value
        else:
            batching = made.setdefault("dynamic_batching", {})
            if knob == DELAY:
                batching["max_queue_delay_microseconds"] = value
            else:
                batching["preferred_batch_size"] = [value]
    return made


def native(setting: Setting) -> str:
    """Return the equivalent lines of penstock.toml."""
    tables: dict[str, list[str]] = {}
    for knob, value in setting:
        table, line = _NATIVE[knob]
        tables.setdefault(table, []).append(line.format(value))
    return "\n\n".join("\n".join((f"[{table}]", *lines)) for table, lines in tables.items()) + "\n"


def shown(setting: Setting) -> str:
    """Format a setting."""
    units = {DELAY: " us"}
    return ", ".join(f"{knob} {value}{units.get(knob, '')}" for knob, value in setting) or "as it is"


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in config.get("instance_group") or [] if not group.get("passive")]


def _backend(config: dict[str, Any]) -> str:
    return str(config.get("backend") or str(config.get("platform") or "").partition("_")[0])


def _on_cpu(config: dict[str, Any]) -> bool:
    return all(group.get("kind") != "KIND_GPU" and not group.get("gpus") for group in _groups(config))
